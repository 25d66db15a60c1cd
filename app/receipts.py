"""The receipt of an answer: the engine's counts as JSON with documented keys, and in words."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from app.pages.words import Phrase, Words, from_stored
from app.render import size
from engine.types import Receipt


class PrefillRate:
    """How fast this server computes prompts, measured over its last answers.

    Seconds from leaving the line to the first token, against the tokens computed in them: what others had the
    engine do meanwhile is in it, as it would have been in the prefill that was avoided.
    """

    KEPT = 50
    #: Answers that computed fewer tokens say more about a step's fixed cost than about prefill.
    LEAST_TOKENS = 32

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=self.KEPT)

    def note(self, receipt: Receipt) -> None:
        """Take an answer into account, unless it waited in between: for another's prefill, for memory."""
        if receipt.ttft_s is None or receipt.waited_for_prefill or receipt.preemptions:
            return
        seconds = receipt.ttft_s - receipt.queued_s
        if receipt.computed_tokens >= self.LEAST_TOKENS and seconds > 0:
            self._seen.append((receipt.computed_tokens, seconds))

    def measured(self) -> tuple[float, int] | None:
        """Tokens per second and the number of answers behind it; None before the first."""
        if not self._seen:
            return None
        return sum(t for t, _ in self._seen) / sum(s for _, s in self._seen), len(self._seen)


def notes(receipt: Mapping[str, Any] | None) -> list[Phrase]:
    """What a stored receipt says was left out of the prompt, or ended the answer; without what this version
    cannot say."""
    stored = (receipt or {}).get("notes")
    found = map(from_stored, stored if isinstance(stored, list) else [])
    return [note for note in found if note is not None]


def receipt_json(receipt: Receipt, rate: PrefillRate | None = None) -> dict[str, Any]:
    """The receipt as it is stored, printed by `--json` and returned by the HTTP API.

    Bytes are means over the answer's steps, seconds are seconds; `ttft_s` and `tokens_per_s` are null
    where nothing was generated. `prefill_avoided_s` is an estimate: the reused tokens at
    `prefill_tokens_per_s`, the rate of this server's last `prefill_answers` answers, this one included; null
    where nothing was measured yet. A stored answer has beside these `sentences`, how many of its
    sentences are verified, similar and unsupported, `length_limit`, in tokens, where that ended it, and
    `notes`, what was left out of its prompt or ended it, as `app.pages.words.Phrase.stored` gives them.
    """
    if rate is not None:
        rate.note(receipt)
    measured = rate.measured() if rate is not None else None
    return {
        "prompt_tokens": receipt.prompt_tokens,
        "reused_tokens": receipt.reused_tokens,
        "computed_tokens": receipt.computed_tokens,
        "output_tokens": receipt.output_tokens,
        "blocks_copied": receipt.blocks_copied,
        "bytes_copied": receipt.bytes_copied,
        "unshared_bytes": receipt.unshared_bytes,
        "fair_share_bytes": receipt.fair_share_bytes,
        "saved_bytes": receipt.saved_bytes,
        "reserved_bytes": receipt.reserved_bytes,
        "kv_bytes_logical": receipt.kv_bytes_logical,
        "kv_bytes_read": receipt.kv_bytes_read,
        "queued_s": receipt.queued_s,
        "ttft_s": receipt.ttft_s,
        "decode_s": receipt.decode_s,
        "tokens_per_s": receipt.tokens_per_s,
        "preemptions": receipt.preemptions,
        "waited_for_prefill": receipt.waited_for_prefill,
        "drafted_tokens": receipt.drafted_tokens,
        "accepted_tokens": receipt.accepted_tokens,
        "prefill_tokens_per_s": measured[0] if measured else None,
        "prefill_answers": measured[1] if measured else 0,
        "prefill_avoided_s": receipt.reused_tokens / measured[0] if measured else None,
    }


def headline(r: dict[str, Any], w: Words) -> str:
    """The one line that stays visible when the receipt is folded."""
    share = r["reused_tokens"] / r["prompt_tokens"] if r["prompt_tokens"] else 0.0
    parts = [w("receipt.head_reused", reused=r["reused_tokens"], n=r["prompt_tokens"], share=share)]
    if r["saved_bytes"] >= 1:  # nobody may have been reading at the same moment
        parts.append(w("receipt.head_saved", size=size(r["saved_bytes"])))
    if r["ttft_s"] is not None:
        parts.append(w("receipt.head_first", s=r["ttft_s"]))
    return " · ".join([w("receipt.receipt"), *parts])


def table(r: dict[str, Any], w: Words, private: str = "") -> str:
    """The receipt as a Markdown table. `private`: titles, escaped, of what was placed privately; all else are
    numbers of our own, so that nothing needs escaping."""

    def tokens(count: int) -> str:
        return w("receipt.tokens", n=count)

    rows = [
        ("prompt", tokens(r["prompt_tokens"])),
        ("reused", tokens(r["reused_tokens"])),
        ("computed", tokens(r["computed_tokens"])),
        ("answer", tokens(r["output_tokens"])),
    ]
    if r.get("prefill_avoided_s") and r["reused_tokens"]:
        rows.append(("avoided", w(
            "receipt.avoided_s", s=r["prefill_avoided_s"], tokens=r["reused_tokens"],
            rate=r["prefill_tokens_per_s"], n=r["prefill_answers"],
        )))  # fmt: skip
    rows += [
        ("unshared", size(r["unshared_bytes"])),
        ("fair", size(r["fair_share_bytes"])),
        ("saved", f"**{size(r['saved_bytes'])}**"),
        ("copied", w("receipt.blocks", n=r["blocks_copied"], size=size(r["bytes_copied"]))),
        ("unread", size(r["kv_bytes_logical"] - r["kv_bytes_read"])),
        ("queued", w("receipt.seconds", s=r["queued_s"])),
        ("first", w("receipt.seconds", s=r["ttft_s"]) if r["ttft_s"] is not None else "–"),
        ("speed", w("receipt.per_s", rate=r["tokens_per_s"]) if r["tokens_per_s"] else "–"),
    ]
    if r["drafted_tokens"]:
        rows.append(
            ("drafted", w("receipt.drafted_of", accepted=r["accepted_tokens"], n=r["drafted_tokens"]))
        )
    if r["waited_for_prefill"]:
        rows.append(("prefill", w("receipt.prefill_why")))
    if private:
        rows.append(("private", w("receipt.private_why", titles=private)))
    return "| | |\n|---|---|\n" + "\n".join(f"| {w('receipt.' + name)} | {value} |" for name, value in rows)


def copied(r: dict[str, Any], w: Words) -> str:
    """What divergence cost, in words."""
    if not r["blocks_copied"]:
        return w("receipt.not_copied")
    return w("receipt.was_copied", n=r["blocks_copied"], size=size(r["bytes_copied"]))
