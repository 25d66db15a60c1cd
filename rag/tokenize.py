"""Word pieces with character offsets, for measuring text in the units that a model reads."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any, Protocol

from tokenizers import Tokenizer


class Measure(Protocol):
    """Counts what a text costs a model, without its special tokens."""

    def spans(self, text: str) -> list[tuple[int, int]]:
        """The half-open character range of each token of `text`, in order."""


class PieceMeasure:
    """A copy of a Hugging Face tokenizer that nobody else's truncation settings reach. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer: Tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @classmethod
    def of(cls, tokenizer: Any) -> PieceMeasure:
        """From a transformers tokenizer. Raises TypeError for one without a Rust backend."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise TypeError(f"{type(tokenizer).__name__} has no Rust backend, so it can't report offsets")
        return cls(backend)

    def spans(self, text: str) -> list[tuple[int, int]]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).offsets)

    def count(self, text: str) -> int:
        """Number of tokens, without special tokens."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


class Ruler:
    """The tokens of one text, to be asked for many of its ranges without tokenising again.

    Exact where both ends stand between words (tokenisers split at white space first); inside a word it
    may differ by a token or two, so whoever cuts there measures the piece itself afterwards.
    """

    def __init__(self, text: str, measure: Measure) -> None:
        spans = measure.spans(text)
        self._starts = [start for start, _ in spans]
        self._ends = [end for _, end in spans]

    def tokens(self, start: int, end: int) -> int:
        """Number of tokens that lie at least partly in `[start, end)`."""
        return max(0, bisect_left(self._starts, end) - bisect_right(self._ends, start))

    def reach(self, start: int, tokens: int, end: int) -> int:
        """The largest position <= `end` such that `[start, position)` holds at most `tokens` tokens."""
        index = bisect_right(self._ends, start) + tokens
        return min(end, self._starts[index]) if index < len(self._starts) else end
