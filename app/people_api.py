"""The commands' door to keys and accounts: `coread keys …`, `coread accounts …` beside a running server."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request

from app.people_commands import PeopleCommands
from app.runtime import Runtime


def people_router(runtime: Runtime) -> APIRouter:
    router = APIRouter(prefix="/api/admin")

    @router.post("/{what}/{action}")
    async def command(
        what: Literal["keys", "accounts"], action: str, body: dict[str, Any], request: Request
    ) -> dict[str, Any]:
        """See `PeopleCommands.run`."""
        runtime.identify("command", request)
        return await PeopleCommands(runtime.accounts, runtime.keys).run(f"{what}/{action}", body)

    return router
