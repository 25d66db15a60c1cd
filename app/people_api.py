"""The commands' door to keys and accounts: `coread keys …`, `coread accounts …` beside a running server."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from app.people_commands import PeopleCommands
from app.runtime import Runtime


class NewKeyBody(BaseModel):
    name: str = Field(max_length=1_000)
    account: str | None = Field(None, max_length=200)


class KeyBody(BaseModel):
    id: str = Field(max_length=200)


def people_router(runtime: Runtime) -> APIRouter:
    router = APIRouter(prefix="/api/admin")

    def commands(request: Request) -> PeopleCommands:
        runtime.identify("command", request)
        return PeopleCommands(runtime.keys)

    @router.post("/keys")
    async def create_key(body: NewKeyBody, request: Request) -> dict[str, Any]:
        return await commands(request).add_key(body.name, body.account)

    @router.post("/keys/list")
    async def list_keys(request: Request) -> dict[str, Any]:
        return commands(request).list_keys()

    @router.post("/keys/revoke")
    async def revoke_key(body: KeyBody, request: Request) -> dict[str, Any]:
        return await commands(request).revoke_key(body.id)

    return router
