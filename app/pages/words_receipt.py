"""The receipt's texts: what an answer cost and what sharing saved. See `words` for how they are used."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TEXTS: Mapping[str, tuple[str, str]] = MappingProxyType({
    "receipt.receipt": ("Receipt", "收據"),
    "receipt.head_reused": (
        "{reused:,} of {n:,} prompt token reused ({share:.0%})|{reused:,} of {n:,} prompt tokens reused ({share:.0%})",
        "提示的 {n:,} 個 token 中重複使用了 {reused:,} 個（{share:.0%}）",
    ),
    "receipt.head_saved": ("{size} saved by sharing", "共用省下 {size}"),
    "receipt.head_first": ("first token after {s:.2f} s", "{s:.2f} 秒後出現第一個 token"),
    "receipt.prompt": ("Prompt", "提示"),
    "receipt.reused": ("Reused from shared memory", "取自共用記憶"),
    "receipt.computed": ("Computed for this answer", "為此答案計算"),
    "receipt.answer": ("Answer", "答案"),
    "receipt.tokens": ("{n:,} token|{n:,} tokens", "{n:,} 個 token"),
    "receipt.avoided": ("Reading avoided (estimate)", "免去的閱讀時間（估計）"),
    "receipt.avoided_s": (
        "about {s:.1f} s: {tokens:,} tokens at {rate:,.0f} tokens/s, as measured over the last {n:,} answer|"
        "about {s:.1f} s: {tokens:,} tokens at {rate:,.0f} tokens/s, as measured over the last {n:,} answers",
        "約 {s:.1f} 秒：{tokens:,} 個 token，速率 {rate:,.0f} token／秒（由最近 {n:,} 個答案測得）",
    ),
    "receipt.unshared": ("KV memory if nothing were shared", "若完全不共用所需的 KV 記憶體"),
    "receipt.fair": ("This answer’s fair share", "此答案分攤的份額"),
    "receipt.saved": ("Saved while others read along", "與他人共讀時省下"),
    "receipt.copied": ("Copied on divergence", "分歧時複製"),
    "receipt.blocks": ("{n:,} block, {size}|{n:,} blocks, {size}", "{n:,} 個區塊，{size}"),
    "receipt.unread": ("KV reads avoided", "免去的 KV 讀取"),
    "receipt.queued": ("Waited in line", "排隊時間"),
    "receipt.first": ("Time to first token", "第一個 token 的時間"),
    "receipt.speed": ("Speed", "速度"),
    "receipt.seconds": ("{s:.2f} s", "{s:.2f} 秒"),
    "receipt.per_s": ("{rate:.1f} tokens/s", "{rate:.1f} token／秒"),
    "receipt.drafted": ("Drafted tokens accepted", "採納的預測 token"),
    "receipt.drafted_of": ("{accepted:,} of {n:,}", "{n:,} 個中的 {accepted:,} 個"),
    "receipt.prefill": ("Shared reading", "共用閱讀"),
    "receipt.prefill_why": (
        "waited for another reader who was already reading this document",
        "等待另一位已經在讀此文件的讀者",
    ),
    "receipt.private": ("Placed privately", "私下放置"),
    "receipt.private_why": (
        "{titles}: found in a later turn. In front of the conversation the whole history would have been computed "
        "again, at more than twice the cost; behind it, only you can reuse it.",
        "{titles}：在後來的一輪才找到。若放在對話之前，整段紀錄都要重算，代價超過兩倍；放在之後，只有你能重複使用。",
    ),
    "receipt.not_copied": ("no block had to be copied", "不必複製任何區塊"),
    "receipt.was_copied": (
        "{n:,} block was copied where the texts part ({size})|{n:,} blocks were copied where the texts part ({size})",
        "在內容分歧處複製了 {n:,} 個區塊（{size}）",
    ),
})  # fmt: skip
