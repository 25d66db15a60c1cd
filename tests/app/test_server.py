"""The doors beside the page: health, memory, limits, the commands' own door, start-up refusals."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.errors import LoadingFailed, PortUnavailable
from app.principal import Principal
from app.runtime import Runtime
from app.server import bind
from app.settings import load_settings
from engine.errors import ModelNotFound
from rag.errors import DataDirLocked
from tests.app.conftest import FakeParts
from tests.app.fakes import FakeEngine


async def test_health_and_readiness(client: httpx.AsyncClient) -> None:
    assert (await client.get("/healthz")).json() == {"status": "ok"}
    ready = await client.get("/readyz")
    assert ready.status_code == 200
    assert ready.json()["model"] == "fake-model"


async def test_until_it_is_ready_it_says_so(tmp_path: Path) -> None:
    import gradio as gr

    from app.server import create_app

    runtime = Runtime(load_settings(data_dir=tmp_path / "d"), FakeParts())
    runtime.open()
    transport = httpx.ASGITransport(create_app(runtime, gr.Blocks()), client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        assert (await client.get("/readyz")).status_code == 503
        refused = await client.post(
            "/v1/chat/completions", json={"model": "coread", "messages": [{"role": "user", "content": "Hi"}]}
        )
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert (await client.get("/api/memory")).json()["engine"]["state"] == "new"
    await runtime.stop()


async def test_a_missing_model_is_a_sentence_and_the_page_stays(tmp_path: Path) -> None:
    engine = FakeEngine(ready_error=ModelNotFound("The packaged model is not installed: run pip install x."))
    runtime = Runtime(load_settings(data_dir=tmp_path / "d"), FakeParts(engine))
    runtime.open()
    runtime.start()
    with pytest.raises(LoadingFailed, match="not installed"):
        await runtime.wait_ready()
    assert runtime.status()["state"] == "failed"
    assert "pip install" in runtime.status()["detail"]
    await runtime.stop()


async def test_the_embedder_is_not_loaded_while_the_language_model_is(tmp_path: Path) -> None:
    """transformers replaces a method of a class for the whole process while it loads a model."""
    loading, loaded = asyncio.Event(), asyncio.Event()

    class Slow(FakeEngine):
        async def wait_ready(self) -> None:
            loading.set()
            await loaded.wait()

    made: list[bool] = []

    class Parts(FakeParts):
        def library(self, *given: Any) -> Any:
            made.append(loaded.is_set())
            return super().library(*given)

    runtime = Runtime(load_settings(data_dir=tmp_path / "d"), Parts(Slow()))
    runtime.open()
    runtime.start()
    await loading.wait()
    loaded.set()
    await runtime.wait_ready()
    assert made == [True]
    await runtime.stop()


async def test_what_needs_no_model_is_there_without_one_and_waiting_is_not_advised(tmp_path: Path) -> None:
    import gradio as gr

    from app.server import create_app

    engine = FakeEngine(ready_error=ModelNotFound("The packaged model is not installed: run pip install x."))
    runtime = Runtime(load_settings(data_dir=tmp_path / "d"), FakeParts(engine))
    runtime.open()
    transport = httpx.ASGITransport(create_app(runtime, gr.Blocks()), client=("127.0.0.1", 1))
    ask = {"model": "coread", "messages": [{"role": "user", "content": "Hi"}]}
    html = {"accept": "text/html"}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        _, cookie = runtime.signer.issue()
        client.cookies.set(runtime.signer.name, cookie)
        early = await client.post("/v1/chat/completions", json=ask)
        assert early.json()["error"]["code"] == "warming_up"
        runtime.start()
        with pytest.raises(LoadingFailed):
            await runtime.wait_ready()
        profile = await client.get("/profile", headers=html)
        assert profile.status_code == 200
        assert "This is shown once the models are loaded." in profile.text
        late = await client.post("/v1/chat/completions", json=ask)
        assert late.status_code == 503
        assert late.json()["error"]["code"] == "loading_failed"
        assert "not installed" in late.json()["error"]["message"]
        assert "retry-after" not in late.headers
    await runtime.stop()


async def test_the_memory_feed_adds_up_and_names_nobody(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    feed = (await client.get("/api/memory")).json()
    pool = feed["pool"]
    assert pool["free"] + pool["held"] + pool["retained"] == pool["total_blocks"]
    everybody = feed["open"]["everybody"]
    assert everybody["saved_bytes"] == everybody["unshared_bytes"] - everybody["physical_bytes"]
    assert feed["open"]["mine"] is None
    assert feed["mine_blocks"] == []


async def test_only_the_owner_sees_a_conversations_row(
    runtime: Runtime, client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    ann, cookie = runtime.signer.issue()
    _, other = runtime.signer.issue()
    talk = await runtime.store.create(ann)
    async for _ in runtime.chat.ask(ann, talk.id, "When does the bakery open?"):
        pass
    url = f"/api/memory?conversation={talk.id}"
    name = runtime.signer.name
    mine = await client.get(url, headers={"cookie": f"{name}={cookie}"})
    assert mine.json()["open"]["mine"]["blocks"] == 2
    assert (await client.get(url, headers={"cookie": f"{name}={other}"})).status_code == 404
    assert (await client.get(url)).status_code == 401


async def test_where_people_sign_in_being_on_this_machine_shows_no_memory(tmp_path: Path) -> None:
    """Behind a proxy on this machine every stranger comes from it."""
    import gradio as gr

    from app.server import create_app

    runtime = Runtime(load_settings(data_dir=tmp_path / "d", access="accounts"), FakeParts())
    runtime.open()
    runtime.start()
    await runtime.wait_ready()
    reader = await runtime.accounts.create("Ann", "correct horse", "reader")
    signed_in = await runtime.accounts.sign_in("Ann", "correct horse", "a", "x")
    transport = httpx.ASGITransport(create_app(runtime, gr.Blocks()), client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7860") as client:
        for headers, status in (
            ({}, 401),
            ({"x-coread-token": "no" + runtime.token}, 401),
            ({"x-coread-token": runtime.token}, 200),
            ({"cookie": f"{runtime.signer.name}_s={signed_in}"}, 200),
        ):
            assert (await client.get("/api/memory", headers=headers)).status_code == status
        await runtime.accounts.set_disabled(reader.id, True)
        assert (await client.get("/api/memory", headers=headers)).status_code == 401
    await runtime.stop()


async def test_every_answer_carries_the_policy(client: httpx.AsyncClient) -> None:
    headers = (await client.get("/healthz")).headers
    assert "img-src 'self' data: blob:" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


async def test_bodies_are_limited(runtime: Runtime, client: httpx.AsyncClient) -> None:
    limit = runtime.settings.max_body_bytes
    announced = await client.post(
        "/v1/chat/completions", content=b"x", headers={"content-length": str(limit + 1)}
    )
    assert announced.status_code == 413

    async def endless() -> object:  # a chunked body announces nothing
        for _ in range(limit // 2**20 + 2):
            yield b"x" * 2**20

    response = await client.post("/v1/chat/completions", content=endless())  # type: ignore[arg-type]
    assert response.status_code == 413


@pytest.mark.parametrize("headers", [{}, {"x-coread-token": "0" * 64}, {"x-coread-token": ""}])
async def test_the_commands_door_needs_the_token(client: httpx.AsyncClient, headers: dict[str, str]) -> None:
    response = await client.post("/api/admin/search", json={"query": "x"}, headers=headers)
    assert response.status_code == 403


async def test_the_commands_door_refuses_web_pages(runtime: Runtime, client: httpx.AsyncClient) -> None:
    headers = {"x-coread-token": runtime.token, "origin": "http://127.0.0.1:7860"}
    assert (await client.get("/api/admin/status", headers=headers)).status_code == 403


async def test_a_command_asks_searches_and_ingests_through_the_door(
    runtime: Runtime, client: httpx.AsyncClient
) -> None:
    headers = {"x-coread-token": runtime.token}
    found = (await client.post("/api/admin/search", json={"query": "rye loaf"}, headers=headers)).json()
    assert found["hits"][0]["document"] == "sample-bakery"
    answer = (
        await client.post("/api/admin/ask", json={"question": "When was it built?"}, headers=headers)
    ).json()
    assert set(answer) == {"answer", "status", "sources", "receipt", "notes"}
    assert answer["answer"] == "Hello."
    body = {"collection": "Mills", "name": "mill.md", "data": "IyBNaWxsCgpBIG1pbGwu"}
    added = (await client.post("/api/admin/ingest", json=body, headers=headers)).json()
    assert added["status"] == "ready"
    again = (await client.post("/api/admin/ingest", json=body, headers=headers)).json()
    assert (again["status"], again["document"]) == ("unchanged", added["document"])
    stranger = Principal("anonymous", "b-x")
    assert added["document"] in {d.id for d in await runtime.knowledge.documents(stranger)}


def test_a_busy_port_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortUnavailable, match=f"127.0.0.1:{port} is in use.*--port"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_an_impossible_address_is_one_sentence(host: str) -> None:
    with pytest.raises(PortUnavailable, match=host.replace(".", r"\.")):
        bind(host, 0)


async def test_one_data_directory_has_one_server(runtime: Runtime) -> None:
    runtime.announce("http://127.0.0.1:7860")
    second = Runtime(runtime.settings, FakeParts())
    with pytest.raises(DataDirLocked) as locked:
        second.open()
    assert locked.value.holder["url"] == "http://127.0.0.1:7860"
    await second.stop()


async def test_stopping_gives_everything_back(tmp_path: Path) -> None:
    engine = FakeEngine()
    settings = load_settings(data_dir=tmp_path / "d")
    for _ in range(2):  # the second start finds lock, cookies and documents as the first one left them
        runtime = Runtime(settings, FakeParts(engine))
        runtime.open()
        runtime.start()
        await runtime.wait_seeded()
        name = runtime.signer.name
        await runtime.stop()
        await runtime.stop()
    assert engine.stopped
    again = Runtime(settings, FakeParts(engine))
    again.open()
    assert again.signer.name == name
    await again.stop()
    await asyncio.sleep(0)
