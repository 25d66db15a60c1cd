"""The receipt of an answer: the engine's counts as JSON with documented keys, and in words."""

from __future__ import annotations

from typing import Any

from app.render import size
from engine.types import Receipt


def receipt_json(receipt: Receipt) -> dict[str, Any]:
    """The receipt as it is stored, printed by `--json` and returned by the HTTP API.

    Bytes are means over the answer's steps, seconds are seconds; `ttft_s` and `tokens_per_s` are null
    where nothing was generated.
    """
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
    }


def headline(r: dict[str, Any]) -> str:
    """The one line that stays visible when the receipt is folded."""
    share = r["reused_tokens"] / r["prompt_tokens"] if r["prompt_tokens"] else 0.0
    parts = [f"{r['reused_tokens']:,} of {r['prompt_tokens']:,} prompt tokens reused ({share:.0%})"]
    if r["saved_bytes"] >= 1:  # nobody may have been reading at the same moment
        parts.append(f"{size(r['saved_bytes'])} saved by sharing")
    if r["ttft_s"] is not None:
        parts.append(f"first token after {r['ttft_s']:.2f} s")
    return " · ".join(["Receipt", *parts])


def table(r: dict[str, Any]) -> str:
    """The receipt as a Markdown table. Only numbers of our own go in, so nothing needs escaping."""
    speed = f"{r['tokens_per_s']:.1f} tokens/s" if r["tokens_per_s"] else "–"
    ttft = f"{r['ttft_s']:.2f} s" if r["ttft_s"] is not None else "–"
    not_read = r["kv_bytes_logical"] - r["kv_bytes_read"]
    rows = [
        ("Prompt", f"{r['prompt_tokens']:,} tokens"),
        ("Reused from shared memory", f"{r['reused_tokens']:,} tokens"),
        ("Computed for this answer", f"{r['computed_tokens']:,} tokens"),
        ("Answer", f"{r['output_tokens']:,} tokens"),
        ("KV memory if nothing were shared", size(r["unshared_bytes"])),
        ("This answer's fair share", size(r["fair_share_bytes"])),
        ("Saved while others read along", f"**{size(r['saved_bytes'])}**"),
        ("Copied on divergence", f"{r['blocks_copied']:,} blocks, {size(r['bytes_copied'])}"),
        ("KV reads avoided", size(not_read)),
        ("Waited in line", f"{r['queued_s']:.2f} s"),
        ("Time to first token", ttft),
        ("Speed", speed),
    ]
    if r["drafted_tokens"]:
        rows.append(("Drafted tokens accepted", f"{r['accepted_tokens']:,} of {r['drafted_tokens']:,}"))
    if r["waited_for_prefill"]:
        rows.append(("Shared prefill", "waited for another reader who was already reading this document"))
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows)


def copied(r: dict[str, Any]) -> str:
    """What divergence cost, in words."""
    if not r["blocks_copied"]:
        return "no block had to be copied"
    noun = "block was" if r["blocks_copied"] == 1 else "blocks were"
    return f"{r['blocks_copied']:,} {noun} copied where the texts part ({size(r['bytes_copied'])})"
