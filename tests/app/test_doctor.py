"""What `coread doctor` says of a reranker: nothing where none is set, and why where it can't be loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.doctor import _reranker
from app.runtime import RealParts
from app.settings import Settings
from rag.database import Database
from rag.datadir import DataDir
from rag.errors import RerankerUnavailable


def test_no_reranker_is_no_part_of_the_report() -> None:
    assert _reranker(Settings(), []) is None


def test_a_reranker_that_cannot_be_loaded_is_a_problem(tmp_path: Path) -> None:
    problems: list[str] = []
    said = _reranker(Settings(reranker=str(tmp_path)), problems)
    assert said is not None
    assert said["error"] == problems[0]
    assert "can't be loaded" in problems[0]


def test_the_server_says_so_before_it_is_ready(tmp_path: Path) -> None:
    parts = RealParts()
    with DataDir(tmp_path) as data_dir, Database(data_dir.database) as database:
        with pytest.raises(RerankerUnavailable, match="neither a folder nor a hub id"):
            parts.library(Settings(reranker="nothing here"), data_dir, database, lambda: False)
        parts.close()
