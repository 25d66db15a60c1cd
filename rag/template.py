"""A model's chat template, taken apart once into the fixed pieces between its messages.

Asking transformers to render each conversation anew gives no promise about tokens: text merges across a
message's border, a clock or a "think" block may change what came before. So the template is rendered at
load around sentinels, the pieces between them are tokenised once, and every prompt is put together from
these pieces and separately tokenised texts. Two prompts that begin with the same messages then begin with
the same ids, which is what sharing rests on.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rag.errors import UnstableTemplate

_SYSTEM, _USER, _ASSISTANT = (
    "QXSYSTEMQX",
    ("QXUSERAQX", "QXUSERBQX", "QXUSERCQX"),
    ("QXREPLYAQX", "QXREPLYBQX"),
)
#: What templates ask for when they want the day's date. Any fixed day does; a clock must not be in a prompt.
_FIXED_DATE = "01 Jan 2025"
_MARKER = re.compile(r"[<\[(|{].*[>\])|}]", re.S)
#: A fast tokenizer keeps `split_special_tokens` as a state of its own while it encodes: of two threads, one
#: with it and one without, each can get the other's tokens. So everybody encodes in turn.
_TURN = threading.Lock()


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    all_special_ids: Any
    added_tokens_decoder: Any
    apply_chat_template: Callable[..., Any]
    get_chat_template: Callable[..., str]
    encode: Callable[..., Any]


def encode_fixed(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Ids of a piece of the template, in which control tokens are what they are. May be called from any
    thread."""
    if not text:
        return ()
    with _TURN:
        return tuple(tokenizer.encode(text, add_special_tokens=False))


class LiteralEncoder:
    """Text to ids such that no text, whatever it holds, becomes a control token. Thread-safe.

    `split_special_tokens=True` does that for tokens that are marked special; markers that a tokenizer adds
    without marking them ("<think>") are cut after their first character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        special = {int(id) for id in tokenizer.all_special_ids}
        added = {int(id): str(token) for id, token in tokenizer.added_tokens_decoder.items()}
        self._markers = {
            id: text
            for id, text in added.items()
            if id in special or (len(text) > 2 and _MARKER.fullmatch(text))
        }
        self.control_ids = frozenset(special | self._markers.keys())

    def __call__(self, text: str) -> tuple[int, ...]:
        """Raises `UnstableTemplate` for a tokenizer that can't encode the text without control tokens."""
        if not text:
            return ()
        ids = self._encode(text)
        if self.control_ids.isdisjoint(ids):
            return ids
        strings = sorted((t for t in self._markers.values() if len(t) > 1), key=len, reverse=True)
        pattern = re.compile("|".join(f"(?<={re.escape(s[0])})(?={re.escape(s[1:])})" for s in strings))
        ids = tuple(id for part in pattern.split(text) if part for id in self._encode(part))
        if not self.control_ids.isdisjoint(ids):
            raise UnstableTemplate(
                "This model's tokenizer turns plain text into control tokens; it can't be used."
            )
        return ids

    def _encode(self, text: str) -> tuple[int, ...]:
        with _TURN:
            return tuple(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The ids of the fixed pieces. A prompt reads

        opening  preamble  preamble_end  question  user_end  answer  answer_end  question  user_end …

    where the preamble (instructions and documents) is the system message, or, for models without one, the
    beginning of the first user message. An answer follows `user_end` directly.
    """

    opening: tuple[int, ...]
    preamble_end: tuple[int, ...]
    user_end: tuple[int, ...]
    answer_end: tuple[int, ...]
    has_system: bool

    @classmethod
    def probe(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """Take the tokenizer's template apart.

        Raises `UnstableTemplate` where there is none, where it drops or changes a message, or where what
        stands before a message depends on what comes after it.
        """
        try:
            return cls._probe(tokenizer, system=True)
        except UnstableTemplate:
            return cls._probe(tokenizer, system=False)

    @classmethod
    def _probe(cls, tokenizer: Tokenizer, *, system: bool) -> ChatTemplate:
        lead = [{"role": "system", "content": _SYSTEM}] if system else []
        first = {"role": "user", "content": _USER[0]}

        def turns(count: int) -> list[dict[str, str]]:
            messages = [*lead, first]
            for index in range(count):
                messages.append({"role": "assistant", "content": _ASSISTANT[index]})
                messages.append({"role": "user", "content": _USER[index + 1]})
            return messages

        heads = [_SYSTEM] if system else []
        pieces: list[list[str]] = []
        for count in range(3):
            marks = [*heads, _USER[0]]
            for index in range(count):
                marks += [_ASSISTANT[index], _USER[index + 1]]
            pieces.append(_between(render(tokenizer, turns(count)), marks))
        start = 1 if system else 0
        opening, preamble_end = pieces[0][0], pieces[0][1] if system else "\n\n"
        user_end = pieces[0][-1]
        if any(p[: start + 1] != pieces[0][: start + 1] for p in pieces):
            raise UnstableTemplate("The chat template changes what stands before the first question.")
        if any(p[-1] != user_end for p in pieces):
            raise UnstableTemplate("The chat template ends differently after longer conversations.")
        # Between an answer and the next question; the answer's own head is `user_end`, as it was generated.
        answer_ends = {pieces[1][start + 2], pieces[2][start + 2], pieces[2][start + 4]}
        if len(answer_ends) != 1:
            raise UnstableTemplate(
                "The chat template separates an answer from the next question in several ways."
            )
        literal = LiteralEncoder(tokenizer)

        return cls(
            opening=encode_fixed(tokenizer, opening),
            preamble_end=encode_fixed(tokenizer, preamble_end) if system else literal(preamble_end),
            user_end=encode_fixed(tokenizer, user_end),
            answer_end=encode_fixed(tokenizer, answer_ends.pop()),
            has_system=system,
        )


def render(tokenizer: Tokenizer, messages: Sequence[dict[str, str]]) -> str:
    """The messages in the template, up to where the answer begins; the same at any time of any day.

    Raises `UnstableTemplate` where the template refuses them, or is not there.
    """
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
            date_string=_FIXED_DATE,
            chat_template=_without_clock(tokenizer.get_chat_template()),
        )
    except Exception as error:  # templates raise whatever their authors chose, for roles they don't know
        raise UnstableTemplate(f"The model's chat template can't be used: {str(error)[:200]}") from error
    if not isinstance(text, str):
        raise UnstableTemplate("The model's chat template gives no text.")
    return text


def _without_clock(template: str) -> str:
    """A template that asks for the time gets a macro of the same name, which always gives the same day."""
    if "strftime_now" not in template:
        return template
    return "{%- macro strftime_now(format) -%}" + _FIXED_DATE + "{%- endmacro -%}" + template


def _between(text: str, marks: Sequence[str]) -> list[str]:
    """The pieces before, between and after the marks, each of which must occur once and in order."""
    pieces: list[str] = []
    position = 0
    for mark in marks:
        if text.count(mark) != 1 or (found := text.find(mark, position)) < 0:
            raise UnstableTemplate("The chat template drops, repeats or reorders a message.")
        pieces.append(text[position:found])
        position = found + len(mark)
    return [*pieces, text[position:]]
