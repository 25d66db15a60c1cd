"""`POST /v1/chat/completions` and `GET /v1/models`, served by the same engine as the page.

Stateless: the client's messages are the conversation, and their text has the scope of the client's own
account. The model `coread` also searches the collections that the account may read; the language model's
own name does not.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Send
from starlette.types import Scope as ASGIScope

from app.errors import AppError, NotFoundHere, QuestionRefused
from app.http_errors import as_refusal, as_response, maximum_context
from app.limits import MeteredGeneration
from app.openai_schema import ApiRefusal, ChatRequest
from app.pages.words import phrase
from app.principal import Principal
from app.refusal import CLOSEST, refusal_text
from app.runtime import Runtime
from app.text import broken, may_be_broken
from engine.errors import EngineError
from engine.types import (
    Delta,
    Done,
    Event,
    Failed,
    GenerationRequest,
    Receipt,
    Scope,
    Segment,
    TokenLogprob,
)
from rag.errors import RagError
from rag.prompt import Turn

SEARCHING_MODEL = "coread"
#: Length of an answer of the language model alone whose client names none; `coread`'s is the page's.
_DEFAULT_TOKENS = 1_024
#: Log-probabilities of an answer that is kept until it is whole: some 100 bytes each, in memory and as text.
_MAX_LOGPROBS = 250_000
#: No line ends in an event stream, but some clients' ways of reading lines take them for such (Python's
#: `str.splitlines`, JavaScript before 2019). JSON escapes all the others by itself.
_LINE_ENDS = (("\x85", "\\u0085"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029"))
#: Methods that are answered with the error object where there is no route for them.
_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
#: Characters of a name that a client sent that are said back to it.
_SHOWN = 200
#: How often a client that does not stream is checked for having gone away.
_LOOK_S = 0.5


def openai_router(runtime: Runtime) -> APIRouter:
    """The `/v1` routes over `runtime`."""
    router = APIRouter(prefix="/v1")
    api = _Api(runtime)

    @router.get("/models")
    async def models(request: Request) -> dict[str, Any]:
        runtime.identify("api", request)
        return {"object": "list", "data": [api.model(name) for name in api.models()]}

    @router.get("/models/{name:path}", include_in_schema=False)
    async def model(name: str, request: Request) -> dict[str, Any]:
        runtime.identify("api", request)
        if name not in api.models():
            raise api.unknown(name)
        return api.model(name)

    @router.post("/chat/completions", dependencies=[Depends(_characters)])
    async def completions(body: ChatRequest, request: Request) -> Response:
        principal = runtime.identify("api", request)
        call = await api.begin(principal, body)
        if body.stream:
            return _Stream(call, api.stream(call))
        answer = await api.complete(call, request)
        return Response(answer, media_type="application/json", headers=call.headers)

    return router


async def _characters(request: Request) -> None:
    """Refuses half of a surrogate pair by its place: pydantic would say it of the whole message, and a
    tokenizer fails on it. A body in which there can be none is not walked through."""
    if not may_be_broken(await request.body()):
        return
    try:
        value = await request.json()  # kept from when FastAPI read it
    except (ValueError, RecursionError):
        return  # no JSON, which FastAPI says next
    if (where := await asyncio.to_thread(broken, value)) is not None:
        raise ApiRefusal(
            f"{where[:_SHOWN]}: half of a surrogate pair (U+D800 to U+DFFF alone) is no character.",
            code="invalid_value", param=where[:_SHOWN],
        )  # fmt: skip


def unknown_router(known: Iterable[BaseRoute]) -> APIRouter:
    """What is asked for under `/v1` and is not there, as the error object that clients read. To be included
    behind `known`, the routes that are."""
    routes = list(known)
    router = APIRouter(include_in_schema=False)

    async def nothing(request: Request) -> Response:
        path, method = str(request.scope["path"]), request.method
        allowed = {other for other in _METHODS if any(_takes(route, path, other) for route in routes)}
        if not allowed:
            raise ApiRefusal(f"There is nothing at {path[:200]}.", status=404, code="not_found")
        takes = ", ".join(sorted(allowed))
        words = f"{path[:200]} does not take {method}; it takes {takes}."
        answer = as_response(ApiRefusal(words, status=405, code="method_not_allowed"))
        answer.headers["allow"] = takes
        return answer

    for path in ("/v1", "/v1/{rest:path}"):
        router.add_api_route(path, nothing, methods=list(_METHODS), response_model=None)
    return router


def _takes(route: BaseRoute, path: str, method: str) -> bool:
    scope = {"type": "http", "path": path, "method": method, "root_path": "", "headers": []}
    return route.matches(scope)[0] is Match.FULL


@dataclass(slots=True)
class _Choice:
    """What has come of one choice so far."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    tokens: int = 0
    receipt: Receipt | None = None


