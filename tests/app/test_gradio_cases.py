"""What the page must not ask of Gradio, since it is known to go wrong: read off the code."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "app").rglob("*.py"))
SCRIPTS = sorted(p for ending in ("*.js", "*.html") for p in (ROOT / "app").rglob(ending))


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """(name of what is called, the call) for each call in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            function = node.func
            yield getattr(function, "attr", getattr(function, "id", "")), node


def keyword(call: ast.Call, name: str) -> object:
    """The literal that is given under a name; None where it is not given."""
    for given in call.keywords:
        if given.arg == name:
            return ast.literal_eval(given.value) if isinstance(given.value, ast.Constant) else ...
    return None


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_hangs_on_session_callbacks(path: Path) -> None:
    for name, call in calls(path):
        assert name != "unload", f"{path.name}:{call.lineno}"
        assert keyword(call, "delete_callback") is None, f"{path.name}:{call.lineno}"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_our_pages_open_no_streams_of_their_own(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"\bnew\s+(EventSource|WebSocket)\b", text)


def test_what_runs_outside_the_queue_yields_nothing() -> None:
    """Whatever is called with `queue=False` has no Python function, or one that returns."""
    seen = 0
    for path in FILES:
        for _, call in calls(path):
            if keyword(call, "queue") is False:
                seen += 1
                function = call.args[0] if call.args else None
                assert isinstance(function, ast.Constant), f"{path.name}:{call.lineno}: not only a script"
                assert function.value is None
    assert seen


def test_the_queue_cannot_be_passed_by() -> None:
    found = [keyword(call, "api_open") for path in FILES for name, call in calls(path) if name == "queue"]
    assert found == [False]


def test_no_workers_and_no_server_side_rendering() -> None:
    mounts = [call for path in FILES for name, call in calls(path) if name == "mount_gradio_app"]
    assert [keyword(call, "ssr_mode") for call in mounts] == [False]
    for path in FILES:
        for _, call in calls(path):
            assert keyword(call, "num_workers") is None, f"{path.name}:{call.lineno}"


def test_no_older_gradio_than_the_last_advisory() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    [spec] = [d for d in project["project"]["dependencies"] if re.match(r"gradio\b", d)]
    floor = re.search(r">=(\d+)\.(\d+)", spec)
    assert floor is not None
    assert (int(floor[1]), int(floor[2])) >= (6, 31)
