"""The texts of the memory page. See `words` for how they are used."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TEXTS: Mapping[str, tuple[str, str]] = MappingProxyType({
    "dash.label": ("Memory dashboard", "記憶體儀表板"),
    "dash.demo": ("Start the demonstration", "開始示範"),
    "dash.demo_runs": (
        "Demonstration: {arrived} of {n} reader came, {left} left|Demonstration: {arrived} of {n} readers "
        "came, {left} left",
        "示範：{n} 位讀者中已來 {arrived} 位，離開 {left} 位",
    ),
    "dash.replay_engine": ("Recording: this engine", "錄影：這個引擎"),
    "dash.replay_simulation": ("Recording: a large pool", "錄影：大型記憶體池"),
    "dash.recording": ("Recording", "錄影"),
    "dash.live": ("Back to live", "回到即時"),
    "dash.rec_engine": (
        "Recording, not live: twelve scripted readers on a real engine, made on {made} with {model} on "
        "{device}.",
        "這是錄影，不是即時：真實引擎上的十二位腳本讀者，{made} 以 {model} 在 {device} 上錄製。",
    ),
    "dash.rec_simulation": (
        "Recording, not live: 200 simulated readers in a large pool, made on {made}. Memory, prefix tree "
        "and scheduler are the real ones; no model computes.",
        "這是錄影，不是即時：大型記憶體池中的 200 位模擬讀者，{made} 錄製。記憶體、前綴樹與排程器都是真的；沒有模型在計算。",
    ),
    "dash.rec_why": ("It plays because nobody is reading right now.", "因為目前沒有人在讀，所以播放它。"),
    "dash.rec_second": ("Second {at} of {n}.", "第 {at} 秒，共 {n} 秒。"),
    "dash.saved": ("saved by sharing", "因共用而省下"),
    "dash.saved_note": ("each block kept is read {ratio} times", "每個保留的區塊平均被讀 {ratio} 次"),
    "dash.saved_none": ("nothing is shared right now", "目前沒有共用"),
    "dash.people": ("conversations", "對話"),
    "dash.people_note": ("{n} answer being written|{n} answers being written", "正在撰寫 {n} 個答案"),
    "dash.people_waiting": ("{answers}, {n} waiting", "{answers}，{n} 個等候中"),
    "dash.shared": ("blocks with 2 or more readers", "有 2 位以上讀者的區塊"),
    "dash.shared_note": (
        "of {n} block that somebody reads|of {n} blocks that somebody reads",
        "有人在讀的區塊共 {n} 個",
    ),
    "dash.skipped": ("prompt tokens reused", "重複使用的提示 token"),
    "dash.skipped_note": ("{skipped} of {n} since start", "啟動以來 {n} 個中的 {skipped} 個"),
    "dash.unread": ("KV reads avoided", "免去的 KV 讀取"),
    "dash.unread_note": ("{size} since start", "啟動以來 {size}"),
    "dash.map": ("Every block of the pool", "記憶體池的每個區塊"),
    "dash.lead": (
        "A block holds what the model has worked out for a few words of text. Readers of the same text use "
        "the same blocks: the stronger the colour, the more readers.",
        "一個區塊存放模型對幾個字詞的計算結果。讀同樣文字的讀者使用同樣的區塊：顏色越強，讀者越多。",
    ),
    "dash.pool_is": (
        "{n} block of {size} tokens, {bytes} each; {free} free|{n} blocks of {size} tokens, {bytes} each; "
        "{free} free",
        "{n} 個區塊，每個 {size} 個 token、{bytes}；{free} 個空閒",
    ),
    "dash.engine_is": (
        "{model} · {dtype} on {device} · {backend} · pool of {size}",
        "{model} · {dtype}，{device} · {backend} · 記憶體池 {size}",
    ),
    "dash.strip": (
        "Above: blocks 0 to {last}, enlarged. This strip: all {n}.",
        "上圖：放大的區塊 0 到 {last}。這一條：全部 {n} 個。",
    ),
    "dash.zoom_whole": ("Show the whole pool", "顯示整個記憶體池"),
    "dash.zoom_used": ("Show what is in use", "顯示使用中的部分"),
    "dash.point": ("Point at a block to see what it holds.", "指向一個區塊，看看裡面有什麼。"),
    "dash.just_computed": ("just computed", "剛算好"),
    "dash.just_copied": ("just copied", "剛複製"),
    "dash.this": ("this conversation", "這個對話"),
    "dash.states": (
        "free,being written by one reader,held and shareable,kept for reuse,an open tail kept for "
        "reuse,pinned",
        "空閒,一位讀者正在寫入,使用中、可共用,留待重用,留待重用的開放尾端,已釘選",
    ),
    "dash.block": ("Block {block}: {state}", "區塊 {block}：{state}"),
    "dash.four": ("4 or more", "4 位以上"),
    "dash.readers": ("{n} reader|{n} readers", "{n} 位讀者"),
    "dash.readers_running": ("{readers}, {n} of them running", "{readers}，其中 {n} 位執行中"),
    "dash.instructions": ("instructions", "指示"),
    "dash.branch": ("a reader’s own text", "讀者自己的文字"),
    "dash.branch_mine": ("this conversation’s own text", "這個對話自己的文字"),
    "dash.hidden": ("another document|{n} other documents", "另外 {n} 份文件"),
    "dash.page": ("page {page}", "第 {page} 頁"),
    "dash.section": ("section: {title}", "章節：{title}"),
    "dash.tokens": ("tokens {first} to {last} of its chain", "所在鏈的第 {first} 到 {last} 個 token"),
    "dash.slots_copied": ("{n} slot copied|{n} slots copied", "複製了 {n} 格"),
    "dash.slots_from": ("{slots} from block {block}", "{slots}，來自區塊 {block}"),
    "dash.three": ("The same answers, three ways to keep them", "同樣的答案，三種保存方式"),
    "dash.three_why": (
        "Contiguous: one long reservation for each answer. Paged: blocks as they are needed, each reader "
        "its own. Shared: the same text kept once.",
        "連續配置：每個答案各預留一長段。分頁：需要時才給區塊，讀者各有一份。共用：相同的文字只留一份。",
    ),
    "dash.which": ("Conversation to show", "要顯示的對話"),
    "dash.none_yet": ("none yet", "還沒有"),
    "dash.mine_note": (
        "{n} block, {shared} of them shared; sharing saves {size}|{n} blocks, {shared} of them shared; "
        "sharing saves {size}",
        "{n} 個區塊，其中 {shared} 個共用；共用省下 {size}",
    ),
    "dash.mine_none_running": ("Nothing is being written for it right now.", "目前沒有為它撰寫任何內容。"),
    "dash.mine_none_open": ("Nothing of it is in memory yet.", "它在記憶體中還沒有內容。"),
    "dash.over_time": ("Saved over time", "隨時間省下"),
    "dash.line_open": ("open conversations", "開啟中的對話"),
    "dash.line_running": ("running now", "執行中"),
    "dash.chart_s": ("{n} s up to now, at most {size}", "到現在的 {n} 秒，最多 {size}"),
    "dash.chart_min": ("{n} min up to now, at most {size}", "到現在的 {n} 分鐘，最多 {size}"),
    "dash.tree": ("The prefix tree", "前綴樹"),
    "dash.tree_why": (
        "instructions, then documents, then each reader’s own branch; width is bytes, colour is readers",
        "先是指示，再是文件，最後是每位讀者自己的分支；寬度是位元組，顏色是讀者數",
    ),
    "dash.tree_hint": (
        "Where one bar splits, texts part. A notch marks a block that was copied there.",
        "一條分成數條之處，就是文字分歧之處。缺口標記在那裡被複製的區塊。",
    ),
    "dash.tree_empty": ("Nothing is indexed yet: ask a question.", "還沒有索引任何內容：提個問題吧。"),
    "dash.tail": ("{name} (open tail)", "{name}（開放尾端）"),
    "dash.blocks": ("{n} block|{n} blocks", "{n} 個區塊"),
    "dash.node_blocks": (
        "{blocks}, {size}, {n} token|{blocks}, {size}, {n} tokens",
        "{blocks}、{size}、{n} 個 token",
    ),
    "dash.node_behind": ("{size} behind it", "其後 {size}"),
    "dash.node_left": ("{n} block not shown|{n} blocks not shown", "{n} 個區塊未顯示"),
    "dash.node_copied": ("{n} block copied here|{n} blocks copied here", "在此複製了 {n} 個區塊"),
    "dash.pages": ("A page table, opened", "打開一張分頁表"),
    "dash.pages_none": (
        "No conversation of yours is in memory: ask a question, or start the demonstration.",
        "記憶體中沒有你的對話：提個問題，或開始示範。",
    ),
    "dash.logical": ("logical blocks, in the order of the text", "邏輯區塊，依文字順序"),
    "dash.physical": ("physical blocks of the pool", "記憶體池的實體區塊"),
    "dash.pages_running": (
        "{n} entry of this conversation’s page table (running) names {physical}, {joint} of these with "
        "other readers too.|{n} entries of this conversation’s page table (running) name {physical}, "
        "{joint} of these with other readers too.",
        "這個對話的分頁表（執行中）有 {n} 筆，指向 {physical}；其中 {joint} 個還有其他讀者。",
    ),
    "dash.pages_stored": (
        "{n} entry of this conversation’s page table (kept) names {physical}, {joint} of these with other "
        "readers too.|{n} entries of this conversation’s page table (kept) name {physical}, {joint} of "
        "these with other readers too.",
        "這個對話的分頁表（保留）有 {n} 筆，指向 {physical}；其中 {joint} 個還有其他讀者。",
    ),
    "dash.pages_copied": (
        "The block with a coloured frame began as a copy of another reader’s block, where the texts "
        "part.|The {n} blocks with a coloured frame began as copies of other readers’ blocks, where the "
        "texts part.",
        "有色框的 {n} 個區塊，是在文字分歧處由其他讀者的區塊複製而來。",
    ),
    "dash.pages_hidden": ("{n} entry is not drawn.|{n} entries are not drawn.", "有 {n} 筆未畫出。"),
    "dash.rows": ("Conversations", "對話"),
    "dash.rows_why": ("yours by name, others as counts", "你的顯示名稱，別人的只有數目"),
    "dash.col_name": ("conversation", "對話"),
    "dash.col_blocks": ("blocks", "區塊"),
    "dash.col_shared": ("shared", "共用"),
    "dash.col_paged": ("paged", "分頁"),
    "dash.col_share": ("fair share", "分攤"),
    "dash.col_saved": ("saved", "省下"),
    "dash.rest": ("{n} other conversation|{n} other conversations", "另外 {n} 個對話"),
    "dash.somebody": ("somebody {n}", "某人 {n}"),
    "dash.system": ("the engine itself", "引擎本身"),
    "dash.what": ("What if nothing were shared?", "如果完全不共用？"),
    "dash.estimate": ("an estimate", "估計值"),
    "dash.what_none": ("Nobody has anything in memory yet.", "記憶體中還沒有任何人的內容。"),
    "dash.what_need": (
        "Without sharing, the {n} open conversation would need {unshared}; in contiguous caches, "
        "{reserved}.|Without sharing, the {n} open conversations would need {unshared}; in contiguous "
        "caches, {reserved}.",
        "不共用的話，{n} 個開啟中的對話需要 {unshared}；連續配置則需要 {reserved}。",
    ),
    "dash.what_fit": (
        "Such readers that this pool of {size} would hold: about {contiguous} contiguously, {paged} with "
        "paging, and {shared} sharing as now.",
        "這個 {size} 的記憶體池，這樣的讀者連續配置約可容納 {contiguous} 位，分頁 {paged} 位，如現在般共用 {shared} 位。",
    ),
    "dash.other": ("On another model and device", "換一個模型與裝置"),
    "dash.model": ("model", "模型"),
    "dash.device": ("device", "裝置"),
    "dash.common": ("tokens in common", "共同的 token"),
    "dash.own": ("tokens of each reader", "每位讀者的 token"),
    "dash.size_note": (
        "{weights} of weights leave {pool} for KV. A reader takes {contiguous} contiguously, {paged} "
        "paged, {own} beside the shared {document}.",
        "權重 {weights}，留給 KV {pool}。一位讀者連續配置需 {contiguous}，分頁 {paged}，共用則在共享的 {document} 之外再加 {own}。",
    ),
    "dash.size_failed": ("No answer from the server; change a value to try again.", "伺服器沒有回應；改個數值再試一次。"),
    "dash.since": ("Since the server started", "自伺服器啟動以來"),
    "dash.since_peak": ("Most saved at one time, running", "執行中單一時刻最多省下"),
    "dash.since_time": ("Saved over time, running", "執行中累計省下"),
    "dash.since_skipped": ("Prompt tokens reused", "重複使用的提示 token"),
    "dash.since_computed": ("Prompt tokens computed", "計算過的提示 token"),
    "dash.since_copied": ("Blocks copied where texts part", "文字分歧處複製的區塊"),
    "dash.since_evicted": ("Blocks evicted", "被逐出的區塊"),
    "dash.since_answers": ("Answers", "答案"),
    "dash.since_preempted": ("Answers put back in line", "退回排隊的答案"),
    "dash.utilisation": ("Slots in use of held blocks", "使用中區塊已填的格"),
    "dash.offline": ("No answer from the server; trying again.", "伺服器沒有回應，重試中。"),
    "dash.offline_once": ("No answer from the server.", "伺服器沒有回應。"),
    "dash.twin_running": (
        "Memory pool of {total} blocks: {free} free, {held} held, {retained} kept for reuse, {pinned} "
        "pinned. Running now: {n} conversation; blocks with two or more readers: {shared}, which saves "
        "{saved}: {unshared} with paging alone, {physical} as they are.|Memory pool of {total} blocks: "
        "{free} free, {held} held, {retained} kept for reuse, {pinned} pinned. Running now: {n} "
        "conversations; blocks with two or more readers: {shared}, which saves {saved}: {unshared} with "
        "paging alone, {physical} as they are.",
        "記憶體池共 {total} 個區塊：{free} 個空閒、{held} 個使用中、{retained} 個留待重用、{pinned} 個已釘選。執行中的對話 {n} 個；{shared} 個區塊有"
        "兩位以上讀者，省下 {saved}：只分頁需 {unshared}，實際為 {physical}。",
    ),
    "dash.twin_open": (
        "Memory pool of {total} blocks: {free} free, {held} held, {retained} kept for reuse, {pinned} "
        "pinned. {n} open conversation; blocks with two or more readers: {shared}, which saves {saved}: "
        "{unshared} with paging alone, {physical} as they are.|Memory pool of {total} blocks: {free} free, "
        "{held} held, {retained} kept for reuse, {pinned} pinned. {n} open conversations; blocks with two "
        "or more readers: {shared}, which saves {saved}: {unshared} with paging alone, {physical} as they "
        "are.",
        "記憶體池共 {total} 個區塊：{free} 個空閒、{held} 個使用中、{retained} 個留待重用、{pinned} 個已釘選。開啟中的對話 {n} 個；{shared} 個區塊有"
        "兩位以上讀者，省下 {saved}：只分頁需 {unshared}，實際為 {physical}。",
    ),
})  # fmt: skip
