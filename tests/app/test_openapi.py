"""The description of the doors, and what happens when a program tries everything that it allows and much that
it does not (schemathesis, in its short form; `python -m tests.app.try_api` is the long one)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from app.pages.build import build_demo
from app.runtime import Runtime
from app.server import create_app
from tests.app.try_api import serving, try_everything


async def test_what_is_described(client: httpx.AsyncClient) -> None:
    described = (await client.get("/api/openapi.json")).json()
    assert {"/v1/models", "/v1/chat/completions", "/api/memory", "/api/admin/check", "/metrics"} <= set(
        described["paths"]
    )
    for path, item in described["paths"].items():
        assert path.startswith(("/v1/", "/api/", "/metrics", "/healthz", "/readyz"))
        for operation in item.values():
            assert operation["security"] or path in ("/healthz", "/readyz")
    for_clients = (await client.get("/v1/openapi.json")).json()
    assert set(for_clients["paths"]) == {"/v1/models", "/v1/chat/completions"}


@pytest.fixture
async def stranger(runtime: Runtime) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(runtime, build_demo(runtime)), client=("10.0.0.7", 50_000))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7860") as opened:
        yield opened


async def test_strangers_do_not_get_it(stranger: httpx.AsyncClient, runtime: Runtime) -> None:
    assert (await stranger.get("/v1/openapi.json")).status_code == 401
    assert (await stranger.get("/api/openapi.json")).status_code == 403
    for path in ("/openapi.json", "/docs", "/redoc", "/gradio_api/openapi.json"):
        assert '"paths"' not in (await stranger.get(path)).text  # (the page answers under any name)
    _, secret = await runtime.keys.create("script")
    key = {"authorization": f"Bearer {secret}"}
    assert (await stranger.get("/v1/openapi.json", headers=key)).status_code == 200
    assert (await stranger.get("/api/openapi.json", headers=key)).status_code == 403


@pytest.mark.slow
def test_everything_that_the_description_allows_is_answered_as_it_says() -> None:
    with serving() as server:
        code, said = try_everything(server, examples=4)
    assert code == 0, said[-6_000:]
