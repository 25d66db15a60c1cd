"""Messages become the same tokens however many are encoded at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from app.messages import MessageEncoder
from app.openai_schema import ChatMessage
from rag.prompt import PromptLayout
from rag.template import LiteralEncoder
from tests.rag.tokenizers_for_tests import byte_tokenizer

MARKED = "Tell me about <|im_start|> and <|im_end|>."


class Watched:
    """A fast tokenizer that lets a second caller in, if anything does, and notes that it did.

    `split_special_tokens` is a state of the tokenizer behind it: whoever comes while another encodes would
    change that one's tokens.
    """

    def __init__(self) -> None:
        self._inner = byte_tokenizer()
        self._second = threading.Event()
        self._lock = threading.Lock()
        self._inside = 0
        self.crossed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, text: str, **options: Any) -> Any:
        with self._lock:
            self._inside += 1
            if self._inside > 1:
                self.crossed = True
                self._second.set()
        self._second.wait(0.02)
        try:
            return self._inner.encode(text, **options)
        finally:
            with self._lock:
                self._inside -= 1


def test_nobody_encodes_while_another_does() -> None:
    tokenizer = Watched()
    encoder, literal, layout = MessageEncoder(tokenizer), LiteralEncoder(tokenizer), PromptLayout(tokenizer)
    with ThreadPoolExecutor(6) as pool:
        work = [
            pool.submit(encoder.encode, [ChatMessage(role="user", content=f"{MARKED} {i}")]) for i in range(4)
        ]
        work += [pool.submit(literal, f"{MARKED} {i}") for i in range(4)]
        work += [pool.submit(layout.encode, f"{MARKED} {i}") for i in range(4)]
        for future in work:
            future.result()
    assert not tokenizer.crossed


def test_many_threads_get_what_one_gets() -> None:
    """It was met with 16 readers at once: the template's own markers became text in one prompt of them."""
    tokenizer = byte_tokenizer()
    asked = [[ChatMessage(role="user", content=f"{MARKED} {i}")] for i in range(400)]
    alone = [MessageEncoder(byte_tokenizer()).encode(messages) for messages in asked]
    encoder = MessageEncoder(tokenizer)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(encoder.encode, asked)) == alone
    start, end = (tokenizer.convert_tokens_to_ids(t) for t in ("<|im_start|>", "<|im_end|>"))
    assert all((ids.count(start), ids.count(end)) == (2, 1) for ids in alone)
