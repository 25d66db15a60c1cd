"""What people read, in English and in Traditional Chinese.

How to: add a line to a catalogue (`words_chat.py` …): `"library.freed": ("{n:,} block freed|{n:,} blocks freed",
"已釋出 {n:,} 個區塊")`; before `|` stands what is said of exactly one `n`. Then, in a component `mark("library.freed")`,
in an `.html` or `.js` file of a page `@@library.freed@@` (the server puts the text in as it sends the page; in
scripts `say("@@library.freed@@", { n: 3 })` fills it), in a handler `w = of(request.headers)` and
`w("library.freed", n=3)`. Far from any request raise or store `phrase("library.freed", n=3)`: a `str` in English,
for programs, that `w.tell` and `w.sentence` can still translate.

The language is the one that a person switched to (a cookie), else the first that the browser asks for. One
decision, made here on the server: `words_page` tells Gradio's own texts, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from starlette.requests import cookie_parser

from app.http_errors import sentence
from app.pages import words_account, words_chat, words_dashboard, words_library, words_memory

Language = Literal["en", "zh-Hant"]
LANGUAGES: tuple[Language, ...] = ("en", "zh-Hant")
COOKIE = "coread_language"
MARK = re.compile(r"@@([a-z0-9_]+(?:\.[a-z0-9_]+)+)@@")
_CATALOGUES = (
    words_chat.TEXTS, words_library.TEXTS, words_memory.TEXTS, words_dashboard.TEXTS, words_account.TEXTS,
)  # fmt: skip


class UnknownText(KeyError):
    """A page asks for a text that no catalogue has, or two catalogues have one key."""


def _joined(catalogues: Iterable[Mapping[str, tuple[str, str]]]) -> Mapping[str, tuple[str, str]]:
    texts: dict[str, tuple[str, str]] = {}
    for catalogue in catalogues:
        if double := texts.keys() & catalogue.keys():
            raise UnknownText(f"two catalogues have the keys {sorted(double)}")
        texts.update(catalogue)
    return MappingProxyType(texts)


#: Every text: English, Traditional Chinese.
TEXTS: Mapping[str, tuple[str, str]] = MappingProxyType(_joined(_CATALOGUES))


def _text(key: str, language: Language) -> str:
    try:
        return TEXTS[key][LANGUAGES.index(language)]
    except KeyError:
        raise UnknownText(f"no catalogue has the text {key!r}") from None


def filled(text: str, values: Mapping[str, Any]) -> str:
    """`text` with its places filled; of `one|many` the part that `values["n"]` asks for."""
    one, bar, many = text.partition("|")
    return (many if bar and values.get("n") != 1 else one).format(**values)


class Phrase(str):
    """A sentence in English, for programs and logs, that knows how to be said in other languages."""

    __slots__ = ("key", "values")
    key: str
    values: Mapping[str, Any]

    def stored(self) -> dict[str, Any]:
        """For JSON: its key and its values (see `from_stored`)."""
        return {"key": self.key, "values": dict(self.values)}


def from_stored(made: Any) -> Phrase | None:
    """A phrase that was stored; None for one that this version does not know."""
    try:
        return phrase(made["key"], **made["values"])
    except (KeyError, TypeError, ValueError, IndexError):
        return None


def phrase(key: str, **values: Any) -> Phrase:
    """The text `key`, filled, as a `Phrase`. Raises `UnknownText`."""
    made = Phrase(filled(_text(key, "en"), values))
    made.key, made.values = key, MappingProxyType(values)
    return made


def mark(key: str) -> str:
    """What stands for a text in a component until the page is sent. Raises `UnknownText`."""
    _text(key, "en")
    return f"@@{key}@@"


@dataclass(frozen=True, slots=True)
class Words:
    """The texts in one language."""

    language: Language

    def __call__(self, key: str, **values: Any) -> str:
        """The text `key`, filled. Raises `UnknownText`."""
        return filled(_text(key, self.language), values)

    def tell(self, text: str) -> str:
        """A sentence that was made elsewhere: a `Phrase` in this language, any other text as it is."""
        return self(text.key, **text.values) if isinstance(text, Phrase) else text

    def sentence(self, error: Exception) -> str:
        """What a person is told about `error`. One that is no `Phrase` is named by its `code`, and its own
        sentence (with its numbers) follows in brackets."""
        known = error.args[0] if error.args else ""
        if isinstance(known, Phrase):
            return self.tell(known)
        said = sentence(error)
        key = f"error.{getattr(error, 'code', 'internal_error')}"
        return said if self.language == "en" or key not in TEXTS else f"{self(key)}（{said}）"


ENGLISH = Words("en")


def preferred(accept: str) -> Language:
    """The language of an `Accept-Language` header: the first of ours in the order of its weights. Every
    Chinese is answered in Traditional Chinese, the nearest that there is."""
    weighted: list[tuple[float, str]] = []
    for part in accept[:1_000].split(","):
        tag, _, rest = part.strip().partition(";")
        weight = re.fullmatch(r"\s*q=(\d(?:\.\d+)?)\s*", rest)
        weighted.append((float(weight[1]) if weight else 1.0 if not rest else 0.0, tag.strip().lower()))
    for weight_of, tag in sorted(weighted, key=lambda item: -item[0]):
        base = tag.partition("-")[0]
        if weight_of > 0 and base in ("zh", "en"):
            return "zh-Hant" if base == "zh" else "en"
    return "en"


def language_of(headers: Mapping[str, str]) -> Language:
    """The language of whoever sent a request with these headers."""
    chosen = cookie_parser(headers.get("cookie") or "").get(COOKIE)
    for language in LANGUAGES:
        if language == chosen:
            return language
    return preferred(headers.get("accept-language") or "")


def of(headers: Mapping[str, str]) -> Words:
    """The texts for whoever sent a request with these headers."""
    return Words(language_of(headers))
