"""What a client may send to `/v1/chat/completions`, and the shape of an error, in OpenAI's terms."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field

from app.errors import AppError
from engine.types import SamplingParams

#: Fields that would change the answer and that Coread does not have. Sent with a value, they are refused:
#: an answer that silently ignores them would be wrong.
UNSUPPORTED = (
    "tools", "functions", "function_call", "tool_choice", "response_format", "logit_bias", "audio",
    "modalities", "prediction", "web_search_options", "frequency_penalty", "presence_penalty",
)  # fmt: skip
#: Characters of what a client sent that are said back to it.
_SHOWN = 200


def _harmless(name: str, value: Any) -> bool:
    """True for a value that asks for what Coread does anyway."""
    match name:
        case "tool_choice" | "function_call":
            return bool(value == "none")
        case "response_format":
            return bool(value == {"type": "text"})
        case "modalities":
            return bool(value == ["text"])
        case _:
            return value in (None, 0, [], {})


class ApiRefusal(AppError):
    """A request that is refused in OpenAI's error object."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None,
                 param: str | None = None, kind: str = "invalid_request_error",
                 retry_after_s: float | None = None) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.api_code, self.param, self.kind = status, code, param, kind
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        return {
            "error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.api_code}
        }


def _text_of(content: Any) -> Any:
    """A message's content as one string; parts that are not text are refused."""
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            kind = kind[:_SHOWN] if isinstance(kind, str) else type(kind).__name__
            raise ValueError(f"a content part of type {kind!r} is not supported; only text is")
        texts.append(part["text"])
    return "\n".join(texts)


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text_of)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


def _stop_list(value: Any) -> Any:
    """A list of texts; the first value of it that is none ends the reading, since an error for each of a
    million would fill the memory."""
    if isinstance(value, list) and not all(isinstance(each, str) for each in value):
        raise ValueError("every value should be a text")
    return [value] if isinstance(value, str) else value


class ChatRequest(BaseModel):
    """The fields that have a meaning here. `user` and `metadata` are labels and decide nothing."""

    model_config = ConfigDict(extra="allow")

    model: str
    #: Counting stops there; two hundred thousand held the event loop for two seconds.
    messages: Annotated[list[ChatMessage], FailFast()] = Field(min_length=1, max_length=20_000)
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=16)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_stop_list)] = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    ignore_eos: bool = False
    user: str | None = Field(None, max_length=512)

    def refuse_unsupported(self) -> None:
        """Raise `ApiRefusal` for a field that would change the answer and that Coread does not have."""
        extra = self.model_extra or {}
        for name in UNSUPPORTED:
            value = extra.get(name)
            if value is None or _harmless(name, value):
                continue
            raise ApiRefusal(f"{name} is not supported by this server.", code="unsupported", param=name)

    def sampling(self, default_temperature: float, max_tokens: int) -> SamplingParams:
        """The engine's parameters; what the client left out takes the server's defaults."""
        wants_logprobs = bool(self.logprobs)
        return SamplingParams(
            temperature=default_temperature if self.temperature is None else self.temperature,
            top_k=max(0, self.top_k or 0),  # -1 means "off" to some clients
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            seed=self.seed,
            max_tokens=max_tokens,
            stop=tuple(self.stop or ()),
            ignore_eos=self.ignore_eos,
            logprobs=(self.top_logprobs or 0) if wants_logprobs else None,
        )
