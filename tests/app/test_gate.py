"""The gate: Gradio's own routes one by one, session hashes, other sites, hosts; headers and half-open
connections."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import time
from collections import namedtuple
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from app import lifecycle
from app.errors import NotAllowed
from app.gate import OPEN_ROUTES, SessionHashes, form_fields, gradio_route, is_open
from app.pages.build import build_demo
from app.request_log import JsonFormatter, TextFormatter, request_id
from app.runtime import Runtime
from app.server import bind, create_app

HTML = {"accept": "text/html"}
BASE = "http://127.0.0.1:7860"


@pytest.fixture
async def page(runtime: Runtime) -> AsyncIterator[httpx.AsyncClient]:
    """A browser that has loaded the real page, elsewhere than on this machine."""
    app = create_app(runtime, build_demo(runtime))
    transport = httpx.ASGITransport(app, client=("10.0.0.7", 50_000))
    async with httpx.AsyncClient(transport=transport, base_url=BASE) as client:
        yield client


async def enter(client: httpx.AsyncClient) -> str:
    """Load the page; the cookie's principal."""
    response = await client.get("/", headers=HTML)
    assert response.status_code == 200
    return response.headers["set-cookie"].split("=", 1)[1].split(".")[0]


def routes_of(app: Any, prefix: str = "") -> set[tuple[str, str]]:
    found = set()
    for route in app.routes:
        path = prefix + getattr(route, "path", "")
        nested = getattr(route, "original_router", route)  # FastAPI's included routers know their prefix
        if hasattr(nested, "routes"):
            found |= routes_of(nested, path)
        else:
            found |= {(method, path) for method in getattr(route, "methods", None) or ()}
    return found


def filled(path: str) -> str:
    while "{" in path:
        path = path[: path.index("{")] + "abc" + path[path.index("}") + 1 :]
    return path


async def test_gradios_routes_one_by_one(page: httpx.AsyncClient, runtime: Runtime) -> None:
    """A stranger reaches none; a visitor only those that the page needs. A new route is closed."""
    app: Any = page._transport.app  # type: ignore[attr-defined]
    routes = {(m, p) for m, p in routes_of(app) if p.startswith("/gradio_api") and m != "OPTIONS"}
    assert len(routes) > 40, "the routes were not found"
    closed = {(m, p) for m, p in routes if gradio_route(filled(p).rstrip("/")) not in OPEN_ROUTES}
    shut = {path for _, path in closed}
    assert {"/gradio_api/file={path_or_url:path}", "/gradio_api/proxy={url_path:path}"} <= shut
    for method, path in sorted(routes):
        response = await page.request(method, filled(path))
        assert response.status_code == (404 if (method, path) in closed else 401), (method, path)
    await enter(page)
    for method, path in sorted(closed):
        assert (await page.request(method, filled(path))).status_code == 404, (method, path)
    for path in ("/monitoring", "/monitoring/summary", "/login", "/logout"):
        assert (await page.get(path)).status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/file=/etc/passwd", "/gradio_api/file%3D/etc/passwd", "/gradio_api/./file=/etc/passwd",
        "/gradio_api/file=https://example.org/", "/gradio_api/queue/../file=/x", "//gradio_api/file=/x",
        "/gradio_api/heartbeat/x/../../file=/etc/passwd", "/gradio_api/upload/../file=/etc/passwd",
        "/gradio_api/queue/join/x", "/gradio_api/stream/abc", "/gradio_api/deep_link",
    ],
)  # fmt: skip
async def test_no_spelling_reaches_a_closed_route(page: httpx.AsyncClient, path: str) -> None:
    await enter(page)
    response = await page.get(path)
    assert response.status_code in (401, 403, 404)
    assert "root:" not in response.text


async def test_an_upload_is_not_served_to_anybody(page: httpx.AsyncClient) -> None:
    await enter(page)
    sent = await page.post("/gradio_api/upload", files={"files": ("secret.txt", b"zebra", "text/plain")})
    assert sent.status_code == 200
    (path,) = sent.json()
    for spelling in (f"/gradio_api/file={path}", f"/file={path}", f"/gradio_api/file/{path}", path):
        assert "zebra" not in (await page.get(spelling)).text
    Path(path).unlink(missing_ok=True)  # noqa: ASYNC240


