"""Token ids back to text, as they come: never half a character, never a piece of a stop string.

`TextStream` puts together what one choice needs::

    ids ──IncrementalDetokenizer──► whole characters ──StopChecker──► text that may be shown

The text is that of `tokenizer.decode` over the generated ids alone, without special tokens and without
the "clean-up" of spaces (which rewrites text that was already shown).
"""

from __future__ import annotations

import codecs
import json
import re
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

REPLACEMENT = "\ufffd"
#: A UTF-8 character has at most four bytes; more unfinished tokens than that are simply not UTF-8.
_LONGEST_CHARACTER = 4


class IncrementalDetokenizer:
    """Text of a growing list of ids.

    Byte-level BPE and SentencePiece with byte fallback are decoded byte by byte: exact, and constant work
    a token. Other tokenizers decode a short window twice and show the difference.
    """

    def __init__(self, tokenizer: Any) -> None:
        table = _table(tokenizer)
        self._special = table.special
        self._decoder: _ByteStream | _WindowStream = (
            _WindowStream(tokenizer)
            if table.to_bytes is None
            else _ByteStream(table.to_bytes, table.strip_first_space)
        )

    @property
    def pending(self) -> bool:
        """True while a character has begun and is not complete."""
        return self._decoder.pending

    def push(self, ids: Sequence[int]) -> str:
        """The text that the new ids complete; may be empty."""
        return "".join(self._decoder.push(one) for one in ids if one not in self._special)

    def finish(self) -> str:
        """What is left once no more ids come. An unfinished character is dropped, never shown in half."""
        return self._decoder.finish()


@dataclass(frozen=True, slots=True)
class _Table:
    """What is known of a tokenizer. `to_bytes` is None where a token has no bytes of its own."""

    special: frozenset[int]
    to_bytes: Callable[[int], bytes] | None
    strip_first_space: bool


#: Reading a tokenizer's tables costs milliseconds; every choice of every request needs them.
_TABLES: weakref.WeakKeyDictionary[Any, _Table] = weakref.WeakKeyDictionary()


def _table(tokenizer: Any) -> _Table:
    table = _TABLES.get(tokenizer)
    if table is None:
        to_bytes, strip = _byte_decoder(tokenizer) or (None, False)
        # The table must not keep the tokenizer alive, or the weak key would never go.
        table = _TABLES[tokenizer] = _Table(_special_ids(tokenizer), to_bytes, strip)
    return table


class _ByteStream:
    """Tokenizers whose every token stands for certain bytes."""

    def __init__(self, to_bytes: Callable[[int], bytes], strip_first_space: bool) -> None:
        self._to_bytes = to_bytes
        self._strip = strip_first_space
        # "replace" agrees with Rust's lossy decoding: one mark for each maximal invalid part.
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def push(self, token: int) -> str:
        data = self._to_bytes(token)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def finish(self) -> str:
        self._utf8.reset()
        return ""


class _WindowStream:
    """Tokenizers whose tokens' text depends on their neighbours (WordPiece, Metaspace, …).

    `decode(ids[prefix:])` minus `decode(ids[prefix:read])`, where the window's first part is there to give
    the tokens after it the neighbours that decide about spaces.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._read = 0
        self._shown = ""

    @property
    def pending(self) -> bool:
        return self._read < len(self._ids)

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(REPLACEMENT) and len(self._ids) - self._read < _LONGEST_CHARACTER:
            return ""
        return self._show(text)

    def _show(self, text: str) -> str:
        new = text[len(self._shown) :]
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._shown = self._decode(self._ids)
        return new

    def finish(self) -> str:
        if not self.pending:
            return ""
        return self._show(self._decode(self._ids).rstrip(REPLACEMENT))

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that never show: what the tokenizer calls special, wherever it says so."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {id for id, token in added.items() if token.special}


def _byte_decoder(tokenizer: Any) -> tuple[Callable[[int], bytes], bool] | None:
    """How a token's bytes are found, and whether the text's first space goes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return None
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    parts = decoder.get("decoders", [decoder]) if decoder.get("type") == "Sequence" else [decoder]
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"]:
        return _Bytes(backend, _byte_level), False
    if kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        space = parts[0].get("pattern") == {"String": "\u2581"} and parts[0].get("content") == " "
        strip = parts[3] if len(parts) == 4 else {"content": " ", "start": 0, "stop": 0}
        if space and strip["content"] == " " and strip["start"] in (0, 1) and strip["stop"] == 0:
            return _Bytes(backend, _sentencepiece), strip["start"] == 1
    return None


