"""A client's messages as token ids, exactly in the shape of the model's own chat template.

The template is rendered around sentinels and taken apart, and each message's text is encoded by itself so
that no text can become a control token, whatever markers it holds.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from app.openai_schema import ApiRefusal, ChatMessage
from rag.template import LiteralEncoder, encode_fixed

#: Encoded texts that are kept: clients of a stateless API send the same long texts again and again.
_CACHED_TOKENS = 500_000


class MessageEncoder:
    """Thread-safe. The same messages always give the same ids, and a common beginning common ids."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._literal = LiteralEncoder(tokenizer)
        self._lock = threading.Lock()
        self._texts: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._held = 0

    def encode(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Ids of the whole prompt, the answer's opening included. Raises `ApiRefusal` for an order of roles
        that the model's template does not know."""
        marks = [f"QX{secrets.token_hex(8)}QX" for _ in messages]
        rendered = self._render(messages, marks)
        ids: list[int] = []
        place = 0  # where it has been read to; cutting it off would copy what is left once a message
        for mark, message in zip(marks, messages, strict=True):
            found = rendered.find(mark, place)
            if found < 0:
                raise ApiRefusal(
                    f"This model's template has no place for a {message.role} message there.",
                    param="messages",
                )
            ids += encode_fixed(self._tokenizer, rendered[place:found])
            ids += self._text(message.content)
            place = found + len(mark)
        return (*ids, *encode_fixed(self._tokenizer, rendered[place:]))

    def _render(self, messages: Sequence[ChatMessage], marks: Sequence[str]) -> str:
        plain = [
            {"role": "system" if m.role == "developer" else m.role, "content": mark}
            for m, mark in zip(messages, marks, strict=True)
        ]
        try:
            text = self._tokenizer.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
        except Exception as error:  # templates raise whatever their authors chose
            raise ApiRefusal(
                f"This model's chat template refuses these messages: {str(error)[:200]}", param="messages"
            ) from None
        return str(text)

    def _text(self, text: str) -> tuple[int, ...]:
        with self._lock:
            known = self._texts.get(text)
            if known is not None:
                self._texts.move_to_end(text)
                return known
        ids = self._literal(text)
        with self._lock:
            if text not in self._texts:
                self._texts[text] = ids
                self._held += len(ids)
            while self._held > _CACHED_TOKENS and len(self._texts) > 1:
                self._held -= len(self._texts.popitem(last=False)[1])
        return ids
