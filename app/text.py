"""Text that somebody sent: what is looked at once at each door, before it is stored, searched or encoded.

Half of a surrogate pair is no character: JSON can write it, and no tokenizer, UTF-8 or SQLite takes it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Any

_HALF = re.compile("[\ud800-\udfff]")
#: How half a pair looks in a body of JSON: escaped (whole pairs look alike there), or as its own three bytes.
#: A zero byte tells of UTF-16 or UTF-32, which are JSON too and look otherwise.
_MAYBE_HALF = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]|\x00")
#: Signs that turn the direction of whatever is shown behind them.
_TURNS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def may_be_broken(body: bytes) -> bool:
    """False for a body of JSON in which no text can hold half a pair; cheap."""
    return _MAYBE_HALF.search(body) is not None


def whole(text: str) -> str:
    """`text` with U+FFFD in the place of half pairs."""
    return _HALF.sub("\ufffd", text)


def broken(value: Any) -> str | None:
    """Where the first text with half a pair stands in a JSON value, as `messages.0.content`; None where there
    is none. Names are joined for that place alone, and what is kept meanwhile grows with the depth only: a
    long name before many values would else be a long text for each of them."""
    names: list[Any] = []
    inside: list[Iterator[tuple[Any, Any]]] = [iter([("", value)])]
    while inside:
        for name, each in inside[-1]:
            if isinstance(each, str):
                if _HALF.search(each):
                    return ".".join(whole(str(one)) for one in (*names[1:], name))
            elif isinstance(each, dict | list):
                names.append(name)
                inside.append(iter(each.items()) if isinstance(each, dict) else iter(enumerate(each)))
                break
        else:
            inside.pop()
            if names:
                names.pop()
    return None


def one_line(text: str) -> str:
    """`text` as a title: one line, nothing that is no character or turns the direction of what follows."""
    kept = (" " if unicodedata.category(sign) == "Cc" else sign for sign in whole(text) if sign not in _TURNS)
    return " ".join("".join(kept).split())
