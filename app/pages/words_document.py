"""The library's texts about one document, in its dialogs, and its refusals. See `words`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_PAGE: Mapping[str, tuple[str, str]] = MappingProxyType({
    "library.back": ("‹ Back to the list", "‹ 回到列表"),
    "library.in_collection": ("{name} · in “{collection}”", "{name}，位於「{collection}」"),
    "library.ask_document": ("Ask about this document", "針對這份文件提問"),
    "library.download": ("Download", "下載"),
    "library.replace": ("Replace with a new version", "換成新版本"),
    "library.pin": ("Pin in memory", "釘選在記憶體"),
    "library.unpin": ("Unpin", "取消釘選"),
    "library.pin_why": (
        "A pinned document stays in the shared memory, however little it is read. {n:,} of at most {limit:,} blocks "
        "are pinned, which is half of the memory: the other half is always left for answers.|A pinned document stays "
        "in the shared memory, however little it is read. {n:,} of at most {limit:,} blocks are pinned, which is half "
        "of the memory: the other half is always left for answers.",
        "釘選的文件即使很少被讀，也會留在共用記憶體。目前已釘選 {n:,} 個區塊，上限 {limit:,} 個，即記憶體的一半；"
        "另一半永遠留給答案。",
    ),
    "library.pin_who": (
        "What stays in the shared memory is decided by the collection’s owner, where people sign in, and by "
        "administrators.",
        "哪些文件留在共用記憶體，由文件集的擁有者（在需要登入時）和管理員決定。",
    ),
    "library.pinned_now": (
        "“{name}” stays in memory: {n:,} block is kept.|“{name}” stays in memory: {n:,} blocks are kept.",
        "「{name}」會留在記憶體：保留 {n:,} 個區塊。",
    ),
    "library.pinned_later": (
        "“{name}” stays in memory from its next reader on: nothing of it is there yet.",
        "「{name}」從下一位讀者起會留在記憶體：目前還沒有任何內容。",
    ),
    "library.unpinned": ("“{name}” is kept like any other document now.", "「{name}」現在和其他文件一樣保留。"),
    "library.fact_state": ("State", "狀態"),
    "library.fact_size": ("Size", "大小"),
    "library.fact_passages": ("Passages", "段落"),
    "library.fact_characters": ("Characters", "字元"),
    "library.fact_pages": ("Pages", "頁數"),
    "library.fact_memory": ("Read by", "讀者"),
    "library.fact_blocks": ("In memory", "記憶體"),
    "library.blocks": ("{n:,} block, {size}|{n:,} blocks, {size}", "{n:,} 個區塊，{size}"),
    "library.versions": ("Versions", "版本"),
    "library.version_now": ("present", "目前"),
    "library.versions_note": (
        "Only the present version can be read and downloaded: a new one takes the old one’s place, and answers made "
        "from the old one say so.",
        "只有目前的版本能閱讀和下載：新版本會取代舊版本，由舊版本得出的答案會註明。",
    ),
    "library.sections": ("{n:,} section|{n:,} sections", "{n:,} 個章節"),
    "library.untitled_section": ("Without a heading", "沒有標題"),
    "library.characters": ("{n:,} character|{n:,} characters", "{n:,} 個字元"),
    "library.page": ("page {page}", "第 {page} 頁"),
    "library.loading": ("Loading…", "載入中…"),
    "library.no": ("Cancel", "取消"),
    "library.ok": ("OK", "確定"),
    "library.create_go": ("Create", "建立"),
    "library.create_name": ("Name", "名稱"),
    "library.create_why": (
        "You own it: only you read it until you share it with others by name.",
        "你是擁有者：在你以名稱分享給別人之前，只有你能讀。",
    ),
    "library.create_why_open": (
        "Only this browser reads it: nobody signs in here, so there is nobody to share it with by name.",
        "只有這個瀏覽器能讀：這裡不需登入，因此沒有人可以用名稱分享。",
    ),
    "library.share_title": ("Who reads “{name}”?", "誰能讀「{name}」？"),
    "library.share_why": (
        "Readers search it, ask about it and download from it. They cannot change it, and do not see each other.",
        "讀者可以搜尋、提問和下載，但不能更改，也看不到彼此。",
    ),
    "library.share_nobody": (
        "Nobody signs in here, so nobody can be named: a collection belongs to the browser that made it. To share by "
        "name, run Coread with accounts.",
        "這裡不需登入，因此無法指名分享：文件集屬於建立它的瀏覽器。若要指名分享，請以帳號模式執行 Coread。",
    ),
    "library.share_name": ("Name of an account", "帳號名稱"),
    "library.share_go": ("Let them read", "允許閱讀"),
    "library.shared": ("{name} reads “{collection}” now.", "{name} 現在可以讀「{collection}」。"),
    "library.unshare": ("Take away", "取消"),
    "library.unshare_name": ("Take {name}’s right to read away", "取消 {name} 的閱讀權"),
    "library.readers_none": ("Nobody but you yet.", "目前只有你。"),
    "library.everybody": ("Everybody who can open this page", "所有能打開此頁的人"),
    "library.everybody_admin": (
        "Only an administrator opens a collection to everybody.",
        "只有管理員能把文件集開放給所有人。",
    ),
    "library.leave_title": ("Stop reading “{name}”?", "不再閱讀「{name}」嗎？"),
    "library.leave_why": (
        "It goes from your list and your searches. Its owner can let you in again.",
        "它會從你的列表和搜尋中消失。擁有者可以再次讓你閱讀。",
    ),
    "library.delete_title": ("Delete “{name}”?", "刪除「{name}」？"),
    "library.delete_why": ("It cannot be brought back. This goes:", "刪除後無法復原。會刪除："),
    "library.delete_collection_why": (
        "The collection and everything in it go, for all its readers. It cannot be brought back. This goes:",
        "文件集和其中的一切都會刪除，對所有讀者都是如此，無法復原。會刪除：",
    ),
    "library.delete_cites": (
        "Answers that cite it stay, with a note in place of the passage.",
        "引用它的答案會保留，段落處改為註記。",
    ),
    "library.frees_documents": ("{n:,} document|{n:,} documents", "{n:,} 份文件"),
    "library.frees_passages": ("{n:,} passage in the search|{n:,} passages in the search", "搜尋中的 {n:,} 個段落"),
    "library.frees_file": ("{size} on disk", "磁碟上的 {size}"),
    "library.frees_no_file": (
        "Nothing on disk: another document of yours has the same file",
        "磁碟空間不變：你的另一份文件使用相同的檔案",
    ),
    "library.frees_blocks": (
        "{n:,} block of memory ({size}), with what readers computed behind it|{n:,} blocks of memory ({size}), with "
        "what readers computed behind it",
        "{n:,} 個記憶體區塊（{size}），包含讀者在其後計算的內容",
    ),
    "library.frees_no_blocks": ("No memory: nobody has read it lately", "不釋出記憶體：最近沒有人讀過"),
    "library.frees_held": (
        "{n:,} of these is being read right now and goes with its last reader|{n:,} of these are being read right "
        "now and go with their last reader",
        "其中 {n:,} 個正在使用，會在最後一位讀者結束時釋出",
    ),
    "library.freed": (
        "“{name}” is deleted: {n:,} passage, {file} on disk and {blocks} were freed.|“{name}” is deleted: {n:,} "
        "passages, {file} on disk and {blocks} were freed.",
        "已刪除「{name}」：釋出 {n:,} 個段落、磁碟上的 {file} 與 {blocks}。",
    ),
    "library.freed_blocks": (
        "{n:,} block of memory ({size})|{n:,} blocks of memory ({size})",
        "{n:,} 個記憶體區塊（{size}）",
    ),
    "library.freed_held": (
        "{n:,} of the blocks goes with its last reader.|{n:,} of the blocks go with their last reader.",
        "其中 {n:,} 個區塊會在最後一位讀者結束時釋出。",
    ),
})  # fmt: skip

_REFUSALS: Mapping[str, tuple[str, str]] = MappingProxyType({
    "library.no_collection": (
        "There is no such collection among those that you may use.",
        "你能使用的文件集裡沒有這一個。",
    ),
    "library.no_document": (
        "This document was deleted or is not shared with you.",
        "這份文件已刪除，或未與你分享。",
    ),
    "library.not_yours": ("There is no such document among yours.", "你的文件裡沒有這一份。"),
    "library.no_original": ("The file is not stored any more, or is not ready yet.", "檔案已不在，或尚未就緒。"),
    "library.no_section": ("There is no such section in this document.", "這份文件沒有這個章節。"),
    "library.name_taken": ("You have a collection called “{name}” already.", "你已有名為「{name}」的文件集。"),
    "library.many_collections": (
        "You own {n:,} collection, and {limit:,} is the limit; delete one first.|You own {n:,} collections, and "
        "{limit:,} is the limit; delete one first.",
        "你有 {n:,} 個文件集，上限是 {limit:,} 個；請先刪除一個。",
    ),
    "library.many_readers": (
        "A collection has at most {limit:,} readers by name; take somebody away first.",
        "一個文件集最多有 {limit:,} 位指名的讀者；請先取消一位。",
    ),
    "library.nobody_to_name": (
        "Nobody signs in here, so nobody can be named.",
        "這裡不需登入，因此無法指名。",
    ),
    "library.no_account": ("Nobody called “{name}” may sign in here.", "這裡沒有可登入的「{name}」。"),
    "library.owner_reads": ("Its owner always reads a collection.", "文件集的擁有者始終可以閱讀。"),
    "library.not_to_everybody": (
        "Only an administrator opens a collection to everybody.",
        "只有管理員能把文件集開放給所有人。",
    ),
    "library.not_to_keep": (
        "What stays in the shared memory is decided by a collection’s owner, where people sign in, and by "
        "administrators.",
        "哪些文件留在共用記憶體，由文件集的擁有者（在需要登入時）和管理員決定。",
    ),
    "library.pins_full": (
        "{n:,} block is pinned, and at most {limit:,} may be, which is half of the memory. Unpin a document "
        "first.|{n:,} blocks are pinned, and at most {limit:,} may be, which is half of the memory. Unpin a document "
        "first.",
        "已釘選 {n:,} 個區塊，上限是 {limit:,} 個，即記憶體的一半。請先取消釘選一份文件。",
    ),
    "library.warming_already": (
        "A collection is being read into memory already; wait for its end or stop it.",
        "已有文件集正在讀入記憶體；請等它結束或停止它。",
    ),
    "library.nothing_to_warm": (
        "There is nothing in this collection to read into memory yet.",
        "這個文件集裡還沒有可讀入記憶體的內容。",
    ),
    "library.too_large": (
        "The file is too large: at most {limit:,.1f} MiB are taken. Split it, or ask whoever runs this page.",
        "檔案太大：最多接受 {limit:,.1f} MiB。請分割檔案，或洽詢此頁的管理者。",
    ),
    "library.is_empty": (
        "The file is empty, or it is a folder: choose the files in it.",
        "檔案是空的，或是資料夾：請選擇其中的檔案。",
    ),
    "library.duplicate": (
        "This is in the collection already, as “{name}”.",
        "文件集裡已有相同內容，名為「{name}」。",
    ),
    "library.reason.no_text": ("There is no text in it: perhaps it is scanned", "裡面沒有文字，可能是掃描檔"),
    "library.reason.encoding": ("Its characters could not be told", "無法判斷文字編碼"),
    "library.reason.not_text": ("It is no text", "這不是文字檔"),
    "library.reason.not_supported": ("This kind of file is not read", "不支援這種檔案"),
    "library.reason.damaged": ("The file is damaged", "檔案已損壞"),
    "library.reason.encrypted": ("The file is protected by a password", "檔案有密碼保護"),
    "library.reason.too_long": ("It is too long", "內容太長"),
    "library.reason.too_many_pages": ("It has too many pages", "頁數太多"),
    "library.reason.time": ("Reading it took too long", "讀取時間過長"),
    "library.reason.memory": ("Reading it took too much memory", "讀取時占用過多記憶體"),
    "library.reason.cancelled": ("It was cancelled", "已取消"),
    "library.reason.crashed": ("The server ended while it was read", "讀取時伺服器中斷"),
    "library.reason.internal": ("It could not be indexed", "無法建立索引"),
})  # fmt: skip

TEXTS: Mapping[str, tuple[str, str]] = MappingProxyType({**_PAGE, **_REFUSALS})
