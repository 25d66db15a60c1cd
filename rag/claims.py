"""What a sentence claims, and whether a text says it literally: sentences, facts (numbers, dates, names,
codes), denials, and the comparison of a fact with a text."""

from __future__ import annotations

import re
import unicodedata

from rag.terms import STOP_WORDS, UNSPACED

_SENTENCE_END = re.compile(
    r"(?<=[.!?…])[\"'”’)\]]*(?:\s+|\Z)|(?<=[。！？｡])[」』”’）]*\s*|\n\s*\n\s*|\n(?=\s*(?:[-*•]|\d+[.)])\s)"
)
# "Dr. Quill", "approx. 5", "J. Dow", "No. 4": a full stop that ends no sentence.
_ABBREVIATION = re.compile(
    r"(?:\b(?i:Mr|Mrs|Ms|Dr|Prof|St|Capt|No|Nr|vs|etc|e\.g|i\.e|approx|ca|fig|vol|pp?)|(?P<initial>\b[A-Z]))\.$"
)
_NEXT_WORD = re.compile(r"\w+")
# A character of a word; numbers may touch the signs of scripts without spaces ("24个月").
IN_WORD = rf"[^\W{UNSPACED}]"
NUMBER = re.compile(
    rf"(?<!{IN_WORD})[^\W\d_{UNSPACED}]+-?\d(?:{IN_WORD}|-)*"  # codes: V-17, CL450
    rf"|(?<!{IN_WORD})(?<![.,])[-+−]?\d+(?:[.,:]\d+)*"  # 12, 1,050.5, 14:30, and 46 of "46kWh"
)
_NAME = re.compile(r"\b[A-ZÀ-ÖØ-Þ][\w'’-]*")
#: Words that merely begin a sentence. Any other capitalised word must stand in the passage.
_OPENING_WORDS = """
after according additionally all also although answer based because before between both during each every
first furthermore however instead many most no once only otherwise over several since some therefore though
thus under until usually while within yes yet
"""
OPENERS = frozenset(_OPENING_WORDS.split())
NEGATION = re.compile(
    r"\b(?:not|no|never|none|neither|nor|without|cannot|nobody|nothing|avoid|forbidden|prohibited)\b|n['’]t\b"
    r"|不|没|沒|未|勿|禁止|ない|ません|않|없|아니",
    re.I,
)
_NUMBER_NAMES = "zero one two three four five six seven eight nine ten eleven twelve"
NUMBER_WORDS = {word: str(value) for value, word in enumerate(_NUMBER_NAMES.split())}
#: Days and months, as far as one tells them from another word; longer and shorter forms are the same.
DATES = re.compile(
    r"\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Sept|Oct|Nov|Dec|Mon|Tues?|Wed|Thu(?:rs?)?|Fri|Sat|Sun|"
    r"January|February|March|April|June|July|August|September|October|November|December|"
    r"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)days?)\b"
)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
#: What a list puts before its items, and what points at a source: no numbers of the sentence.
_NO_CLAIM = re.compile(r"^\s*\d+[.)](?:\s+|\Z)|\[\d+\]")


def sentences(text: str) -> list[tuple[int, int]]:
    """Ranges of the sentences and list items of a text, without the white space around them."""
    cuts = [0]
    for match in _SENTENCE_END.finditer(text):
        short = _ABBREVIATION.search(text[cuts[-1] : match.start()].rstrip("\"'”’)]"))
        if short and short["initial"] and (following := _NEXT_WORD.match(text, match.end())):
            # "Descale with Kalkfrei B. The programme…": a person's name does not go on like that.
            short = None if following.group().lower() in STOP_WORDS | OPENERS | {"never"} else short
        if not short or "\n" in match.group():
            cuts.append(match.end())
    found: list[tuple[int, int]] = []
    for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True):
        part = text[start:end]
        if part.strip():
            lead = len(part) - len(part.lstrip())
            found.append((start + lead, start + lead + len(part.strip())))
    return found


def facts(sentence: str) -> list[str]:
    """The numbers, dates and names of a sentence, each as it is written.

    Every capitalised word counts as a name, but for function words, so that none is missed; codes like
    "V-17" count as numbers. Number words up to twelve are facts too. The number of a list item and "[1]" are
    none.
    """
    sentence = without_marks(sentence)
    found: list[str] = [m.group() for m in NUMBER.finditer(sentence)]
    for match in _NAME.finditer(sentence):
        bare = re.sub(r"['’]s$", "", match.group())
        if bare.lower() not in STOP_WORDS and bare.lower() not in OPENERS:
            found.append(bare)
    found += [
        w
        for w in re.findall(r"\b[a-z]+\b", sentence.lower())
        if w in NUMBER_WORDS and w not in ("one", "zero")
    ]
    return list(dict.fromkeys(found))


def without_marks(sentence: str) -> str:
    """Without the number of a list item and without "[1]"."""
    return _NO_CLAIM.sub(" ", sentence)


def normal(text: str) -> str:
    """For literal comparison: compatibility forms, dashes and quotes made equal, white space collapsed."""
    text = unicodedata.normalize("NFKC", text).replace("−", "-").replace("–", "-").replace("’", "'")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return re.sub(r"\s+", " ", text)


def _after(fact: str) -> str:
    """What may not follow: a number may have its unit attached, but not another digit."""
    return r"\d" if re.fullmatch(r"[-+]?[\d.,:]+", fact) else IN_WORD


def stands_in(fact: str, text: str) -> bool:
    """Whether a fact stands in a `normal` text: literally, as a whole word; names without regard to case,
    "three" also as "3"."""
    wanted = normal(fact)
    pattern = rf"(?<!{IN_WORD})(?<![.,]){re.escape(wanted)}(?!{_after(wanted)}|[.,:]\d)"
    if re.search(pattern, text, re.I):
        return True
    other = NUMBER_WORDS.get(wanted.lower()) or next(
        (w for w, d in NUMBER_WORDS.items() if d == wanted), None
    )
    if other is None:
        return False
    return re.search(rf"(?<!{IN_WORD}){other}(?!{IN_WORD}|[.,:]\d)", text, re.I) is not None


def lacks(fact: str, text: str) -> bool:
    """Whether a fact that does not stand in a `normal` text is a number or a date that it has in no other
    form ("46" for "46.0", "May" for "2021-05-03") either."""
    if DATES.fullmatch(fact):
        short = fact[:3].lower()
        if any(other[:3].lower() == short for other in DATES.findall(text)):
            return False
        month = _MONTHS.index(short) + 1 if short in _MONTHS else 0
        return not (month and re.search(rf"\b\d{{4}}[-/.]{month:02}\b", text))
    value = _value(NUMBER_WORDS.get(fact.lower(), fact))
    if value is None:
        return any(c.isdigit() for c in fact)  # a code, a time
    # The day and the year of "2021-05-03" are numbers of the text too.
    return all(_value(part) != value for part in re.findall(r"\d+(?:\.\d+)?", text))


def _value(number: str) -> float | None:
    try:
        return float(normal(number))
    except ValueError:
        return None
