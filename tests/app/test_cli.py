"""The `coread` command: documented keys, one sentence for every refusal, the same answers beside a server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import gradio as gr
import httpx
import pytest
import uvicorn
from typer.testing import CliRunner

import app.client
from app.cli import app as command
from app.client import Door, _files, _named
from app.library_commands import reindex
from app.runtime import Runtime
from app.server import bind, create_app
from app.settings import Settings, load_settings
from engine.errors import ModelNotFound
from rag.errors import DataDirLocked
from tests.app.conftest import FakeParts
from tests.app.fakes import FakeEngine


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(command, list(arguments))
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(autouse=True)
def fake_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COREAD_DATA_DIR", str(tmp_path / "data"))

    def make(settings: Settings) -> Runtime:
        return Runtime(settings, FakeParts())

    monkeypatch.setattr(app.client, "Runtime", make)


@pytest.fixture
def server() -> Iterator[Runtime]:
    """A server that holds the data directory."""
    runtime = Runtime(load_settings(), FakeParts())
    runtime.open()
    listener = bind("127.0.0.1", 0)
    runtime.announce(f"http://127.0.0.1:{listener.getsockname()[1]}")
    config = uvicorn.Config(
        create_app(runtime, gr.Blocks()), log_level="warning", timeout_graceful_shutdown=1
    )
    served = uvicorn.Server(config)
    thread = threading.Thread(target=served.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield runtime
    served.should_exit = True
    thread.join(20)
    listener.close()


#: As under an answer on the page; None where nothing was compared.
MARKS = {"verified": "✓ verified", "similar": "≈ similar", "unsupported": "? unsupported", None: ""}


def check_the_commands() -> None:
    code, out, _ = run("ask", "When was the lighthouse built?", "--json")
    assert code == 0
    answer = json.loads(out)
    assert set(answer) == {"answer", "status", "sources", "receipt", "notes"}
    assert answer["answer"] == "Hello."
    assert {"prompt_tokens", "reused_tokens", "saved_bytes", "ttft_s"} <= set(answer["receipt"])
    code, out, _ = run("ask", "When was the lighthouse built?")
    lines = out.splitlines()
    assert (code, lines[0]) == (0, "Hello.")
    assert [line for line in lines if line.startswith("  [")] == [
        f"  [{s['number']}] " + " · ".join(p for p in (s["title"], s["section"], MARKS[s["verdict"]]) if p)
        for s in answer["sources"]
    ]
    code, out, _ = run("search", "loaf of rye", "--json", "-k", "1")
    assert json.loads(out)["hits"][0]["document"] == "sample-bakery"


def test_an_answer_cut_by_its_length_says_so_in_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    receipt = {"reused_tokens": 1, "prompt_tokens": 2, "output_tokens": 9, "length_limit": 9}
    told = {"answer": "It holds 18", "sources": [], "notes": [], "receipt": receipt}
    monkeypatch.setattr("app.client.run_ask", lambda *_: told)
    assert "Ended at the length limit of 9 tokens." in run("ask", "How many?")[1]


def test_commands_work_by_themselves() -> None:
    check_the_commands()


def test_commands_go_through_the_server_that_holds_the_data(server: Runtime) -> None:
    check_the_commands()
    assert run("ask", "   ")[0] == 1


def test_a_search_needs_no_language_model(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(ready_error=ModelNotFound("There is no model."))
    monkeypatch.setattr(app.client, "Runtime", lambda settings: Runtime(settings, FakeParts(engine)))
    code, out, _ = run("search", "loaf of rye", "--json", "-k", "1")
    assert code == 0
    assert json.loads(out)["hits"][0]["document"] == "sample-bakery"
    code, _, error = run("ask", "When does the bakery open?")
    assert code == 1
    assert "There is no model." in error


def test_files_and_folders_are_added_and_bad_ones_named(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "mill.md").write_text("# Mill\n\nThe mill grinds barley.")
    (folder / "deep" / "empty.txt").write_text("")
    (folder / ".hidden").write_text("never")
    code, out, _ = run("ingest", str(folder), "--collection", "Texts", "--json")
    rows = {row["name"]: row for row in json.loads(out)["documents"]}
    assert code == 1
    assert set(rows) == {"mill.md", "deep/empty.txt"}
    assert rows["mill.md"]["status"] == "ready"
    assert rows["deep/empty.txt"]["status"] == "failed"
    assert rows["deep/empty.txt"]["message"]
    assert "barley" in run("search", "mill barley")[1]


def check_a_second_time(folder: Path) -> None:
    folder.mkdir()
    (folder / "mill.md").write_text("# Mill\n\nThe mill grinds barley.")
    code, out, _ = run("ingest", str(folder), "--collection", "Texts")
    assert (code, out) == (0, "✓ mill.md: 1 passage\n")
    code, out, _ = run("ingest", str(folder), "--collection", "Texts")
    assert (code, out) == (0, "= mill.md: unchanged, 1 passage\n")
    (folder / "weir.md").write_text("# Weir\n\nThe weir holds the water back.")
    code, out, _ = run("ingest", str(folder), "--collection", "Texts", "--json")
    assert code == 0
    rows = {row["name"]: row for row in json.loads(out)["documents"]}
    assert {name: row["status"] for name, row in rows.items()} == {"mill.md": "unchanged", "weir.md": "ready"}
    assert rows["mill.md"]["document"] != rows["weir.md"]["document"]
    check_a_changed_file(folder, rows["mill.md"]["document"])


def check_a_changed_file(folder: Path, mill: str) -> None:
    """It is the next version of the same document, and a namesake in another folder is another document."""
    (folder / "mill.md").write_text("# Mill\n\nThe mill grinds buckwheat now.")
    (folder / "old").mkdir()
    (folder / "old" / "mill.md").write_text("# The old mill\n\nThe old mill ground spelt.")
    code, out, _ = run("ingest", str(folder), "--collection", "Texts", "--json")
    assert code == 0
    rows = {row["name"]: row for row in json.loads(out)["documents"]}
    assert rows["mill.md"] | {"passages": 1} == {
        "name": "mill.md", "document": mill, "version": 2, "status": "ready", "passages": 1, "message": None,
    }  # fmt: skip
    assert rows["old/mill.md"]["version"] == 1
    assert rows["old/mill.md"]["document"] != mill
    found = [hit["text"] for hit in json.loads(run("search", "mill", "--json", "-k", "20")[1])["hits"]]
    assert any("buckwheat" in text for text in found)
    assert any("spelt" in text for text in found)
    assert not any("barley" in text for text in found), "the first version is still found"
    (folder / "mill.md").write_text("")
    code, out, _ = run("ingest", str(folder / "mill.md"), "--collection", "Texts", "--json")
    (row,) = json.loads(out)["documents"]
    assert (code, row["status"]) == (1, "failed")
    assert "buckwheat" in run("search", "mill buckwheat")[1]


def test_a_reindexing_server_is_awaited_as_long_as_it_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    waited: list[object] = []

    def answer(request: httpx.Request) -> httpx.Response:
        waited.append(request.extensions["timeout"]["read"])
        return httpx.Response(200, json={})

    door = Door(tmp_path, "http://127.0.0.1:1")
    monkeypatch.setattr(door, "_http", httpx.Client(
        transport=httpx.MockTransport(answer), base_url="http://127.0.0.1:1", timeout=600.0))  # fmt: skip
    monkeypatch.setattr("app.library_commands.Door", lambda *_: door)

    def locked(*_: object) -> None:
        raise DataDirLocked(str(tmp_path), {"url": "http://127.0.0.1:1"})

    monkeypatch.setattr("rag.library.Library.open", locked)
    assert reindex(load_settings(data_dir=tmp_path), embeddings=True) == {}
    door.post("search", {"query": "x"})
    assert waited == [None, 600.0]


def test_files_of_one_call_never_replace_each_other(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.md").write_text(f"# Notes\n\nNotes of {name}.")
    folders = [tmp_path / "a", tmp_path / "b", tmp_path / "a"]
    assert _named(list(_files(folders))) == [
        (f"{folder.as_posix()}/notes.md", folder / "notes.md") for folder in folders[:2]
    ]
    assert _named(list(_files([tmp_path]))) == [
        (f"{name}/notes.md", tmp_path / name / "notes.md") for name in ("a", "b")
    ]


def test_what_is_there_already_is_unchanged_and_no_failure(tmp_path: Path) -> None:
    check_a_second_time(tmp_path / "texts")


def test_what_a_server_holds_already_is_unchanged_and_no_failure(tmp_path: Path, server: Runtime) -> None:
    check_a_second_time(tmp_path / "texts")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ask", ""], "empty"),
        (["ask", "x" * 50_000], "50,000 characters"),
        (["ask", "Hi?", "--document", "no-such"], "deleted"),
        (["ingest", "/no/such/file", "--collection", "X"], "no file or folder"),
    ],
)
def test_refusals_are_one_sentence(arguments: list[str], words: str) -> None:
    code, out, error = run(*arguments)
    assert code == 1
    assert words in error
    assert error.startswith("coread: ")
    assert "Traceback" not in out + error


def test_a_busy_port_and_a_bad_setting_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, _, error = run("serve", "--port", str(taken.getsockname()[1]))
    assert code == 1
    assert "is in use" in error
    monkeypatch.setenv("COREAD_DEVICE", "tpu")
    code, _, error = run("ask", "Hi?")
    assert code == 1
    assert "COREAD_DEVICE" in error