async def test_a_session_hash_belongs_to_whoever_used_it_first(page: httpx.AsyncClient) -> None:
    ann = await enter(page)
    ann_cookie = dict(page.cookies)
    url = "/gradio_api/component_server"
    block = (await page.get("/config")).json()["components"][0]["id"]
    body = {"session_hash": "annshash", "component_id": block, "fn_name": "x", "data": None}
    assert (await page.post(url, json=body)).status_code not in (401, 403)
    page.cookies.clear()
    assert await enter(page) != ann
    refused = await page.post(url, json=body)
    assert refused.status_code == 403
    assert "somebody else" in refused.text
    for method, path, content in (
        ("GET", "/gradio_api/queue/data?session_hash=annshash", None),
        ("GET", "/gradio_api/heartbeat/annshash", None),
        ("POST", "/gradio_api/cancel", {"session_hash": "annshash", "fn_index": 0, "event_id": "x"}),
        ("POST", "/gradio_api/queue/join", {"session_hash": "annshash", "fn_index": 0, "data": []}),
    ):
        assert (await page.request(method, path, json=content)).status_code == 403, path
    page.cookies.clear()
    page.cookies.update(ann_cookie)
    assert (await page.post(url, json=body)).status_code not in (401, 403)


@pytest.mark.parametrize(
    ("content", "kind"),
    [(b"", "application/json"), (b"[1]", "application/json"), (b"[" * 50_000, "application/json"),
     (b'{"session_hash": 5}', "application/json"), (b'{"session_hash": "a/../b"}', "application/json"),
     (b"x", "multipart/form-data; boundary=x")],
)  # fmt: skip
async def test_malformed_bodies_are_refused(page: httpx.AsyncClient, content: bytes, kind: str) -> None:
    await enter(page)
    for path in ("/gradio_api/queue/join", "/gradio_api/component_server", "/gradio_api/cancel"):
        response = await page.post(path, content=content, headers={"content-type": kind})
        assert response.status_code == 403


async def test_an_event_that_is_too_large_is_told_so(page: httpx.AsyncClient) -> None:
    await enter(page)
    for path in ("/gradio_api/queue/join", "/gradio_api/component_server", "/gradio_api/cancel"):
        headers = {"content-type": "application/json"}
        response = await page.post(path, content=b" " * (2**20 + 1), headers=headers)
        assert response.status_code == 413
        error = response.json()["error"]
        assert (error["code"], error["type"]) == ("body_too_large", "invalid_request_error")
        assert "1,048,576 bytes" in error["message"]


def test_session_hashes_are_bounded_for_each_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.gate._MAX_HASHES_EACH", 3)
    monkeypatch.setattr("app.gate._MAX_HASHES", 5)
    hashes = SessionHashes()
    hashes.check("ann", "ann")
    for n in range(50):
        hashes.check(f"eve{n}", "eve")
    with pytest.raises(NotAllowed):
        hashes.check("ann", "eve")  # the flood pushed out its own only
    assert len(hashes._owner) == 4
    for n in range(50):
        hashes.check(f"x{n}", f"p{n}")
    assert len(hashes._owner) == 5
    assert sum(hashes._held.values()) == 5