@dataclass(slots=True)
class _Call:
    """One running request."""

    id: str
    model: str
    created: int
    body: ChatRequest
    #: None where the documents do not seem to say: then `said` is the answer.
    generation: MeteredGeneration | None
    headers: dict[str, str]
    choices: dict[int, _Choice]
    said: str = ""

    def abort(self) -> None:
        if self.generation is not None:
            self.generation.abort()


class _Stream(StreamingResponse):
    """A stream whose request ends with it. A client that is gone before the first chunk is sent leaves a
    generator that was never begun, and such a one has no end of its own."""

    def __init__(self, call: _Call, chunks: AsyncIterator[str]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"} | call.headers
        super().__init__(chunks, media_type="text/event-stream", headers=headers)
        self._call = call

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.abort()


async def _events(call: _Call) -> AsyncIterator[Event]:
    """What the engine tells of a request, or what it would tell had it written what is said instead."""
    if call.generation is not None:
        async for event in call.generation:
            yield event
        return
    nothing = Receipt(0, 0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0, 0, 0.0, 0.0, None, 0.0)
    for index in call.choices:
        yield Delta(index, call.said, ())
        yield Done(index, "stop", call.said, (), nothing)


class _Api:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.started = time.time()

    def model(self, name: str) -> dict[str, Any]:
        """One model as OpenAI describes it."""
        return {"id": name, "object": "model", "created": int(self.started), "owned_by": "coread"}

    def unknown(self, name: str) -> ApiRefusal:
        """The refusal of a model that is not served."""
        return ApiRefusal(
            f"The model {name[:_SHOWN]!r} is not served here; known are {', '.join(self.models())}.",
            status=404, code="model_not_found", param="model",
        )  # fmt: skip

    def models(self) -> list[str]:
        """`coread`, and the language model by its own name."""
        return [SEARCHING_MODEL, self._runtime.engine.status().model]

    # -- the request -------------------------------------------------------------------------------------

    async def begin(self, principal: Principal, body: ChatRequest) -> _Call:
        """Check, lay out and submit; every refusal happens here, before a stream has begun."""
        body.refuse_unsupported()
        engine = self._runtime.engine
        status = engine.status()
        if body.model not in self.models():
            raise self.unknown(body.model)
        context = status.shape.max_context if status.shape else 0
        # These two only keep absurd bodies from the template and the tokenizer; the engine counts exactly.
        # Each message has at least its role's token, and no token stands for so many characters.
        if len(body.messages) > context:
            raise ApiRefusal(
                f"{maximum_context(context)} There are {len(body.messages):,} messages.",
                code="context_length_exceeded", param="messages",
            )  # fmt: skip
        characters = sum(len(message.content) for message in body.messages)
        if characters > 64 * context:
            raise ApiRefusal(
                f"{maximum_context(context)} The messages have {characters:,} characters.",
                code="context_length_exceeded", param="messages",
            )  # fmt: skip
        asked = body.max_completion_tokens or body.max_tokens
        if asked is not None and asked >= context:
            raise ApiRefusal(
                f"{maximum_context(context)} An answer of {asked:,} tokens leaves none for the messages.",
                code="context_length_exceeded",
                param="max_completion_tokens" if body.max_completion_tokens else "max_tokens",
            )
        with self._runtime.limits.place(engine, principal.id):
            return await self._submit(principal, body, asked, context)

    async def _submit(
        self, principal: Principal, body: ChatRequest, asked: int | None, context: int
    ) -> _Call:
        """Lay out and hand to the engine, within a context of `context` tokens."""
        settings = self._runtime.settings
        default = settings.answer_tokens if body.model == SEARCHING_MODEL else _DEFAULT_TOKENS
        segments, said, read = await self._segments(principal, body, asked or default)
        length = sum(len(segment.tokens) for segment in segments)
        room = max(1, context - length)
        sampling = body.sampling(settings.temperature, asked or min(default, room))
        kept = body.n * sampling.max_tokens * (sampling.logprobs + 1) if sampling.logprobs is not None else 0
        if kept > _MAX_LOGPROBS and not body.stream:
            raise ApiRefusal(
                f"n x max_tokens x (top_logprobs + 1) is {kept:,}; at most {_MAX_LOGPROBS:,} are kept for a "
                "whole answer. Ask for fewer, or for a stream.",
                code="invalid_value", param="top_logprobs",
            )  # fmt: skip
        id = f"chatcmpl-{secrets.token_hex(12)}"
        choices = {index: _Choice() for index in range(body.n)}
        if said:
            return _Call(id, body.model, int(time.time()), body, None, {}, choices, said)
        generation = await self._runtime.limits.submit(
            self._runtime.engine,
            GenerationRequest(
                segments=segments,
                sampling=sampling,
                principal=principal.id,
                conversation=id,
                output_scope=Scope.account(principal.id),
                n=body.n,
            ),
        )
        try:
            if await self._runtime.knowledge.forget_stale(read):
                raise NotFoundHere(phrase("refused.document_changed"))
        except BaseException:
            generation.abort()
            raise
        headers = self._runtime.limits.token_headers(principal.id)
        return _Call(id, body.model, int(time.time()), body, generation, headers, choices)

    async def _segments(
        self, principal: Principal, body: ChatRequest, answer_tokens: int
    ) -> tuple[Sequence[Segment], str, frozenset[tuple[str, int]]]:
        """The prompt, or what is said in the place of an answer; and the documents that were read, each with
        its version."""
        if body.model == SEARCHING_MODEL:
            return await self._searched(principal, body, answer_tokens)
        ids = await asyncio.to_thread(self._runtime.message_encoder.encode, body.messages, principal.id)
        return [Segment(ids, Scope.account(principal.id), "messages")], "", frozenset()

    async def _searched(
        self, principal: Principal, body: ChatRequest, answer_tokens: int
    ) -> tuple[Sequence[Segment], str, frozenset[tuple[str, int]]]:
        """Documents in front, as on the page. The client's system text is its own and stands with its first
        question: the instructions in front are the server's and shared by everybody."""
        system = "\n\n".join(m.content for m in body.messages if m.role in ("system", "developer"))
        talk = [m for m in body.messages if m.role in ("user", "assistant")]
        if talk and talk[-1].role == "user" and not talk[-1].content.strip():
            raise QuestionRefused("The question (the last message) is empty.")
        if not talk or talk[-1].role != "user":
            raise QuestionRefused(f"The last message to {SEARCHING_MODEL} must be a question from the user.")
        limit, sent = self._runtime.settings.max_question_chars, len(talk[-1].content.strip())
        if sent > limit:
            raise ApiRefusal(
                f"The question (the last message) has {sent:,} characters; at most {limit:,} are taken.",
                code="invalid_question", param="messages",
            )  # fmt: skip
        turns = [Turn("user" if m.role == "user" else "assistant", m.content) for m in talk]
        if system.strip():
            first = next(i for i, turn in enumerate(turns) if turn.role == "user")
            turns[first] = Turn("user", f"{system}\n\n{turns[first].text}")
        readable = await self._runtime.store.readable(principal)
        built = await self._runtime.prompter.build(
            readable=readable, path=(), question=turns[-1].text,
            account=principal.id, spans=None, answer_tokens=answer_tokens, earlier=turns[:-1],
        )  # fmt: skip
        if not built.refused:
            return built.segments, "", built.read
        closest = [p.span.reference(n, p.zone, CLOSEST, p.found) for n, p in enumerate(built.placed, 1)]
        return (), refusal_text(await self._runtime.knowledge.sources_in(readable, closest)), built.read

    # -- the answer --------------------------------------------------------------------------------------

    async def stream(self, call: _Call) -> AsyncIterator[str]:
        """Server-sent events. A client that leaves closes this generator, and the request is aborted."""
        usage = bool(call.body.stream_options and call.body.stream_options.include_usage)
        try:
            for index in call.choices:
                yield self._chunk(call, index, {"role": "assistant", "content": ""})
            async for event in _events(call):
                self._apply(call, event, keep=False)
                match event:
                    case Delta():
                        logprobs = self._logprobs(call, event.logprobs)
                        yield self._chunk(call, event.choice, {"content": event.text}, logprobs=logprobs)
                    case Done():
                        finish = call.choices[event.choice].finish
                        yield self._chunk(call, event.choice, {}, finish=finish)
            if usage:
                yield self._event(self._frame(call, []) | {"usage": self._usage(call)})
            yield "data: [DONE]\n\n"
        except (AppError, EngineError, RagError) as error:
            yield self._event(as_refusal(error).body())
        finally:
            call.abort()

    async def complete(self, call: _Call, request: Request) -> str:
        """The whole answer at once, as JSON; given up when the client has gone."""
        collecting = asyncio.ensure_future(self._collect(call))
        try:
            while not (await asyncio.wait({collecting}, timeout=_LOOK_S))[0]:
                if await request.is_disconnected():
                    call.abort()
            collecting.result()
        finally:
            call.abort()
            collecting.cancel()
        return await asyncio.to_thread(self._whole, call)

    def _whole(self, call: _Call) -> str:
        """In a thread: a quarter of a million log-probabilities would hold up every page."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(call, choice.logprobs),
                "finish_reason": choice.finish,
            }
            for index, choice in call.choices.items()
        ]
        answer = self._frame(call, choices, "chat.completion") | {"usage": self._usage(call)}
        return json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    async def _collect(self, call: _Call) -> None:
        async for event in _events(call):
            self._apply(call, event, keep=True)

    @staticmethod
    def _apply(call: _Call, event: Event, *, keep: bool) -> None:
        """Note what an event says; `keep` its text and log-probabilities for an answer that is sent whole."""
        match event:
            case Delta() if keep:
                choice = call.choices[event.choice]
                choice.text += event.text
                choice.logprobs += event.logprobs
            case Done():
                choice = call.choices[event.choice]
                choice.text, choice.tokens, choice.receipt = event.text, len(event.tokens), event.receipt
                choice.finish = "length" if event.reason == "length" else "stop"
            case Failed():
                raise event.error

    @staticmethod
    def _usage(call: _Call) -> dict[str, Any]:
        """Counts of the engine. A prompt is computed once for all its choices, and counted once."""
        receipts = [c.receipt for c in call.choices.values() if c.receipt is not None]
        prompt = receipts[0].prompt_tokens if receipts else 0
        written = sum(receipt.output_tokens for receipt in receipts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": min((r.reused_tokens for r in receipts), default=0)},
        }

    def _logprobs(self, call: _Call, items: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not call.body.logprobs:
            return None
        wanted = call.body.top_logprobs or 0
        texts: dict[int, str] = {}

        def token(id: int, logprob: float) -> dict[str, Any]:
            if id not in texts:
                texts[id] = str(self._runtime.engine.tokenizer.decode([id]))
            text = texts[id]
            # JSON has no infinity; this is how OpenAI writes it.
            logprob = max(logprob, -9999.0)
            return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}

        return {
            "content": [
                {
                    **token(item.token, item.logprob),
                    "top_logprobs": [token(id, value) for id, value in item.top[:wanted]],
                }
                for item in items
            ],
            "refusal": None,
        }

    @staticmethod
    def _frame(call: _Call, choices: list[Any], kind: str = "chat.completion.chunk") -> dict[str, Any]:
        return {
            "id": call.id,
            "object": kind,
            "created": call.created,
            "model": call.model,
            "choices": choices,
        }

    def _chunk(
        self,
        call: _Call,
        index: int,
        delta: dict[str, Any],
        *,
        finish: str | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> str:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._event(self._frame(call, [choice]))

    @staticmethod
    def _event(value: dict[str, Any]) -> str:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        for code, escaped in _LINE_ENDS:
            text = text.replace(code, escaped)
        return f"data: {text}\n\n"
