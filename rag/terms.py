"""Text to search terms, for every script.

Words of spaced scripts are case-folded, stripped of accents and lightly stemmed; runs of Chinese, Japanese,
Korean, Thai, Lao, Khmer and Burmese, which put no spaces between words, become single characters and pairs
of neighbours. Compatibility forms (full width, half width) count as the plain ones (NFKC).
"""

from __future__ import annotations

import re
import unicodedata

#: Character ranges of scripts without spaces, for use inside a regular expression's "[…]".
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u3005-\u3007\u3041-\u30ff\u31f0-\u31ff"  # kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
    "\uac00-\ud7af\u1100-\u11ff\u3130-\u318f"  # Hangul
)
_LETTER = rf"[^\W{UNSPACED}]|[\u0300-\u036f\u0900-\u0dff]"
_TOKEN = re.compile(
    rf"(?P<number>\d{{1,3}}(?:,\d{{3}})+(?!\d)(?:\.\d+)?)"
    rf"|(?P<run>[{UNSPACED}]+)"
    rf"|(?P<word>(?:{_LETTER})+(?:[-_.'’](?:{_LETTER})+)*)"
)
#: Where more marks may stand upon one letter than any script has. All marks are among these signs.
_ROW_OF_MARKS = re.compile("(?:[^\\w\x00-\x7f]|[\uff9e\uff9f]){31,}")
_MAX_MARKS = 30
_VOWEL = re.compile(r"[aeiouy]")
#: Function words that say nothing about what a text is about. Only left out of questions.
_STOP_WORDS = """
    a about an and any are as at be been but by can could did do does for from had has have how i if in
    into is it its many me much my of on or our please she so such tell than that the their them then there
    these they this those to was we were what when where which who whom whose why will with would you your he
    her his him
"""
_MAX_TERM = 64


def terms(text: str) -> list[str]:
    """Search terms in order, with repetitions. Only letters, digits, "-", "." and "_" occur in them."""
    found: list[str] = []
    for match in _TOKEN.finditer(compatible(text).casefold()):
        kind, value = match.lastgroup, match.group()
        if kind == "number":
            found.append(value.replace(",", ""))
        elif kind == "run":
            found += value
            found += (value[i : i + 2] for i in range(len(value) - 1))
        else:
            found += _word(value)
    return found


def compatible(text: str) -> str:
    """Compatibility form (NFKC) of a text, of rows of marks the first 30, as in Unicode's stream-safe text.

    Marks are brought in order by moving each past those before it: a row of 40,000 takes seconds, in which
    no other thread runs.
    """
    return unicodedata.normalize("NFKC", _ROW_OF_MARKS.sub(_fewer_marks, text))


def _fewer_marks(row: re.Match[str]) -> str:
    kept: list[str] = []
    marks = 0
    for sign in row.group():
        marks = marks + 1 if unicodedata.combining(unicodedata.normalize("NFKD", sign)[0]) else 0
        if marks <= _MAX_MARKS:
            kept.append(sign)
    return "".join(kept)


def query_terms(text: str, limit: int = 48) -> list[str]:
    """The distinct terms of a question, without function words unless there is nothing else."""
    distinct = list(dict.fromkeys(terms(text)))
    telling = [t for t in distinct if t not in STOP_WORDS]
    return (telling or distinct)[:limit]


def _word(value: str) -> list[str]:
    value = value.replace("’", "'")
    if value.endswith("'s"):
        value = value[:-2]
    value = _fold(value)[:_MAX_TERM]
    parts = [p for p in re.split(r"[-_.']", value) if p]
    if not parts:
        return []
    if len(parts) == 1:
        return [stem(parts[0])]
    # "CL-450" and "v2.1" are found whole as well as by their parts; "don't" only by its parts.
    whole = [] if "'" in value else [value]
    return whole + [stem(p) for p in parts]


def _fold(value: str) -> str:
    """Latin letters without their accents."""
    if value.isascii():
        return value
    return "".join(
        c
        for c in unicodedata.normalize("NFC", "".join(_base(c) for c in value))
        if not "\u0300" <= c <= "\u036f"
    )


def _base(char: str) -> str:
    decomposed = unicodedata.normalize("NFD", char)
    return decomposed[0] if decomposed[0].isascii() else char


def stem(word: str) -> str:
    """A light English stemmer: plurals, -ed, -ing and a final e. Leaves numbers and other languages alone."""
    if len(word) <= 3 or not word.isascii() or not word.isalpha():
        return word
    if word.endswith("ies") and len(word) > 4:
        word = word[:-3] + "y"
    elif word.endswith(("sses", "ches", "shes", "xes", "zes")):
        word = word[:-2]
    elif word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-1]
    for ending in ("ing", "ed"):
        root = word[: -len(ending)]
        if word.endswith(ending) and len(root) >= 3 and _VOWEL.search(root):
            word = root[:-1] if root[-1] == root[-2] and root[-1] not in "lsz" else root
            break
    if word.endswith("e") and len(word) > 4:
        word = word[:-1]
    return word[:-1] + "i" if word.endswith("y") and len(word) > 3 and word[-2] not in "aeiou" else word


#: As they are written and as `terms` gives them: "does" becomes "doe".
STOP_WORDS = frozenset(_STOP_WORDS.split()) | frozenset(map(stem, _STOP_WORDS.split()))
