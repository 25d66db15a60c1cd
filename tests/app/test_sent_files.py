"""An event of the page names no file but an uploaded one: Gradio would copy any file of the server for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import gradio as gr
import httpx
import pytest

from app.errors import NotAllowed
from app.pages.build import build_demo
from app.runtime import Runtime
from app.sent_files import MAX_DEPTH, check_files
from app.server import create_app

BASE = "http://127.0.0.1:7860"


def file_data(path: object) -> dict[str, Any]:
    return {"path": path, "orig_name": "x.txt", "meta": {"_type": "gradio.FileData"}}


@pytest.fixture
def uploads(tmp_path: Path) -> Path:
    folder = tmp_path / "uploads"
    (folder / "0a").mkdir(parents=True)
    (folder / "0a" / "note.txt").write_text("Mine.")
    (tmp_path / "secret.txt").write_text("Not yours.")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "ring").symlink_to(folder / "ring")
    return folder


def test_an_uploaded_file_passes(uploads: Path) -> None:
    check_files({"data": [[file_data(str(uploads / "0a" / "note.txt"))], "text", None, 3]}, uploads)


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd", "{}/../secret.txt", "{}/link.txt", "{}/ring", "{}/0a", "{}/none.txt", "{}", "",
        "0a/note.txt", "http://127.0.0.1/x", "https://elsewhere.example/x", "file:///etc/passwd", "/dev/zero",
        "{}/0a\0", None, 7, ["{}/0a/note.txt"],
    ],
)  # fmt: skip
def test_any_other_is_refused(path: object, uploads: Path) -> None:
    named = path.format(uploads) if isinstance(path, str) else path
    for sent in (file_data(named), {"path": named}, {"url": "x", "path": named}, {"meta": {"_type": "x"}}):
        with pytest.raises(NotAllowed, match="only files that were uploaded"):
            check_files({"data": [{"a": [[sent]]}]}, uploads)


def test_how_deep_an_event_may_be_nested_has_an_end(uploads: Path) -> None:
    sent: Any = file_data("/etc/passwd")
    for _ in range(MAX_DEPTH):
        sent = [sent]
    with pytest.raises(NotAllowed, match="nested deeper"):
        check_files(sent, uploads)


@pytest.fixture
def demo(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> gr.Blocks:
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(runtime.upload_dir))  # as `serve` does
    return build_demo(runtime)


@pytest.fixture
async def page(runtime: Runtime, demo: gr.Blocks) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(runtime, demo), client=("10.0.0.7", 50_000))
    async with httpx.AsyncClient(transport=transport, base_url=BASE) as client:
        assert (await client.get("/", headers={"accept": "text/html"})).status_code == 200
        yield client


async def test_no_event_of_the_page_takes_a_file_of_the_server(
    page: httpx.AsyncClient, demo: gr.Blocks, runtime: Runtime, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("The vault code is 991177.")
    runtime.upload_dir.mkdir(parents=True, exist_ok=True)
    numbers = [number for number, event in demo.fns.items() if event.fn is not None]
    assert len(numbers) > 10
    for number in numbers:
        sent = {"session_hash": "annshash", "fn_index": number, "data": [[file_data(str(secret))]]}
        refused = await page.post("/gradio_api/queue/join", json=sent)
        assert refused.status_code == 403, number
        assert "only files that were uploaded" in refused.text
    part = next(iter(demo.blocks))
    sent = {"session_hash": "annshash", "component_id": part, "fn_name": "x", "data": file_data(str(secret))}
    assert (await page.post("/gradio_api/component_server", json=sent)).status_code == 403
    await asyncio.sleep(0)
    copies = [file for file in runtime.upload_dir.rglob("*") if file.is_file()]
    assert copies == []


async def test_a_file_that_was_uploaded_before_is_taken(page: httpx.AsyncClient, demo: gr.Blocks) -> None:
    sent = await page.post("/gradio_api/upload?upload_id=u1", files={"files": ("note.txt", b"The zebra.")})
    assert sent.status_code == 200
    number = next(n for n, event in demo.fns.items() if event.api_name == "upload")
    event = {"session_hash": "annshash", "fn_index": number, "data": [[file_data(sent.json()[0])]]}
    assert (await page.post("/gradio_api/queue/join", json=event)).status_code == 200


def test_gradio_itself_looks_where_a_file_lies(runtime: Runtime, demo: gr.Blocks) -> None:
    """The second lock, should an event pass the gate."""
    from gradio.context import LocalContext
    from gradio.exceptions import InvalidPathError
    from gradio.processing_utils import _check_allowed

    create_app(runtime, demo)
    token = LocalContext.blocks.set(demo)
    try:
        with pytest.raises(InvalidPathError):
            _check_allowed("/etc/passwd", check_in_upload_folder=True)
    finally:
        LocalContext.blocks.reset(token)


@pytest.mark.parametrize("number", [999, -1, None, "0", 1.5, True])
async def test_an_event_that_is_not_on_the_page(page: httpx.AsyncClient, number: object) -> None:
    """Gradio answers it with a fault of the server."""
    sent = {"session_hash": "annshash", "fn_index": number, "data": []}
    assert (await page.post("/gradio_api/queue/join", json=sent)).status_code == 404
