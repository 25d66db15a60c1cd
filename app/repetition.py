"""Small models sometimes fall into a loop and would repeat themselves until their last token."""

from __future__ import annotations

import re

#: A stretch of 4 to 200 characters, four times in a row at the end of a text.
_LOOP = re.compile(r"(.{4,200}?)\1{3,}$", re.DOTALL)
_TAIL = 1_000


def loop_start(text: str) -> int | None:
    """Where the repetition begins to add nothing: the end of the first of at least four equal stretches that
    close the text. None while the text does not end in a loop.

    Stretches without letters or digits (rows of dashes, table borders, blank lines) do not count.
    """
    tail = text[-_TAIL:]
    found = _LOOP.search(tail)
    if found is None or not any(c.isalnum() for c in found[1]):
        return None
    return len(text) - len(tail) + found.start() + len(found[1])
