"""Every way in which the engine says no, as a named exception.

The message of each is one plain sentence that names the value and the limit, fit to be shown to the
person who asked. `code` is a stable word for programs (HTTP error objects, tests, logs).
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors that the engine raises on purpose."""

    code = "engine_error"
    #: True where the same request may succeed later without being changed.
    retryable = False


class InvalidRequest(EngineError):
    """The request itself is malformed: an empty prompt, a sampling value out of range."""

    code = "invalid_request"


class ContextTooLong(InvalidRequest):
    """Prompt and answer together exceed the model's context."""

    code = "context_length_exceeded"

    def __init__(self, prompt_tokens: int, max_tokens: int, limit: int) -> None:
        super().__init__(
            f"The prompt has {prompt_tokens:,} tokens and up to {max_tokens:,} more were asked for; "
            f"this model reads at most {limit:,} in all."
        )
        self.prompt_tokens, self.max_tokens, self.limit = prompt_tokens, max_tokens, limit


class PoolTooSmall(InvalidRequest):
    """The request can never fit the KV pool, whoever else leaves."""

    code = "kv_pool_too_small"

    def __init__(self, needed_blocks: int, available_blocks: int, block_size: int) -> None:
        super().__init__(
            f"This request needs {needed_blocks:,} blocks of {block_size} tokens and this server's memory "
            f"has room for {available_blocks:,}; ask with a shorter document or a shorter answer."
        )
        self.needed_blocks, self.available_blocks = needed_blocks, available_blocks


class LimitReached(EngineError):
    """A principal's or the server's limit on running or queued requests is used up."""

    code = "rate_limit_exceeded"
    retryable = True

    def __init__(self, what: str, limit: int, retry_after_s: float = 2.0) -> None:
        super().__init__(f"The limit of {limit:,} {what} is reached; try again in a few seconds.")
        self.what, self.limit, self.retry_after_s = what, limit, retry_after_s


class DeadlineExceeded(EngineError):
    """The request's own deadline passed before it was finished."""

    code = "deadline_exceeded"
    retryable = True


class EngineStarting(EngineError):
    """The model is still being loaded."""

    code = "warming_up"
    retryable = True


class EngineUnavailable(EngineError):
    """The engine's thread has ended; a restart is needed."""

    code = "engine_unavailable"
    retryable = True


class StepFailed(EngineError):
    """The forward pass of a step that this request was part of raised an error."""

    code = "step_failed"
    retryable = True


class NonFiniteLogits(EngineError):
    """The model produced NaN or infinite logits for this sequence; its neighbours are unaffected."""

    code = "non_finite_logits"


class ModelNotFound(EngineError):
    """No usable model was found where the settings point."""

    code = "model_not_found"


class ModelRefused(EngineError):
    """The model was found, but uses something that the engine does not compute exactly."""

    code = "model_refused"


class KVDtypeRefused(ModelRefused):
    """The device or the attention backend cannot keep KV in the precision that was asked for."""

    code = "kv_dtype_refused"


class IntegrityError(EngineError):
    """An invariant of the memory does not hold: a defect in Coread, never the caller's fault."""

    code = "integrity"
