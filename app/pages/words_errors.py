"""Refusals and failures. `error.<code>` names what an error's own English sentence (shown behind it) is about;
sentences with a key of their own are raised as `phrase`s. See `words`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TEXTS: Mapping[str, tuple[str, str]] = MappingProxyType({
    "error.app_error": ("That did not work.", "沒有成功。"),
    "error.internal_error": ("Something went wrong inside Coread.", "Coread 內部出了問題。"),
    "error.no_identity": ("Your browser sent no identity.", "瀏覽器沒有送出身分。"),
    "error.signed_out": ("You are signed out.", "你已登出。"),
    "error.not_allowed": ("This is not allowed.", "不允許這麼做。"),
    "error.not_found": ("There is no such thing here.", "這裡沒有這個東西。"),
    "error.invalid_question": ("The question was not taken.", "這個問題無法接受。"),
    "error.comment_refused": ("The comment was not taken.", "這則意見無法接受。"),
    "error.title_refused": ("The title was not taken.", "這個標題無法接受。"),
    "error.upload_refused": ("The file was not taken.", "這個檔案無法接受。"),
    "error.invalid_value": ("A value was not taken.", "填入的內容無法接受。"),
    "error.quota_exceeded": ("The limit is reached.", "已達上限。"),
    "error.rate_limit_exceeded": ("Too much at once.", "一時用得太多，請稍後再試。"),
    "error.turn_running": ("An answer is still being written.", "還有答案正在撰寫。"),
    "error.warming_up": ("The models are still being loaded.", "模型仍在載入。"),
    "error.loading_failed": ("The models could not be loaded.", "模型無法載入。"),
    "error.body_too_large": ("This is larger than is taken.", "送出的內容太大。"),
    "error.shutting_down": ("Coread is being stopped.", "Coread 正在關閉。"),
    "error.server_unreachable": ("The server does not answer.", "伺服器沒有回應。"),
    "error.engine_error": ("The engine failed.", "引擎出了問題。"),
    "error.invalid_request": ("The engine refused the request.", "引擎拒絕了這個請求。"),
    "error.context_length_exceeded": ("This is longer than the model reads.", "內容超出模型能讀的長度。"),
    "error.kv_pool_too_small": ("This does not fit the memory.", "記憶體放不下。"),
    "error.deadline_exceeded": ("It took too long.", "花費的時間過長。"),
    "error.engine_unavailable": ("The engine is not running.", "引擎沒有在運作。"),
    "error.step_failed": ("The engine could not compute this.", "引擎無法完成這次計算。"),
    "error.non_finite_logits": ("The model computed no usable number.", "模型算不出可用的結果。"),
    "error.model_not_found": ("The model was not found.", "找不到模型。"),
    "error.kv_dtype_refused": ("The memory cannot be kept in this format.", "無法以這種格式保存記憶。"),
    "error.model_refused": ("The model cannot be used.", "無法使用這個模型。"),
    "error.knowledge_base_error": ("The knowledge base failed.", "知識庫出了問題。"),
    "error.database_error": ("The database failed.", "資料庫出了問題。"),
    "error.duplicate_document": ("This document is there already.", "這份文件已經在了。"),
    "error.invalid_query": ("The question cannot be searched for.", "無法用這個問題搜尋。"),
    "error.parse_failed": ("The file could not be read.", "無法讀取這個檔案。"),
    "error.reranker_unavailable": ("The search cannot order what it found.", "無法排序搜尋結果。"),
    "error.embedder_unavailable": ("Search is not available.", "目前無法搜尋。"),
    "error.prompt_too_long": ("This is longer than the model reads.", "內容超出模型能讀的長度。"),
    "refused.empty": (
        "The question is empty: write what you want to know.",
        "問題是空的，請寫下你想知道的事。",
    ),
    "refused.long": (
        "The question has {n:,} characters; at most {limit:,} are taken. Add long texts as a document instead.",
        "問題有 {n:,} 個字元，最多接受 {limit:,} 個。長文請改以文件加入。",
    ),
    "refused.search_long": (
        "What you search for has {n:,} characters; at most {limit:,} are taken.",
        "搜尋的文字有 {n:,} 個字元，最多接受 {limit:,} 個。",
    ),
    "refused.collection_gone": (
        "The collection that this conversation reads was deleted or is no longer shared with you; choose another "
        "one above.",
        "這個對話所讀的文件集已刪除，或不再與你分享；請在上方另選。",
    ),
    "refused.running": (
        "This conversation is still being answered; stop it or wait for the end.",
        "這個對話還在回答中，請停止或等它完成。",
    ),
    "refused.reader_running": (
        "Your second reader is still reading; wait until it has finished.",
        "你的第二位讀者還在讀，請等它讀完。",
    ),
    "refused.nothing_read": (
        "Ask something or choose a document first; the second reader joins you there.",
        "請先提問或選一份文件，第二位讀者會在那裡加入。",
    ),
    "refused.no_question": ("There is no question to answer again.", "沒有可以重新回答的問題。"),
    "refused.no_edit": ("There is no question to edit.", "沒有可以編輯的問題。"),
    "refused.no_source": ("There is no such source under this answer.", "這個答案下沒有這個來源。"),
    "refused.nothing": ("There is nothing here.", "這裡什麼都沒有。"),
    "refused.rating": (
        "An answer is rated good or bad, with words if you like.",
        "答案可以評為好或不好，也可以附上意見。",
    ),
    "refused.no_conversation": ("There is no such conversation.", "沒有這個對話。"),
    "refused.no_message": ("There is no such message in this conversation.", "這個對話裡沒有這則訊息。"),
    "refused.document_gone": (
        "This document was deleted or is not shared with you.",
        "這份文件已被刪除，或沒有與你分享。",
    ),
    "refused.document_replaced": (
        "This document has been replaced since the answer was written.",
        "這份文件在答案寫成之後已被更換。",
    ),
    "refused.document_changed": (
        "This document was deleted, replaced or is no longer shared with you.",
        "這份文件已被刪除、更換，或不再與你分享。",
    ),
    "refused.file_large": (
        "The file has {size}; at most {limit} are taken.",
        "檔案有 {size}，最多接受 {limit}。",
    ),
})  # fmt: skip
