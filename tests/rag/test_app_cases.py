"""Every fault in docs/app_cases.md names tests, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    line
    for line in (ROOT / "docs" / "app_cases.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| fault ")
]


def test_the_table_is_there() -> None:
    assert len(ROWS) >= 40


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:50])
def test_the_named_tests_exist(row: str) -> None:
    names = re.findall(r"`(tests/[^`]+)`", row)
    assert names
    for name in names:
        path, _, test = name.partition("::")
        file = ROOT / path
        assert file.is_file(), f"{path} does not exist"
        assert re.search(rf"^\s*(async )?(def|class) {test}\(", file.read_text(encoding="utf-8"), re.M), name


def test_no_index_is_ever_read_from_a_file() -> None:
    """What FAISS or pickle would load could be crafted; indexes are built from SQLite alone."""
    for file in (ROOT / "rag").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute | ast.Name):
                name = node.attr if isinstance(node, ast.Attribute) else node.id
                assert name not in {"read_index", "deserialize_index", "load_index", "pickle"}, file
            if isinstance(node, ast.Import):
                assert not {"pickle", "marshal", "shelve"} & {alias.name for alias in node.names}, file
