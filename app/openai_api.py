"""`POST /v1/chat/completions` and `GET /v1/models`, served by the same engine as the page.

Stateless: the client's messages are the conversation, and their text has the scope of the client's own
account. The model `coread` also searches the collections that the account may read; the language model's
own name does not. Choices of `coread` carry what the page shows under an answer as `citations`, a key beside
OpenAI's: `sources` (as `coread ask --json` has them) and `sentences`, how many bear which mark.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Send
from starlette.types import Scope as ASGIScope

from app.commands import source_json
from app.errors import AppError, NoIdentity, NotFoundHere, QuestionRefused
from app.http_errors import as_refusal, as_response, maximum_context
from app.knowledge import shown_of
from app.openai_call import Call, Choice, Prompt, event_of
from app.openai_schema import ApiRefusal, ChatRequest
from app.pages.words import phrase
from app.principal import Principal
from app.prompting import Built
from app.refusal import CLOSEST, refusal_text
from app.runtime import Runtime
from app.store import Reference
from app.text import broken, may_be_broken
from engine.types import Delta, Done, GenerationRequest, Scope, Segment
from rag.prompt import Turn

SEARCHING_MODEL = "coread"
#: Length of an answer of the language model alone whose client names none; `coread`'s is the page's.
_DEFAULT_TOKENS = 1_024
#: Log-probabilities of an answer that is kept until it is whole: some 100 bytes each, in memory and as text.
_MAX_LOGPROBS = 250_000
#: Methods that are answered with the error object where there is no route for them.
_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
#: Characters of a request's answers that are compared with their sources. A program may ask for answers as
#: long as the context, and each sentence costs a look at every place in the prompt.
MOST_COMPARED = 6_000
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

        def some_key_ended() -> None:
            """What runs ends with its key, and with the account of it."""
            try:
                runtime.identify("api", request)
            except AppError:
                call.refuse(NoIdentity("The API key was revoked meanwhile, or its account locked."))

        call.unwatch = runtime.keys.watch(some_key_ended)
        some_key_ended()  # one did, perhaps, while the request was laid out
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


class _Stream(StreamingResponse):
    """A stream whose request ends with it. A client that is gone before the first chunk is sent leaves a
    generator that was never begun, and such a one has no end of its own."""

    def __init__(self, call: Call, chunks: AsyncIterator[str]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"} | call.headers
        super().__init__(chunks, media_type="text/event-stream", headers=headers)
        self._call = call

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.end()


def _closest(built: Built) -> list[Reference]:
    """What came closest to a question that the documents do not seem to answer."""
    return [p.span.reference(n, p.zone, CLOSEST, p.found) for n, p in enumerate(built.placed, 1)]


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

    async def begin(self, principal: Principal, body: ChatRequest) -> Call:
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

    async def _submit(self, principal: Principal, body: ChatRequest, asked: int | None, context: int) -> Call:
        """Lay out and hand to the engine, within a context of `context` tokens."""
        settings = self._runtime.settings
        default = settings.answer_tokens if body.model == SEARCHING_MODEL else _DEFAULT_TOKENS
        prompt = await self._prompt(principal, body, asked or default)
        length = sum(len(segment.tokens) for segment in prompt.segments)
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
        choices = {index: Choice() for index in range(body.n)}
        if prompt.said:
            return Call(id, body.model, int(time.time()), body, prompt, None, {}, choices, principal)
        generation = await self._runtime.limits.submit(
            self._runtime.engine,
            GenerationRequest(
                segments=prompt.segments,
                sampling=sampling,
                principal=principal.id,
                conversation=id,
                output_scope=Scope.account(principal.id),
                n=body.n,
            ),
        )
        try:
            if await self._runtime.knowledge.forget_stale(prompt.read):
                raise NotFoundHere(phrase("refused.document_changed"))
        except BaseException:
            generation.abort()
            raise
        headers = self._runtime.limits.token_headers(principal.id)
        # The engine has the tokens now; nobody needs them twice.
        prompt = replace(prompt, segments=(), built=prompt.built and replace(prompt.built, segments=()))
        return Call(
            id, body.model, int(time.time()), body, prompt, generation, headers, choices, principal,
            self._runtime.engine.tokenizer,
        )  # fmt: skip

    async def _prompt(self, principal: Principal, body: ChatRequest, answer_tokens: int) -> Prompt:
        if body.model == SEARCHING_MODEL:
            return await self._searched(principal, body, answer_tokens)
        ids = await asyncio.to_thread(self._runtime.message_encoder.encode, body.messages, principal.id)
        return Prompt([Segment(ids, Scope.account(principal.id), "messages")])

    async def _searched(self, principal: Principal, body: ChatRequest, answer_tokens: int) -> Prompt:
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
            return Prompt(built.segments, "", built.read, built, readable)
        closest = await self._runtime.knowledge.sources_in(readable, _closest(built))
        return Prompt((), refusal_text(closest), built.read, built, readable)

    # -- the answer --------------------------------------------------------------------------------------

    async def stream(self, call: Call) -> AsyncIterator[str]:
        """Server-sent events. A client that leaves closes this generator, and the request is aborted."""
        usage = bool(call.body.stream_options and call.body.stream_options.include_usage)
        try:
            for index in call.choices:
                yield call.chunk(index, {"role": "assistant", "content": ""})
            async for event in call.events():
                call.check()
                call.note(event, keep=False)
                match event:
                    case Delta():
                        logprobs = call.logprobs(event.logprobs)
                        yield call.chunk(event.choice, {"content": event.text}, logprobs=logprobs)
                    case Done():
                        choice = call.choices[event.choice]
                        await self._cite(call, choice)
                        call.check()
                        yield call.chunk(event.choice, {}, finish=choice.finish, citations=choice.citations)
            if usage:
                yield event_of(call.frame([]) | {"usage": call.usage()})
            yield "data: [DONE]\n\n"
        except Exception as error:  # a stream that has begun can tell only so
            yield event_of(as_refusal(error).body())
        finally:
            call.end()

    async def complete(self, call: Call, request: Request) -> str:
        """The whole answer at once, as JSON; given up when the client has gone."""
        collecting = asyncio.ensure_future(self._collect(call))
        gone = False
        try:
            while not (await asyncio.wait({collecting}, timeout=_LOOK_S))[0]:
                if await request.is_disconnected():
                    gone = True
                    call.abort()
            collecting.result()
            call.check()
            for choice in () if gone else call.choices.values():
                await self._cite(call, choice)
            call.check()
        finally:
            call.end()
            collecting.cancel()
        return await asyncio.to_thread(call.whole)

    async def _cite(self, call: Call, choice: Choice) -> None:
        """Find what a finished answer of `coread` leans on, in what its principal may still read. All choices
        of a request cost no more than one; those that say the same are compared once."""
        prompt = call.prompt
        if prompt.built is None:
            return
        for other in call.choices.values():
            if other.citations is not None and other.text == choice.text:
                choice.citations = other.citations
                return
        if prompt.said:
            references, sentences = _closest(prompt.built), {}
        else:
            most = MOST_COMPARED // call.body.n
            cited = await self._runtime.prompter.attribute(choice.text, prompt.built, most)
            references, sentences = shown_of(cited.references), cited.sentences
        readable = prompt.readable & await self._runtime.store.readable(call.principal)
        sources = await self._runtime.knowledge.sources_in(readable, references)
        choice.citations = {"sources": [source_json(source) for source in sources], "sentences": sentences}

    async def _collect(self, call: Call) -> None:
        async for event in call.events():
            call.note(event, keep=True)
