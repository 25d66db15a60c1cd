"""The library page's texts. See `words` for how they are used."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from app.pages import words_document

#: What can be added, named here and beside the chat.
FORMATS = ("Text, Markdown, HTML, PDF, Word, Excel, CSV", "純文字、Markdown、HTML、PDF、Word、Excel、CSV")

_LIST: Mapping[str, tuple[str, str]] = MappingProxyType({
    "library.name": ("Library", "文件庫"),
    "library.open_page": ("Open the library", "打開文件庫"),
    "library.warming_up": ("Warming up: the models are being loaded.", "暖機中：正在載入模型。"),
    "library.offline": ("No answer from the server; trying again.", "伺服器沒有回應，正在重試。"),
    "library.no_answer": (
        "The server did not answer. Try again in a moment.",
        "伺服器沒有回應，請稍後再試。",
    ),
    "library.collections": ("Collections", "文件集"),
    "library.documents": ("{n:,} document|{n:,} documents", "{n:,} 份文件"),
    "library.documents_failed": ("{documents}, {n:,} failed|{documents}, {n:,} failed", "{documents}，{n:,} 份失敗"),
    "library.usage_failed": ("({n:,} failed)|({n:,} failed)", "（其中 {n:,} 份失敗）"),
    "library.added": ("added {when}", "加入於 {when}"),
    "library.namesake": (
        "There is another document of this name here. To put a file in its place, open that one and choose “Replace "
        "with a new version”.",
        "這裡已有另一份同名的文件。若要以檔案取代它，請打開那一份並選擇「換成新版本」。",
    ),
    "library.open_namesake": ("Open the other one", "打開另一份"),
    "library.tag_yours": ("only you", "只有你"),
    "library.tag_shared": ("yours, shared", "你的，已分享"),
    "library.tag_reading": ("you read along", "你可讀"),
    "library.read_by_you": ("Only you read this collection.", "只有你能讀這個文件集。"),
    "library.read_by": (
        "{n:,} reader beside you: {names}|{n:,} readers beside you: {names}",
        "除了你還有 {n:,} 位讀者：{names}",
    ),
    "library.read_by_all": ("Everybody who can open this page reads it.", "所有能打開此頁的人都能讀。"),
    "library.shared_by": ("{name} lets you read this collection.", "{name} 讓你讀這個文件集。"),
    "library.shared_with_you": ("Somebody lets you read this collection.", "有人讓你讀這個文件集。"),
    "library.usage": ("What you use", "你的用量"),
    "library.usage_documents": ("Documents", "文件"),
    "library.usage_bytes": ("Storage", "儲存空間"),
    "library.usage_hour": ("Files added (room comes back within an hour)", "已加入的檔案（一小時內恢復額度）"),
    "library.of": ("{used} of {most}", "已用 {used}，上限 {most}"),
    "library.drop": ("Drop files here", "把檔案拖放到這裡"),
    "library.choose": ("Choose files", "選擇檔案"),
    "library.kinds": (
        FORMATS[0] + "; up to {limit:,.0f} MiB each.",
        FORMATS[1] + "；每個最大 {limit:,.0f} MiB。",
    ),
    "library.goes_to": (
        "They go into “{name}”: this collection is not yours to add to.",
        "會加入「{name}」：目前的文件集不屬於你，無法加入。",
    ),
    "library.goes_to_new": (
        "They go into a collection of your own, which only you read.",
        "會加入你自己的文件集，只有你能讀。",
    ),
    "library.sending": ("Files on their way", "處理中的檔案"),
    "library.tidy": ("Clear the finished ones", "清除已完成的"),
    "library.stage.waiting": ("Waiting to be sent", "等待傳送"),
    "library.stage.sending": ("Sending", "傳送中"),
    "library.stage.queued": ("Waiting in line", "排隊中"),
    "library.stage.parsing": ("Reading the file", "讀取檔案"),
    "library.stage.embedding": ("Making it searchable", "建立搜尋索引"),
    "library.stage.ready": ("Ready", "完成"),
    "library.stage.failed": ("Could not be read", "無法讀取"),
    "library.stage.cancelled": ("Cancelled", "已取消"),
    "library.ready": ("Ready: {n:,} passage|Ready: {n:,} passages", "完成：{n:,} 個段落"),
    "library.said_ready": (
        "{name} is ready: {n:,} passage|{name} is ready: {n:,} passages",
        "{name} 已完成：{n:,} 個段落",
    ),
    "library.cancel": ("Cancel", "取消"),
    "library.retry": ("Try again", "再試一次"),
    "library.open": ("Open", "打開"),
    "library.open_existing": ("Show the document", "看這份文件"),
    "library.ask": ("Ask", "提問"),
    "library.ask_collection": ("Ask about this collection", "針對此文件集提問"),
    "library.share": ("Share", "分享"),
    "library.rename": ("Rename", "重新命名"),
    "library.warm": ("Warm up", "預熱"),
    "library.delete": ("Delete", "刪除"),
    "library.leave": ("Stop reading", "不再閱讀"),
    "library.create": ("New collection", "新文件集"),
    "library.filter": ("Find by name or title", "依名稱或標題尋找"),
    "library.none_found": ("No document here has “{filter}” in its name or title.",
                           "這裡沒有名稱或標題含「{filter}」的文件。"),
    "library.more": (
        "{n:,} more document is not listed: type a part of its name above.|{n:,} more documents are not listed: "
        "type a part of a name above.",
        "還有 {n:,} 份文件未列出：請在上方輸入部分名稱。",
    ),
    "library.passages": ("{n:,} passage|{n:,} passages", "{n:,} 個段落"),
    "library.version": ("version {version}", "版本 {version}"),
    "library.new_version_failed": (
        "The new version was not taken, the one before it is still here: {why}",
        "新版本未被接受，先前的版本仍在：{why}",
    ),
    "library.heat_open": ("open in {n:,} conversation|open in {n:,} conversations", "在 {n:,} 個對話中開啟"),
    "library.heat_now": ("{n:,} reading now|{n:,} reading now", "{n:,} 位正在讀"),
    "library.heat_kept": ("in memory for reuse", "在記憶體中待重用"),
    "library.heat_cold": ("not in memory", "不在記憶體中"),
    "library.pinned": ("pinned", "已釘選"),
    "library.pinned_of": (
        "Pinned in memory: {n:,} of at most {limit:,} blocks ({size}).|Pinned in memory: {n:,} of at most {limit:,} "
        "blocks ({size}).",
        "釘選在記憶體中：{n:,} 個區塊，最多 {limit:,} 個（{size}）。",
    ),
    "library.others": (
        "Documents that are not shared with you hold {n:,} block and are {readers}.|Documents that are not shared "
        "with you hold {n:,} blocks and are {readers}.",
        "未與你分享的文件占用 {n:,} 個區塊，{readers}。",
    ),
    "library.visitors": (
        "What you add is tied to this browser: nobody else reads it, and whoever runs this page keeps the memory.",
        "你加入的文件屬於這個瀏覽器：別人讀不到；記憶體由此頁的管理者安排。",
    ),
    "library.empty_title": ("Your library", "你的文件庫"),
    "library.empty_library": ("Nothing here yet. Three steps to a cited answer:",
                              "這裡還沒有文件。三步就能得到附出處的答案："),
    "library.empty_collection": ("This collection is empty. Three steps to a cited answer:",
                                 "這個文件集是空的。三步就能得到附出處的答案："),
    "library.empty_shared": ("Its owner has not added anything yet.", "擁有者還沒有加入任何文件。"),
    "library.teach_1": (
        "Drop a file above, or choose one. A text of a few pages is read in seconds.",
        "把檔案拖放到上方，或選擇一個。幾頁的文字只需數秒。",
    ),
    "library.teach_2": (
        "Wait for Ready. A file that cannot be read says why.",
        "等到出現「完成」。無法讀取的檔案會說明原因。",
    ),
    "library.teach_3": (
        "Press Ask, and check the passage under the answer.",
        "按「提問」，再核對答案下方的段落。",
    ),
    "library.warm_title": ("Read “{name}” into memory?", "要把「{name}」讀入記憶體嗎？"),
    "library.warm_go": ("Warm it up", "開始預熱"),
    "library.warm_why": (
        "Its documents are read before anybody asks about them, so that first answers begin sooner. At most half of "
        "the memory is used; what was used longest ago makes room.",
        "在有人提問前先讀好文件，第一個答案就能更快開始。最多使用一半的記憶體；最久沒用到的內容會讓出空間。",
    ),
    "library.warm_yields": (
        "It gives way: while anybody’s answer is being computed, it waits.",
        "它會讓路：只要有人的答案正在計算，它就等待。",
    ),
    "library.warm.reading": ("Reading into memory", "正在讀入記憶體"),
    "library.warm.waiting": ("Waiting: somebody’s answer comes first", "等待中：有人的答案優先"),
    "library.warm.done": ("In memory", "已在記憶體中"),
    "library.warm.full": (
        "Half of the memory is used; the rest is read when somebody asks",
        "已用到一半的記憶體，其餘等有人提問時再讀",
    ),
    "library.warm.stopped": ("Stopped; what was read stays", "已停止，讀好的部分仍保留"),
    "library.warm.failed": ("Warming up failed", "預熱失敗"),
    "library.warm_parts": (
        "{done:,} of {n:,} part, {tokens:,} tokens computed.|{done:,} of {n:,} parts, {tokens:,} tokens computed.",
        "{n:,} 個部分中的 {done:,} 個，已計算 {tokens:,} 個 token。",
    ),
    "library.warm_found": ("{n:,} was there already.|{n:,} were there already.", "{n:,} 個原本就在。"),
    "library.warm_skipped": (
        "{n:,} is longer than the model reads.|{n:,} are longer than the model reads.",
        "{n:,} 個超出模型能讀的長度。",
    ),
    "library.stop": ("Stop", "停止"),
    "library.close": ("Close", "關閉"),
})  # fmt: skip

TEXTS: Mapping[str, tuple[str, str]] = MappingProxyType({**_LIST, **words_document.TEXTS})