class _Bytes:
    """Bytes of an id, remembered. Holds the Rust tokenizer, not its Python wrapper."""

    def __init__(self, backend: Any, rule: Callable[[str], bytes]) -> None:
        self._backend, self._rule = backend, rule
        self._known: dict[int, bytes] = {}

    def __call__(self, token: int) -> bytes:
        data = self._known.get(token)
        if data is None:
            text: str | None = self._backend.id_to_token(token)
            # None: an id of the padded end of the vocabulary.
            data = self._known[token] = b"" if text is None else self._rule(text)
        return data


def _byte_level(text: str) -> bytes:
    """GPT-2's printable stand-ins for bytes (Radford et al. 2019). A token with a character outside the
    table (an added token with a space in it) stands for its own UTF-8."""
    try:
        return bytes(_BYTE_LEVEL[character] for character in text)
    except KeyError:
        return text.encode("utf-8")


def _sentencepiece(text: str) -> bytes:
    """`▁` is a space, `<0xE4>` a byte (Kudo & Richardson 2018)."""
    if _BYTE_TOKEN.fullmatch(text):
        return bytes([int(text[3:5], 16)])
    return text.replace("\u2581", " ").encode("utf-8")


def _byte_level_table() -> dict[str, int]:
    """The 188 printable characters of Latin-1 stand for themselves; the other bytes, in order, for the
    characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


_BYTE_LEVEL = _byte_level_table()
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class StopChecker:
    """Finds the first stop string and holds back text that may turn out to be the start of one.

    It is given text token by token, so it knows which tokens lie wholly before a stop string: those are
    the ones that the next turn of a conversation carries on with.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self._shown = 0
        self._position = 0
        self._ends: list[int] = []
        self._unfinished = 0
        self._kept = 0
        self.stopped = False

    @property
    def kept_tokens(self) -> int:
        """Tokens that lie wholly before the stop string; all tokens as long as there is none."""
        return self._kept if self.stopped else len(self._ends) + self._unfinished

    def push(self, text: str, whole: bool = True, tokens: int = 1) -> str:
        """Add the text of one token (`tokens` 0: of the last one, come late) and return what may be shown.

        `whole` is False where the token ends inside a character: it counts as part of the token that
        completes it. After a stop string everything is ignored.
        """
        if self.stopped:
            return ""
        self._position += len(text)
        self._unfinished += tokens
        if whole:
            self._ends.extend([self._position] * self._unfinished)
            self._unfinished = 0
        if not self._stop:
            return text
        held = self._held + text
        found = [at for one in self._stop if (at := held.find(one)) >= 0]
        if found:
            self.stopped = True
            self._kept = bisect_right(self._ends, self._shown + min(found))
            self._held = ""
            return held[: min(found)]
        keep = max(_overlap(held, one) for one in self._stop)
        shown, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self._shown += len(shown)
        return shown

    def finish(self) -> str:
        """Text that was held back, once the answer has ended without completing a stop string."""
        text, self._held = self._held, ""
        self._shown += len(text)
        return text


@dataclass(frozen=True, slots=True)
class TextUpdate:
    """What some new ids did: text to show, whether a stop string has ended the answer, and how many of
    all ids so far lie wholly before it."""

    text: str
    stopped: bool
    kept_tokens: int


class TextStream:
    """Detokeniser and stop strings of one choice."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop = StopChecker(stop)
        self._shown: list[str] = []

    @property
    def text(self) -> str:
        """Everything shown so far."""
        return "".join(self._shown)

    def push(self, ids: Sequence[int]) -> TextUpdate:
        """Add new ids; those after the one that completes a stop string are ignored."""
        new: list[str] = []
        for one in ids:
            if self._stop.stopped:
                break
            text = self._detokenizer.push([one])
            new.append(self._stop.push(text, whole=not self._detokenizer.pending))
        return self._update("".join(new))

    def finish(self) -> TextUpdate:
        """The answer has ended: show what was held back, but for an unfinished character."""
        if self._stop.stopped:
            return self._update("")
        rest = self._detokenizer.finish()
        text = self._stop.push(rest, tokens=0) if rest else ""
        return self._update(text + ("" if self._stop.stopped else self._stop.finish()))

    def _update(self, text: str) -> TextUpdate:
        self._shown.append(text)
        return TextUpdate(text, self._stop.stopped, self._stop.kept_tokens)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
