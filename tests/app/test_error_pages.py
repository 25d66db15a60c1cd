"""What a browser is shown where there is nothing to show: a page in both languages. Programs get JSON."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import HTTPException
from fastapi.routing import APIRoute

from app.error_pages import as_page
from app.errors import LoadingFailed, StillWarmingUp
from app.pages.build import build_demo
from app.runtime import Runtime
from app.server import create_app

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
HOSTILE = "/<img src=x onerror=alert(1)>%22%3E%3Cscript%3Ealert(2)%3C/script%3E"


@pytest.fixture
async def browser(runtime: Runtime) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(runtime, build_demo(runtime))

    @app.get("/profile/broken")
    async def broken() -> None:
        raise RuntimeError("a <secret> of the server")

    app.router.routes.insert(0, app.router.routes.pop())  # Gradio's own application stands behind all others
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=("10.0.0.7", 50_000))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7860") as client:
        await client.get("/", headers=HTML)
        yield client


def assert_is_ours(answer: httpx.Response, status: int) -> None:
    assert answer.status_code == status
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["cache-control"] == "no-store"
    assert "object-src 'none'" in answer.headers["content-security-policy"]
    assert "prefers-color-scheme:dark" in answer.text
    assert '<p><a href="/">' in answer.text
    assert "<script" not in answer.text
    assert "detail" not in answer.text


async def test_an_unknown_address_is_a_page(browser: httpx.AsyncClient) -> None:
    for path in ("/nowhere", "/library/nowhere", "/gradio_api/nowhere", "/static/nowhere.js"):
        english = await browser.get(path, headers=HTML)
        assert_is_ours(english, 404)
        assert '<html lang="en">' in english.text
        assert "<h1>Page not found</h1>" in english.text
        assert "nowhere" not in english.text
        chinese = await browser.get(path, headers=HTML | {"accept-language": "zh-TW,zh;q=0.9"})
        assert_is_ours(chinese, 404)
        assert '<html lang="zh-Hant">' in chinese.text
        assert "<h1>找不到頁面</h1>" in chinese.text


async def test_programs_get_json(browser: httpx.AsyncClient) -> None:
    for headers in ({}, {"accept": "application/json"}, {"accept": "*/*"}):
        answer = await browser.get("/nowhere", headers=headers)
        assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})
    for path in ("/v1/nowhere", "/api/nowhere"):  # a browser is shown what programs get there
        assert (await browser.get(path, headers=HTML)).headers["content-type"] == "application/json"


async def test_nothing_of_the_address_stands_on_the_page(browser: httpx.AsyncClient) -> None:
    for path in (
        HOSTILE,
        f"/library{HOSTILE}",
        f"/conversations{HOSTILE}/export.md",
        f"/gradio_api{HOSTILE}",
    ):
        answer = await browser.get(path, headers=HTML)
        assert_is_ours(answer, 404)
        assert "alert" not in answer.text
        assert "onerror" not in answer.text


async def test_the_wrong_method_another_site_and_a_fault_are_pages(browser: httpx.AsyncClient) -> None:
    method = await browser.post("/library", headers=HTML)
    assert_is_ours(method, 405)
    assert "does not take what was sent" in method.text
    other = await browser.post("/sign-out", headers=HTML | {"sec-fetch-site": "cross-site"})
    assert_is_ours(other, 403)
    assert "<h1>Not allowed</h1>" in other.text
    fault = await browser.get("/profile/broken", headers=HTML)
    assert_is_ours(fault, 500)
    assert "secret" not in fault.text
    program = await browser.get("/profile/broken")
    assert (program.status_code, program.json()["error"]["code"]) == (500, "internal_error")


async def test_what_breaks_inside_gradio_is_a_page(runtime: Runtime) -> None:
    app = create_app(runtime, build_demo(runtime))

    async def broken() -> None:
        raise RuntimeError("a <secret> of the server")

    async def refused() -> None:
        raise HTTPException(418, "a <secret> of the server")

    routes = app.routes[-1].app.router.routes  # Gradio's own, mounted behind ours
    for path, answers in (("/library/broken", broken), ("/library/refused", refused)):
        routes.insert(0, APIRoute(path, answers))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7860") as client:
        await client.get("/", headers=HTML)
        fault = await client.get("/library/broken", headers=HTML)
        assert_is_ours(fault, 500)
        assert "secret" not in fault.text
        refusal = await client.get("/library/refused", headers=HTML)
        assert_is_ours(refusal, 418)
        assert "secret" not in refusal.text
        assert (await client.get("/library/broken")).json()["error"]["code"] == "internal_error"
        assert (await client.get("/library/refused")).json() == {"detail": "a <secret> of the server"}


@pytest.mark.parametrize(
    ("error", "title", "retry"),
    [
        (StillWarmingUp("In <a> moment."), "Not just now", "5"),
        (LoadingFailed("In <a> moment."), "That did not work", None),
    ],
)
def test_where_waiting_helps_the_page_tries_again(error: Exception, title: str, retry: str | None) -> None:
    page = as_page(error, {})
    text = bytes(page.body).decode()
    assert page.status_code == 503
    assert page.headers["content-type"].startswith("text/html")
    assert "In &lt;a&gt; moment." in text
    assert f"<h1>{title}</h1>" in text
    assert page.headers.get("retry-after") == retry
    assert ("refresh" in page.headers) == (retry is not None)
