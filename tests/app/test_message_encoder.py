"""Messages become the same tokens however many are encoded at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any

import pytest

from app.messages import MessageEncoder
from app.openai_schema import ApiRefusal, ChatMessage
from rag.prompt import PromptLayout
from rag.template import LiteralEncoder
from tests.rag.tokenizers_for_tests import CHATML, NO_SYSTEM, WITH_CLOCK, byte_tokenizer

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
            pool.submit(encoder.encode, [ChatMessage(role="user", content=f"{MARKED} {i}")], "ann")
            for i in range(4)
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
    alone = [MessageEncoder(byte_tokenizer()).encode(messages, "ann") for messages in asked]
    encoder = MessageEncoder(tokenizer)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(encoder.encode, asked, repeat("ann"))) == alone
    start, end = (tokenizer.convert_tokens_to_ids(t) for t in ("<|im_start|>", "<|im_end|>"))
    assert all((ids.count(start), ids.count(end)) == (2, 1) for ids in alone)


def test_a_template_that_asks_for_the_time_gets_the_same_day_for_ever() -> None:
    encoder = MessageEncoder(byte_tokenizer(WITH_CLOCK))
    ids = encoder.encode([ChatMessage(role="user", content="Hi")], "ann")
    assert byte_tokenizer().decode(ids).startswith("Today is 01 Jan 2025.")
    assert encoder.encode([ChatMessage(role="user", content="Hi")], "ann") == ids


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (NO_SYSTEM, "No system role"),
        (
            CHATML.replace("{{ m['content'] }}", "{{ m['content'] }}{{ m['content'] }}"),
            "no place for a user message",
        ),
        ("{% for m in messages | reverse %}" + CHATML.partition("%}")[2], "no place for a system message"),
        (CHATML.replace("{{ m['content'] }}", "{{ m['content'] if loop.first else '' }}"), "a user message"),
    ],
)
def test_a_template_that_drops_repeats_or_reorders_a_message_is_refused(template: str, says: str) -> None:
    """What stands for a message while the template is rendered must never reach the model."""
    asked = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hi")]
    with pytest.raises(ApiRefusal, match=says):
        MessageEncoder(byte_tokenizer(template)).encode(asked, "ann")


def test_what_one_account_sent_is_encoded_again_for_another() -> None:
    """Else the time that it takes would tell whether a text was sent: a guess at its end is found, or not."""
    tokenizer = byte_tokenizer()
    encoder = MessageEncoder(tokenizer)
    seen: list[str] = []
    real = encoder._literal
    encoder._literal = lambda text: seen.append(text) or real(text)  # type: ignore[assignment,return-value]
    letter = [ChatMessage(role="user", content="Dear bank, my PIN is 4711.")]
    first = encoder.encode(letter, "ann")
    assert encoder.encode(letter, "ann") == first
    assert len(seen) == 1, "kept for whoever sent it"
    assert encoder.encode(letter, "bob") == first
    assert len(seen) == 2
