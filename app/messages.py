"""A client's messages as token ids, exactly in the shape of the model's own chat template.

The template is rendered around sentinels and taken apart, and each message's text is encoded by itself so
that no text can become a control token, whatever markers it holds.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from app.openai_schema import ApiRefusal, ChatMessage
from rag.errors import UnstableTemplate
from rag.template import LiteralEncoder, encode_fixed, render

#: Encoded texts that are kept: clients of a stateless API send the same long texts again and again.
_CACHED_TOKENS = 500_000
#: What stands in the place of a message while the template is rendered.
_MARK = re.compile(r"QX[0-9a-f]{16}QX")


class MessageEncoder:
    """Thread-safe. The same messages always give the same ids, and a common beginning common ids."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._literal = LiteralEncoder(tokenizer)
        self._lock = threading.Lock()
        #: By account and text. A text that another account's request had left here would be there at once,
        #: and so tell that it was sent, to whoever guesses the end of it.
        self._texts: OrderedDict[tuple[str, str], tuple[int, ...]] = OrderedDict()
        self._held = 0

    def encode(self, messages: Sequence[ChatMessage], account: str) -> tuple[int, ...]:
        """Ids of the whole prompt, the answer's opening included. What is kept is kept for `account` alone.
        Raises `ApiRefusal` for an order of roles that the model's template does not know."""
        marks = [f"QX{secrets.token_hex(8)}QX" for _ in messages]
        plain = [
            {"role": "system" if m.role == "developer" else m.role, "content": mark}
            for m, mark in zip(messages, marks, strict=True)
        ]
        try:
            rendered = render(self._tokenizer, plain)
        except UnstableTemplate as error:
            raise ApiRefusal(f"These messages are not taken: {error}", param="messages") from None
        found, pieces = _MARK.findall(rendered), _MARK.split(rendered)
        if found != marks:
            at = next((i for i, (mark, one) in enumerate(zip(marks, found, strict=False)) if mark != one), -1)
            raise ApiRefusal(
                f"This model's template has no place for a {messages[at].role} message there.",
                param="messages",
            )
        ids: list[int] = []
        for piece, message in zip(pieces, messages, strict=False):
            ids += encode_fixed(self._tokenizer, piece)
            ids += self._text(message.content, account)
        return (*ids, *encode_fixed(self._tokenizer, pieces[-1]))

    def _text(self, text: str, account: str) -> tuple[int, ...]:
        key = account, text
        with self._lock:
            known = self._texts.get(key)
            if known is not None:
                self._texts.move_to_end(key)
                return known
        ids = self._literal(text)
        with self._lock:
            if key not in self._texts:
                self._texts[key] = ids
                self._held += len(ids)
            while self._held > _CACHED_TOKENS and len(self._texts) > 1:
                self._held -= len(self._texts.popitem(last=False)[1])
        return ids
