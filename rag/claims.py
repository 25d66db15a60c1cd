"""What a sentence claims, and whether a text says it literally: sentences, facts (numbers, dates, names,
codes), denials, and the comparison of a fact with a text."""

from __future__ import annotations

import re

from rag.terms import STOP_WORDS, UNSPACED, compatible

_SENTENCE_END = re.compile(
    r"(?<=[.!?…])[\"'”’)\]]*(?:\s+|\Z)|(?<=[。！？｡])[」』”’）]*\s*|\n\s*\n\s*|\n(?=\s*(?:[-*•]|\d+[.)])\s)"
)
# "Dr. Quill", "approx. 5", "J. Dow", "No. 4": a full stop that ends no sentence.
_ABBREVIATION = re.compile(
    r"(?:\b(?i:Mr|Mrs|Ms|Dr|Prof|St|Capt|No|Nr|vs|etc|e\.g|i\.e|approx|ca|fig|vol|pp?)|(?P<initial>\b[A-Z]))\.$"
)
#: More characters than an abbreviation has, with one before it.
_LAST = 16
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
_GOES_ON = STOP_WORDS | OPENERS | {"never"}
NEGATION = re.compile(
    r"\b(?:not|no|never|none|neither|nor|without|cannot|nobody|nothing|avoid|forbidden|prohibited)\b|n['’]t\b"
    r"|不|没|沒|未|勿|禁止|ない|ません|않|없|아니",
    re.I,
)
_NUMBER_NAMES = "zero one two three four five six seven eight nine ten eleven twelve"
NUMBER_WORDS = {word: str(value) for value, word in enumerate(_NUMBER_NAMES.split())}
_IN_WORDS = {number: word for word, number in NUMBER_WORDS.items()}
_BEFORE_WORD = re.compile(rf"(?<!{IN_WORD})")
_BEFORE = re.compile(rf"(?<!{IN_WORD})(?<![.,])")
_BEHIND_WORD = re.compile(rf"(?!{IN_WORD}|[.,:]\d)")
_BEHIND_NUMBER = re.compile(r"(?!\d|[.,:]\d)")
_PLAIN_NUMBER = re.compile(r"[-+]?[\d.,:]+")
_REST_OF_WORD = re.compile(rf"{IN_WORD}+")
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
        if "\n" not in match.group():
            short = _ABBREVIATION.search(text[max(cuts[-1], match.start() - _LAST) : match.start()])
            if short and short["initial"] and (following := _NEXT_WORD.match(text, match.end())):
                # "Descale with Kalkfrei B. The programme…": a person's name does not go on like that.
                short = None if following.group().lower() in _GOES_ON else short
            if short:
                continue
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
    text = compatible(text).replace("−", "-").replace("–", "-").replace("’", "'")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return re.sub(r"\s+", " ", text)


def folded(text: str) -> str:
    """`normal` without regard to case: what a fact is looked for in. Letter for letter, so that no word comes
    apart (`casefold` makes a letter and a mark of some)."""
    return normal(text).replace("İ", "I").lower().replace("ς", "σ")


def stands_in(fact: str, text: str) -> bool:
    """Whether a fact stands in a `folded` text: literally, as a whole word; names without regard to case,
    "three" also as "3"."""
    wanted = folded(fact)
    # A number may have its unit attached, but not another digit.
    behind = _BEHIND_NUMBER if _PLAIN_NUMBER.fullmatch(wanted) else _BEHIND_WORD
    if _stands(wanted, text, _BEFORE, behind):
        return True
    other = NUMBER_WORDS.get(wanted) or _IN_WORDS.get(wanted)
    return other is not None and _stands(other, text, _BEFORE_WORD, _BEHIND_WORD)


def _stands(wanted: str, text: str, before: re.Pattern[str], behind: re.Pattern[str]) -> bool:
    """A text is searched for each of a sentence's facts: find it first, and look at what is around it then,
    is a hundred times as fast as an expression for each."""
    at = text.find(wanted) if wanted else -1
    while at >= 0:
        if before.match(text, at) and behind.match(text, at + len(wanted)):
            return True
        # It begins within no word, hence not before this one ends.
        rest = _REST_OF_WORD.match(text, at)
        at = text.find(wanted, max(at + 1, rest.end() if rest else 0))
    return False


def numbers_of(text: str) -> frozenset[float]:
    """The numbers of a `normal` text; the day and the year of "2021-05-03" too."""
    return frozenset(float(part) for part in re.findall(r"\d+(?:\.\d+)?", text))


def lacks(fact: str, text: str, numbers: frozenset[float]) -> bool:
    """Whether a fact that does not stand in a `normal` text is a number or a date that it has in no other
    form ("46" for "46.0", "May" for "2021-05-03") either. `numbers` are `numbers_of` the text."""
    if DATES.fullmatch(fact):
        short = fact[:3].lower()
        if any(other[:3].lower() == short for other in DATES.findall(text)):
            return False
        month = _MONTHS.index(short) + 1 if short in _MONTHS else 0
        return not (month and re.search(rf"\b\d{{4}}[-/.]{month:02}\b", text))
    value = _value(NUMBER_WORDS.get(fact.lower(), fact))
    if value is None:
        return any(c.isdigit() for c in fact)  # a code, a time
    return value not in numbers


def _value(number: str) -> float | None:
    try:
        return float(normal(number))
    except ValueError:
        return None
