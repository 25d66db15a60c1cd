"""Every way in which the knowledge base says no, as a named exception.

Each message is one plain sentence that names the value and the limit, fit to be shown to a person.
`code` is a stable word for programs.
"""

from __future__ import annotations


class RagError(Exception):
    """Base of all errors that the knowledge base raises on purpose."""

    code = "knowledge_base_error"
    #: True where the same call may succeed later without being changed.
    retryable = False


class DataDirUnwritable(RagError):
    """The data folder can't be created or written."""

    code = "data_dir_unwritable"


class DataDirLocked(RagError):
    """Another server owns the data folder."""

    code = "data_dir_locked"

    def __init__(self, path: str, holder: dict[str, object]) -> None:
        who = f"process {holder['pid']}" if holder.get("pid") else "another process"
        super().__init__(f"The data folder {path} is in use by {who}; stop it or choose another data folder.")
        #: What the owner wrote into the lock file: "pid" and, once it serves, "url".
        self.holder = holder


class DatabaseError(RagError):
    """The database can't be opened or its schema is newer than this program."""

    code = "database_error"


class NotFound(RagError):
    """No such thing, or the caller may not read it: the two are deliberately the same answer."""

    code = "not_found"


class DuplicateDocument(RagError):
    """The collection already holds a document with exactly this content."""

    code = "duplicate_document"

    def __init__(self, existing: str, name: str) -> None:
        super().__init__(f'The same content is already in this collection as "{name}".')
        self.existing, self.name = existing, name


class UploadRefused(RagError):
    """The upload itself is unusable: empty, or larger than the limit."""

    code = "upload_refused"


class QuotaExceeded(RagError):
    """The collection or its owner has used up what the server allows."""

    code = "quota_exceeded"

    def __init__(self, what: str, used: int, limit: int) -> None:
        super().__init__(f"That would make {used:,} {what}; the limit is {limit:,}. Delete something first.")
        self.what, self.used, self.limit = what, used, limit


class InvalidQuery(RagError):
    """A search or question without content, or one that is too long."""

    code = "invalid_query"


class ParseFailed(RagError):
    """The document could not be turned into text. `reason` is a stable word or two."""

    code = "parse_failed"

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


class EmbedderUnavailable(RagError):
    """No usable embedding model where the settings point."""

    code = "embedder_unavailable"


class RerankerUnavailable(RagError):
    """No usable cross-encoder where the settings point."""

    code = "reranker_unavailable"


class UnstableTemplate(RagError):
    """The model's chat template can't be laid out so that earlier tokens stay the same."""

    code = "unstable_template"


class PromptTooLong(RagError):
    """Instructions and question alone exceed what the model can read."""

    code = "prompt_too_long"

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(
            f"Question and instructions have {tokens:,} tokens; there is room for {limit:,}. Shorten it."
        )
        self.tokens, self.limit = tokens, limit