@pytest.mark.parametrize(
    "headers",
    [{"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}, {"origin": "https://e.example"}],
)
async def test_other_sites_pages_send_nothing(page: httpx.AsyncClient, headers: dict[str, str]) -> None:
    await enter(page)
    body = {"session_hash": "abc", "fn_index": 0, "data": []}
    for path in ("/gradio_api/queue/join", "/gradio_api/cancel", "/gradio_api/component_server"):
        assert (await page.post(path, json=body, headers=headers)).status_code == 403
    upload = await page.post("/gradio_api/upload", files={"files": ("a", b"a")}, headers=headers)
    assert upload.status_code == 403


async def test_a_loopback_server_answers_only_to_its_own_names(page: httpx.AsyncClient) -> None:
    rebound = await page.get("/", headers={"host": "evil.example:7860", **HTML})
    assert rebound.status_code == 403
    assert "COREAD_ALLOWED_HOSTS" in rebound.text
    assert (await page.get("/healthz", headers={"host": "evil.example"})).status_code == 200


async def test_a_program_may_look_at_the_page_in_open_mode(page: httpx.AsyncClient) -> None:
    """Hosts ask for `/` with no cookie and no wish for HTML to see whether a server lives."""
    assert (await page.get("/")).status_code == 200
    assert (await page.head("/")).status_code == 200
    assert (await page.get("/config")).status_code == 200


async def test_who_asks_without_a_cookie_is_counted_by_address(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page costs tens of milliseconds, and whoever takes no cookie has no count of its own."""
    monkeypatch.setattr("app.gate.NEWCOMERS_A_MINUTE", 6)
    app = create_app(runtime, build_demo(runtime))

    def asks(address: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app, client=(address, 50_000))
        return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7860")

    async with asks("10.0.0.9") as stranger, asks("10.0.0.8") as other, asks("127.0.0.1") as local:

        async def anew(headers: dict[str, str] | None = None) -> httpx.Response:
            stranger.cookies.clear()
            return await stranger.get("/", headers=headers)

        for _ in range(6):
            assert (await anew()).status_code == 200
            assert (
                await stranger.get("/robots.txt")
            ).status_code != 429  # files of the page count for nobody
        refused = await anew()
        for _ in range(2):  # a moment gives a part of one back
            refused = refused if refused.status_code == 429 else await anew()
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert (await anew(HTML)).status_code == 429
        assert (await stranger.get("/healthz")).status_code == 200
        _, secret = await runtime.keys.create("reader's")
        key = {"authorization": f"Bearer {secret}"}
        assert (await stranger.get("/v1/models", headers=key)).status_code == 200
        for _ in range(8):
            local.cookies.clear()
            assert (await local.get("/")).status_code == 200
        assert (await other.get("/")).status_code == 200
        _, cookie = runtime.signer.issue()
        stranger.cookies.set(runtime.signer.name, cookie)
        assert (await stranger.get("/", headers=HTML)).status_code == 200, "who is known is counted alone"


async def test_memory_and_metrics_are_not_for_strangers(page: httpx.AsyncClient, runtime: Runtime) -> None:
    assert (await page.get("/api/memory")).status_code == 401
    assert (await page.get("/metrics")).status_code == 403
    _, secret = await runtime.keys.create("reader's")
    assert (await page.get("/metrics", headers={"authorization": f"Bearer {secret}"})).status_code == 403
    assert (await page.get("/metrics", headers={"x-coread-token": runtime.token})).status_code == 200
    await enter(page)
    assert (await page.get("/api/memory")).status_code == 200
    assert (await page.get("/metrics")).status_code == 403


async def test_a_flood_of_visitors_and_of_bytes_is_told_when_to_come_back(
    page: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await enter(page)
    content = b"x" * 2**20
    codes = set()
    for _ in range(300):
        headers = {"content-length": str(2**20), "content-type": "application/octet-stream"}
        response = await page.post("/gradio_api/upload", content=content, headers=headers)
        codes.add(response.status_code)
        if response.status_code == 429:
            assert int(response.headers["retry-after"]) >= 1
            break
    assert 429 in codes


async def test_every_answer_carries_the_headers(page: httpx.AsyncClient) -> None:
    for path in ("/", "/healthz", "/no-such-page", "/gradio_api/file=/x", "/v1/models"):
        headers = (await page.get(path)).headers
        policy = headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "img-src 'self' data: blob:" in policy
        assert "object-src 'none'" in policy
        assert "https:" not in policy.replace("https://huggingface.co", "")
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
        assert headers["x-request-id"]
        assert "access-control-allow-origin" not in headers


async def test_cors_gives_no_other_site_anything(page: httpx.AsyncClient) -> None:
    asked = {"origin": "https://e.example", "access-control-request-method": "POST"}
    for path in ("/v1/chat/completions", "/gradio_api/queue/join", "/profile"):
        response = await page.options(path, headers=asked)
        assert response.headers.get("access-control-allow-origin") in (None, "")


async def test_a_stranger_is_refused_before_the_body_is_read(page: httpx.AsyncClient) -> None:
    read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal read
        while True:
            read += 1
            yield b"x" * 65_536

    await page.get("/healthz")
    for path in ("/v1/chat/completions", "/api/admin/ask"):
        response = await page.post(path, content=endless(), headers={"authorization": "Bearer coread_x"})
        assert response.status_code in (401, 403)
        assert read == 0


async def test_a_keys_use_is_noted(page: httpx.AsyncClient, runtime: Runtime) -> None:
    key, secret = await runtime.keys.create("script")
    assert (await page.get("/v1/models", headers={"authorization": f"Bearer {secret}"})).status_code == 200
    assert next(k for k in runtime.keys.live() if k.id == key.id).used is not None


async def test_a_nearly_full_disk_takes_no_uploads(
    page: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await enter(page)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("app.gate.shutil.disk_usage", lambda _: usage(10**12, 10**12, 10**6))
    sent = await page.post("/gradio_api/upload", files={"files": ("a.txt", b"a")})
    assert sent.status_code == 413
    assert "disk is nearly full" in sent.text


# Small pieces


@pytest.mark.parametrize(
    ("path", "open_"),
    [
        ("/", True), ("/gradio_api/queue/join/", True), ("/gradio_api/heartbeat/abc", True),
        ("/gradio_api/heartbeat/a/b", False), ("/gradio_api/file=x", False), ("/gradio_api", False),
        ("/gradio_api/uploads", False), ("/gradio_apix", True), ("/monitoring", False), ("/login", False),
    ],
)  # fmt: skip
def test_open_and_closed_paths(path: str, open_: bool) -> None:
    assert is_open(path) is open_


def test_forms() -> None:
    assert form_fields(b"a=1&b=&a=2&c=%C3%A9") == {"a": "2", "b": "", "c": "é"}
    with pytest.raises(NotAllowed, match="too many fields"):
        form_fields(b"a&" * 60)


async def test_log_lines_hold_no_text_of_anybodys(
    page: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "coread.http"):
        sent = await page.get("/v1/models?question=zebra", headers={"x-request-id": "request-12345"})
        await page.get("/v1/models", headers={"x-request-id": "bad id\nforged"})
    assert sent.headers["x-request-id"] == "request-12345"
    lines = [r for r in caplog.records if r.name == "coread.http"]
    assert lines
    assert not any("zebra" in r.getMessage() or "forged" in r.getMessage() for r in lines)


def test_formatters_write_one_line_and_name_the_request() -> None:
    record = logging.LogRecord("coread", logging.INFO, "f", 1, "a\n2026 ERROR forged", None, None)
    token = request_id.set("abc")
    try:
        text = TextFormatter().format(record)
        value = json.loads(JsonFormatter().format(record))
    finally:
        request_id.reset(token)
    assert text.count("\n") == 0
    assert text.endswith("[abc]")
    assert (value["request"], value["level"]) == ("abc", "info")


def test_forgotten_uploads_are_swept_and_fresh_ones_stay(tmp_path: Path) -> None:
    old, fresh = tmp_path / "a" / "old.txt", tmp_path / "b" / "fresh.txt"
    for file in (old, fresh):
        file.parent.mkdir()
        file.write_text("x")
    past = time.time() - 2 * lifecycle.FORGOTTEN_S
    os.utime(old, (past, past))
    assert lifecycle.sweep(tmp_path) == 1
    assert not old.parent.exists()
    assert fresh.exists()


async def test_half_open_connections_end_and_whole_requests_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "HEADER_S", 0.4)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await asyncio.sleep(1.0)  # longer than headers may take: only they are timed
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

    listener = bind("127.0.0.1", 0)
    server = uvicorn.Server(
        uvicorn.Config(app, http=lifecycle.PatientProtocol, lifespan="off", log_level="error")
    )
    running = asyncio.create_task(server.serve(sockets=[listener]))
    port = listener.getsockname()[1]
    try:
        whole = asyncio.create_task(_request(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"))
        halves = [asyncio.create_task(_request(port, b"GET / HTTP/1.1\r\nHo")) for _ in range(50)]
        silent = [asyncio.create_task(_request(port, b"")) for _ in range(50)]
        async with asyncio.timeout(20):
            assert await asyncio.gather(*halves, *silent) == [b""] * 100
            assert b"200 OK" in await whole
    finally:
        server.should_exit = True
        await running
        listener.close()


async def _request(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await writer.drain()
    received = io.BytesIO()
    while chunk := await reader.read(4096):
        received.write(chunk)
        if received.getvalue().endswith(b"ok"):
            break
    writer.close()
    return received.getvalue()


def test_the_file_limit_is_raised_as_far_as_allowed() -> None:
    assert lifecycle.raise_file_limit() >= 256
