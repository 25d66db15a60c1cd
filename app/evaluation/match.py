"""Does an answer hold a gold answer, does it decline, do a sentence's facts stand in a text?

All three compare whole words: "8" is not in "18", and "84" is not in "84.5".
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from types import MappingProxyType

from rag.cite import facts

#: Number words that count as the number.
_NUMBER_WORDS = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen twenty
"""
_NUMBERS = MappingProxyType({word: str(value) for value, word in enumerate(_NUMBER_WORDS.split())})
_TOKEN = re.compile(r"\d+(?:[.,:/]\d+)*|[^\W\d_]+|[%°€$£]")
#: How a model says that the documents hold no answer.
_DECLINES = re.compile(
    r"\b(?:documents?|text|passages?|context|information)\b[^.]{0,60}\b(?:do(?:es)?\s*n[o']t|not|no|n't)\b"
    r"|\b(?:not|n't|no)\b[^.]{0,40}\b(?:mention|state|stated|say|specif|provide|contain|includ|given|"
    r"information|known|documents?)\w*",
    re.I,
)


def words(text: str) -> list[str]:
    """Words and numbers, case-folded, without accents; "three" as "3", "1,050" as "1050"."""
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", text).casefold())
    folded = "".join(c for c in folded if not unicodedata.combining(c))
    found = []
    for token in _TOKEN.findall(folded):
        if re.fullmatch(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?", token):
            token = token.replace(",", "")
        found.append(_NUMBERS.get(token, token))
    return found


def stands_in(wanted: str, text: str | Sequence[str]) -> bool:
    """True where the words of `wanted` stand in `text` (or its `words`), one after the other."""
    needle = words(wanted)
    hay = words(text) if isinstance(text, str) else list(text)
    if not needle:
        return False
    return any(hay[i : i + len(needle)] == needle for i in range(len(hay) - len(needle) + 1))


def holds_answer(answer: str, gold: Iterable[str]) -> bool:
    """True where any of the gold answers stands in the answer."""
    given = words(answer)
    return any(stands_in(wanted, given) for wanted in gold)


def declines(answer: str) -> bool:
    """True where the answer says that the documents hold none. An empty answer declines as well."""
    return not answer.strip() or bool(_DECLINES.search(answer))


def facts_stand_in(sentence: str, texts: Sequence[str]) -> bool:
    """True where every number, date and name of the sentence stands in one and the same of the texts."""
    claims = facts(sentence)
    return any(all(stands_in(claim, given) for claim in claims) for given in map(words, texts))
