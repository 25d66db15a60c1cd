"""Rules of the room that a reader of the code can check, checked here: nothing shared by accident."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "app").rglob("*.py"))
#: Calls whose results never change, or that are made to be module-level (a logger, a compiled pattern, a
#: context variable, which holds a value for each request).
CALLS = {"frozenset", "compile", "getLogger", "TypeVar", "Path", "tuple", "Migration", "Principal", "Typer",
         "MappingProxyType", "Field", "Option", "Argument", "str", "bytes", "int", "float",
         "ContextVar", "Words"}  # fmt: skip


def mutable(node: ast.expr) -> str | None:
    """Why the value of a module-level name may change under its users, or None."""
    match node:
        case ast.List() | ast.Dict() | ast.Set() | ast.ListComp() | ast.DictComp() | ast.SetComp():
            return type(node).__name__
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
            return None if name in CALLS else f"call of {name}"
        case ast.Tuple(elts=parts):
            return next((why for part in parts if (why := mutable(part))), None)
    return None


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_mutable_module_level_objects(path: Path) -> None:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        value = getattr(node, "value", None) if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]  # type: ignore[union-attr]
            names = [t.id for t in targets if isinstance(t, ast.Name)]
            why = mutable(value)
            assert why is None, f"{path.name}:{node.lineno} {names} is {why}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_state_defaults_are_literals(path: Path) -> None:
    """`gr.State(make_id())` is evaluated once, when the page is built, and is then everybody's."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "State":
            for argument in [*node.args, *(k.value for k in node.keywords if k.arg == "value")]:
                assert isinstance(argument, ast.Constant), f"{path.name}:{node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_torch_in_this_room(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = (
            [alias.name for alias in node.names] if isinstance(node, ast.Import)
            else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        )  # fmt: skip
        assert not {name.split(".")[0] for name in names} & {"torch", "triton", "transformers"}, path


def test_html_templates_take_no_data() -> None:
    """After Handlebars, Gradio evaluates a template as JavaScript: it must contain no place for data."""
    for path in (ROOT / "app" / "pages").glob("*.html"):
        text = path.read_text(encoding="utf-8")
        for opening in ("${", "{{", "`"):
            assert opening not in text, path
    for path in (ROOT / "app" / "pages").glob("*.js"):
        assert "innerHTML" not in path.read_text(encoding="utf-8"), path
