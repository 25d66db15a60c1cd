"""The description of `/v1` and `/api` in OpenAPI's terms: for clients' makers, and for the tests that try it.

Strangers do not get it: what there is to knock at is nobody's business who has no key.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel

from app.runtime import Runtime

#: Doors of ours that are described. The pages' own routes are not: they belong to the pages.
_DESCRIBED = ("/v1/", "/api/", "/metrics", "/healthz", "/readyz")
_ADMIN = "/api/admin/"


class ErrorDetail(BaseModel):
    """What went wrong: a sentence, its kind, and a stable word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """OpenAI's error object."""

    error: ErrorDetail


class Model(BaseModel):
    id: str
    object: str
    created: int
    owned_by: str


class ModelList(BaseModel):
    """What can be asked."""

    object: str
    data: list[Model]


class AnswerMessage(BaseModel):
    role: str
    content: str
    refusal: str | None


class CitedSource(BaseModel):
    """A place in a document; `text` is "" where it is gone meanwhile."""

    number: int
    document: str
    title: str
    section: str | None
    page: int | None
    verdict: str | None
    text: str


class Citations(BaseModel):
    """What an answer leans on, and how many of its sentences bear which mark; of its first 6,000 characters,
    which the choices of a request share."""

    sources: list[CitedSource]
    sentences: dict[str, int]


class AnswerChoice(BaseModel):
    """`citations` is there where the knowledge base was searched: with the model `coread`."""

    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: str
    citations: Citations | None = None


class PromptDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class ChatCompletion(BaseModel):
    """The whole answer; with `stream` it comes as server-sent events instead."""

    id: str
    object: str
    created: int
    model: str
    choices: list[AnswerChoice]
    usage: Usage


_MEANING = MappingProxyType(
    {
        400: "The request is malformed, or asks for what is not there",
        401: "No key, or one that is not known (any more)",
        403: "Not allowed",
        404: "There is no such thing, or not for this caller",
        405: "The path takes other methods",
        409: "Not at this moment, or more of it than is kept",
        413: "Too large",
        422: "A value was not taken",
        429: "A limit is reached; Retry-After says when to come back",
        500: "A fault of the server",
        503: "Warming up, or the engine or the disk is not available; Retry-After says when to come back",
        504: "It took too long",
    }
)


def errors() -> dict[int | str, dict[str, Any]]:
    """For `include_router(…, responses=errors())`."""
    return {status: {"model": ErrorBody, "description": meaning} for status, meaning in _MEANING.items()}


def _answers(schemas: dict[str, Any], model: type[BaseModel], **more: Any) -> dict[str, Any]:
    """A good answer in the form of `model`, whose schema joins `schemas`."""
    made = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(made.pop("$defs", {}))
    schemas[model.__name__] = made
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}, **more}
    return {"description": (model.__doc__ or model.__name__).strip(), "content": content}


def describe(app: FastAPI) -> dict[str, Any]:
    """The document; made once."""
    whole = app.openapi()
    paths: dict[str, Any] = {}
    for path, item in whole["paths"].items():
        if not path.startswith(_DESCRIBED):
            continue
        scheme = "command" if path.startswith(_ADMIN) else "key"
        for operation in item.values():
            operation["security"] = [] if path in ("/healthz", "/readyz") else [{scheme: []}]
        paths[path] = item
    schemas = whole["components"]["schemas"]
    paths["/v1/models"]["get"]["responses"]["200"] = _answers(schemas, ModelList)
    pieces = {"text/event-stream": {"schema": {"type": "string"}}}
    answered = _answers(schemas, ChatCompletion, **pieces)
    paths["/v1/chat/completions"]["post"]["responses"]["200"] = answered
    components = whole["components"] | {
        "securitySchemes": {
            "key": {"type": "http", "scheme": "bearer"},
            "command": {"type": "apiKey", "in": "header", "name": "x-coread-token"},
        }
    }
    return {**whole, "paths": paths, "components": components}


def openapi_router(runtime: Runtime, app: FastAPI) -> APIRouter:
    """`GET /v1/openapi.json` for whoever has a key, `GET /api/openapi.json` for administrators and programs
    of this machine."""
    router = APIRouter(include_in_schema=False)
    made: list[dict[str, Any]] = []

    def document() -> dict[str, Any]:
        if not made:
            made.append(describe(app))
        return made[0]

    @router.get("/v1/openapi.json")
    async def for_clients(request: Request) -> dict[str, Any]:
        runtime.identify("api", request)
        whole = document()
        return {**whole, "paths": {p: i for p, i in whole["paths"].items() if p.startswith("/v1/")}}

    @router.get("/api/openapi.json")
    async def for_administrators(request: Request) -> dict[str, Any]:
        runtime.access.require_watcher(request)
        return document()

    return router
