"""Every fault in docs/engine_cases.md names a test, and every test that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = [
    line
    for line in (ROOT / "docs" / "engine_cases.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| fault ")
]


def test_the_table_is_there() -> None:
    assert len(ROWS) >= 40


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:50])
def test_the_named_test_exists(row: str) -> None:
    [name] = re.findall(r"`(tests/[^`]+)`", row)
    path, _, test = name.partition("::")
    file = ROOT / path
    assert file.is_file(), f"{path} does not exist"
    assert re.search(rf"^\s*(async )?def {test}\(", file.read_text(encoding="utf-8"), re.M), name
