"""The texts of the memory panel beside the chat and of the memory page. See `words` for how they are used."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TEXTS: Mapping[str, tuple[str, str]] = MappingProxyType({
    "memory.page": ("Memory", "記憶體"),
    "panel.shared_memory": ("Shared memory", "共用記憶"),
    "panel.which": ("Which conversations count", "計入哪些對話"),
    "panel.running": ("Running now", "執行中"),
    "panel.open": ("Open conversations", "開啟中的對話"),
    "panel.warming": ("Warming up: the models are being loaded.", "暖機中：正在載入模型。"),
    "panel.detail": ("{detail}", "暖機中：正在載入模型。（{detail}）"),
    "panel.failed": ("{detail}", "無法使用模型。（{detail}）"),
    "panel.seeding": ("{detail}", "已就緒；範例文件仍在讀取。（{detail}）"),
    "panel.offline": ("No answer from the server; trying again.", "伺服器沒有回應，重試中。"),
    "panel.saved_now": ("saved right now", "目前省下"),
    "panel.readers": ("readers", "讀者"),
    "panel.shared_blocks": ("shared blocks", "共用區塊"),
    "panel.free": ("free", "空閒"),
    "panel.kept": ("kept for reuse", "留待重用"),
    "panel.one_reader": ("1 reader", "1 位讀者"),
    "panel.two": ("2", "2 位"),
    "panel.three": ("3", "3 位"),
    "panel.four": ("4 or more", "4 位以上"),
    "panel.pinned": ("pinned", "已釘選"),
    "panel.yours": ("yours", "你的"),
    "panel.mine": ("This conversation", "這個對話"),
    "panel.everybody": ("Everybody", "所有人"),
    "panel.saves": ("saves", "省下"),
    "panel.of_paged": ("{size}, {share}% of paged", "{size}，分頁用量的 {share}%"),
    "panel.contiguous": ("contiguous", "連續配置"),
    "panel.paged": ("paged", "分頁"),
    "panel.shared": ("shared", "共用"),
    "panel.none_running": (
        "Nothing is being written for this conversation right now.",
        "目前沒有為這個對話撰寫任何內容。",
    ),
    "panel.none_open": (
        "This conversation has nothing in memory yet: ask a question.",
        "這個對話在記憶體中還沒有內容：提個問題吧。",
    ),
    "panel.blocks": (
        "{n} block, {shared} of them shared with others|{n} blocks, {shared} of them shared with others",
        "{n} 個區塊，其中 {shared} 個與他人共用",
    ),
    "panel.since": ("Since the server started", "自伺服器啟動以來"),
    "panel.since_skipped": ("Prompt tokens reused", "重複使用的提示 token"),
    "panel.since_peak": ("Most saved at one time", "單一時刻最多省下"),
    "panel.since_time": ("Saved over time", "累計省下"),
    "panel.since_unread": ("KV reads avoided", "免去的 KV 讀取"),
    "panel.since_copied": ("Blocks copied on divergence", "分歧時複製的區塊"),
    "panel.since_requests": ("Answers computed", "計算過的答案"),
    "panel.pool": ("Pool", "記憶體池"),
    "panel.pool_is": ("{n} block of {size} tokens, {bytes} each|{n} blocks of {size} tokens, {bytes} each",
                      "{n} 個區塊，每個 {size} 個 token、{bytes}"),
    "panel.engine": ("Engine", "引擎"),
    "panel.engine_is": ("{model} · {dtype} on {device} · {backend}", "{model} · {dtype}，{device} · {backend}"),
    "panel.twin_running": (
        "Memory pool of {total} blocks: {free} free, {held} held, {retained} kept for reuse, {pinned} pinned. "
        "Conversations running now: {readers}; blocks with two or more readers: {shared}, which saves {size}.",
        "記憶體池共 {total} 個區塊：{free} 個空閒、{held} 個使用中、{retained} 個留待重用、{pinned} 個已釘選。"
        "執行中的對話：{readers}；有兩位以上讀者的區塊：{shared} 個，省下 {size}。",
    ),
    "panel.twin_open": (
        "Memory pool of {total} blocks: {free} free, {held} held, {retained} kept for reuse, {pinned} pinned. "
        "Open conversations: {readers}; blocks with two or more readers: {shared}, which saves {size}.",
        "記憶體池共 {total} 個區塊：{free} 個空閒、{held} 個使用中、{retained} 個留待重用、{pinned} 個已釘選。"
        "開啟中的對話：{readers}；有兩位以上讀者的區塊：{shared} 個，省下 {size}。",
    ),
    "panel.states": (
        "free,held by one,held; published,kept for reuse,open tail,pinned",
        "空閒,一人使用中,使用中；已公開,留待重用,開放的尾端,已釘選",
    ),
    "panel.block": (
        "Block {block}: {state} · read by {running} running now, open in {n} conversation|Block {block}: {state} · "
        "read by {running} running now, open in {n} conversations",
        "區塊 {block}：{state} · {running} 個執行中、在 {n} 個對話中開啟",
    ),
})  # fmt: skip
