"""The chat page's texts: components, stages, answers, sources. See `words` for how they are used."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from app.pages import words_errors, words_receipt
from app.pages.words_library import FORMATS

_PAGE: Mapping[str, tuple[str, str]] = MappingProxyType({
    "page.title": ("Coread · many readers, one copy", "Coread · 眾人共讀，一份記憶"),
    "page.chat": ("Chat", "對話"),
    "page.motto": ("Many readers, one copy.", "眾人共讀，一份記憶。"),
    "page.honest": (
        "The model can be wrong: check the passage under each answer.",
        "模型可能答錯，請核對每個答案下方的段落。",
    ),
    "page.honest_tiny": (
        "The packaged model is very small and reads English best.",
        "內附的模型非常小，以英文閱讀最好。",
    ),
    "page.about": ("You and your language", "你與你的語言"),
    "page.other_language": ("繁體中文", "English"),
    "page.other_code": ("zh-Hant", "en"),
    "page.profile": ("Your profile", "你的個人頁面"),
    "page.signed_out": ("You are signed out", "你已登出"),
    "page.signed_out_why": (
        "Your session has ended. Sign in again to go on; a question that you have typed stays in its box.",
        "你的登入已結束。請重新登入以繼續；已輸入的問題會保留在輸入框中。",
    ),
    "page.sign_in": ("Sign in", "登入"),
    "page.not_found": ("Page not found", "找不到頁面"),
    "page.nowhere": ("There is nothing at this address.", "這個網址沒有任何內容。"),
    "page.refused": ("Not allowed", "不允許"),
    "page.not_taken": ("This address does not take what was sent to it.", "這個網址不接受送來的內容。"),
    "page.later": ("Not just now", "請稍候"),
    "page.to_chat": ("To the chat", "前往對話"),
    "chat.empty": (
        "### Many readers, one copy\n\nAsk about the documents, and check each answer against the passage under "
        "it. When somebody else reads the same document, the memory that the model needs for it is kept **once** "
        "for both of you; the memory panel shows what that saves.\n\n**Your own file:** open the sidebar "
        "(top left), then *Your own documents*. Only you can read what you add.",
        "### 眾人共讀，一份記憶\n\n針對文件提問，並用答案下方的段落核對每個答案。有別人也在讀同一份文件時，模型為它所需的"
        "記憶只保留**一份**，由你們共用；記憶面板會顯示省下了多少。\n\n**用你自己的檔案：** 打開左上角的側邊欄，再點"
        "*你自己的文件*。你加入的文件只有你能讀。",
    ),
    "chat.new": ("New conversation", "新對話"),
    "chat.search": ("Search your conversations", "搜尋你的對話"),
    "chat.search_hint": ("Search your conversations…", "搜尋你的對話…"),
    "chat.history": ("Your conversations", "你的對話"),
    "chat.none_found": ("No conversation contains that", "沒有對話包含這些字"),
    "chat.untitled": ("Untitled", "未命名"),
    "chat.opened": ("This conversation", "這個對話"),
    "chat.title": ("Title", "標題"),
    "chat.rename": ("Rename", "重新命名"),
    "chat.export_markdown": ("Export Markdown", "匯出 Markdown"),
    "chat.export_json": ("Export JSON", "匯出 JSON"),
    "chat.delete": ("Delete", "刪除"),
    "chat.delete_title": ("Delete this conversation?", "要刪除這個對話嗎？"),
    "chat.delete_why": (
        "All its questions and answers go, and its place in memory is given back. This cannot be undone.",
        "其中所有的問題和答案都會消失，占用的記憶體也會歸還。此動作無法復原。",
    ),
    "chat.keep": ("Keep it", "保留"),
    "chat.own": ("Your own documents", "你自己的文件"),
    "chat.add": ("Add documents", "加入文件"),
    "chat.kinds": (
        FORMATS[0] + ". Only you can read what you add.",
        FORMATS[1] + "。你加入的文件只有你能讀。",
    ),
    "chat.read_from": ("Read from", "閱讀範圍"),
    "chat.search_all": ("Search all documents", "搜尋所有文件"),
    "chat.only": ("Only: {title}", "只讀：{title}"),
    "chat.only_collection": ("Collection: {name}", "文件集：{name}"),
    "chat.question": ("Your question", "你的問題"),
    "chat.question_hint": ("Ask about the documents…", "針對文件提問…"),
    "chat.ask": ("Ask", "提問"),
    "chat.stop": ("Stop", "停止"),
    "chat.invite": ("Invite a second reader", "邀請第二位讀者"),
    "chat.invite_why": (
        "A scripted reader opens what you are reading, on the same engine, so that you can watch the memory being "
        "shared.",
        "一位照腳本行動的讀者會在同一個引擎上打開你正在讀的內容，讓你看到記憶如何共用。",
    ),
    "chat.failed": ("That did not work", "沒有成功"),
    "guest.head": ("**The second reader** reads *{title}* too and asks:", "**第二位讀者**也在讀《{title}》，並問："),
    "guest.starting": ("Starting…", "開始…"),
    "guest.came": (
        "**{reused:,} of {prompt:,} prompt tokens came from memory** that was already there; {copied}.",
        "**提示的 {prompt:,} 個 token 中有 {reused:,} 個來自記憶體中**既有的內容；{copied}。",
    ),
    "upload.reading": ("reading", "讀取中"),
    "upload.queued": ("in line", "排隊中"),
    "upload.parsing": ("reading the text", "擷取文字中"),
    "upload.embedding": ("making it searchable", "建立搜尋索引中"),
    "upload.ready": ("ready, {n:,} passage|ready, {n:,} passages", "完成，共 {n:,} 個段落"),
    "upload.failed": ("could not be read", "無法讀取"),
    "stage.searching": ("Searching the documents", "搜尋文件中"),
    "stage.engine": ("Waiting for the engine", "等待引擎"),
    "stage.prefill": (
        "Somebody is reading the same document; waiting to share it",
        "有人正在讀同一份文件，等待共用",
    ),
    "stage.memory": ("Waiting for memory, place {place:,} in line", "等待記憶體，排在第 {place:,} 位"),
    "stage.queue": ("Waiting in line, place {place:,}", "排隊中，第 {place:,} 位"),
    "stage.reading": ("Reading {done:,} of {total:,} tokens", "閱讀中，{done:,}／{total:,} 個 token"),
    "stage.reading_reused": (
        "Reading {done:,} of {total:,} tokens, {reused:,} of them already in memory",
        "閱讀中，{done:,}／{total:,} 個 token，其中 {reused:,} 個已在記憶體中",
    ),
    "stage.writing": ("Writing", "撰寫中"),
    "note.lost": (
        "Earlier answers were left out: a document they were made from is gone.",
        "略去了先前的部分答案：它們所依據的文件已經不在。",
    ),
    "note.oldest": (
        "The oldest message no longer fits what the model reads.|The {n:,} oldest messages no longer fit what the "
        "model reads.",
        "最早的 {n:,} 則訊息已超出模型能讀的長度。",
    ),
    "note.passages": (
        "{n:,} passage was left out: it did not fit.|{n:,} passages were left out: they did not fit.",
        "略去了 {n:,} 個段落：放不下。",
    ),
    "note.appended": (
        "New passages were placed after the history, where only you can share them.",
        "新找到的段落放在對話紀錄之後，只有你自己能重複使用。",
    ),
    "note.looped": (
        "The model began to repeat itself; the answer was ended there.",
        "模型開始重複自己的話，答案就在那裡結束。",
    ),
    "answer.refused": (
        "The documents that you may read do not seem to say. The passages shown with this came closest; they are "
        "not an answer.",
        "你可以讀的文件裡似乎沒有寫到。附上的是最接近的段落，它們並不是答案。",
    ),
    "answer.nothing": ("No text was written.", "沒有寫出任何文字。"),
    "answer.stopped": ("Stopped before the end.", "在完成之前停止了。"),
    "answer.length": (
        "Ended at the length limit of {n:,} token.|Ended at the length limit of {n:,} tokens.",
        "答案達到 {n:,} 個 token 的長度上限，就此結束。",
    ),
    "answer.sentences": ("Of {n:,} sentences: {parts}.", "{n:,} 句之中：{parts}。"),
    "answer.comma": (", ", "、"),
    "answer.failed": ("This answer could not be finished.", "這個答案沒能完成。"),
    "answer.passage_now": ("Best passage found, while the answer is being written:", "答案撰寫中，先看找到的最佳段落："),
    "answer.edit": ("Edit", "編輯"),
    "answer.copy": ("Copy", "複製"),
    "answer.copy_failed": ("The browser did not allow copying.", "瀏覽器不允許複製。"),
    "answer.copied": ("Copied", "已複製"),
    "answer.helped": ("Helpful", "有幫助"),
    "answer.helped_not": ("Not helpful", "沒幫助"),
    "answer.helped_why": ("This answer helped", "這個答案有幫助"),
    "answer.helped_not_why": ("This answer did not help", "這個答案沒有幫助"),
    "answer.rated_good": ("you found it helpful", "你覺得有幫助"),
    "answer.rated_bad": ("you found it wrong", "你覺得不對"),
    "branch.before": ("The version before this one", "上一個版本"),
    "branch.after": ("The version after this one", "下一個版本"),
    "branch.at": ("{at:,} of {of:,}", "第 {at:,} 個，共 {of:,} 個"),
    "branch.cost": (
        "this branch: about {n:,} block of its own|this branch: about {n:,} blocks of its own",
        "此分支：自己約 {n:,} 個區塊",
    ),
    "branch.others": ("the others: {costs}", "其他分支：{costs}"),
    "source.sources": ("Source|Sources", "來源"),
    "source.more": (" and {n:,} more", " 等另外 {n:,} 份"),
    "source.gone_title": ("A document that is gone", "已不在的文件"),
    "source.replaced_title": ("{title}, an earlier version", "{title}（先前的版本）"),
    "source.replaced": (
        "This document was replaced by a newer version after the answer was written.",
        "這份文件在答案寫成之後已換成新版本。",
    ),
    "source.page": ("page {page:,}", "第 {page:,} 頁"),
    "source.gone": (
        "This document was deleted or is no longer shared with you.",
        "這份文件已被刪除，或不再與你分享。",
    ),
    "source.verified": ("✓ verified", "✓ 已核實"),
    "source.similar": ("≈ similar", "≈ 相近"),
    "source.unsupported": ("? unsupported", "? 無佐證"),
    "source.closest": ("✗ no answer", "✗ 並非答案"),
    "source.closest_why": (
        "closest: came nearest to the question; no answer was made from it",
        "最接近：與問題最接近的段落，沒有據此作答",
    ),
    "source.verified_why": (
        "verified: one sentence or table row here has its names, its numbers with their units and most of its words",
        "已核實：此段落有一句話或一列表格，包含其名稱、數字及單位，以及大部分用詞",
    ),
    "source.similar_why": (
        "similar: close to this passage, but no one place in it says it like that; check names and numbers",
        "相近：用詞與此段落接近，但沒有任何一處這樣寫；請核對名稱與數字",
    ),
    "source.unsupported_why": (
        "unsupported: most of its words, or a number or date, are in no passage",
        "無佐證：大部分用詞，或其中的數字或日期，在段落中都找不到",
    ),
    "source.found": ("search: {how}", "搜尋：{how}"),
    "source.rank": ("{leg} rank {rank:,}", "{leg} 第 {rank:,} 名"),
    "source.score": ("score {score:.3f}", "分數 {score:.3f}"),
    "desk.close": ("Close", "關閉"),
    "desk.text": ("Text of the document", "文件內容"),
    "desk.offline": ("No answer from the server; try again.", "伺服器沒有回應，請再試一次。"),
    "desk.thanks": ("Thank you", "謝謝"),
    "desk.good_why": ("What was good about it?", "好在哪裡？"),
    "desk.bad_why": ("What was wrong with it?", "哪裡不對？"),
    "desk.optional": ("(You may also just close this.)", "（也可以直接關閉。）"),
    "desk.send": ("Send", "送出"),
    "desk.edit": ("Edit the question", "編輯問題"),
    "desk.edit_why": (
        "It is asked beside the first one; both stay.",
        "它會成為原問題旁的另一個版本，兩者都會保留。",
    ),
})  # fmt: skip
TEXTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {**_PAGE, **words_receipt.TEXTS, **words_errors.TEXTS}
)
