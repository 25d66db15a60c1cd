"""What `coread doctor` says of a reranker: nothing where none is set, and why where it can't be loaded."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from app.doctor import _library, _reranker
from app.library_commands import reindex
from app.runtime import RealParts, Runtime
from app.settings import Settings
from bench.word_embedder import WordEmbedder
from rag.database import Database
from rag.datadir import DataDir
from rag.errors import RerankerUnavailable
from rag.library import Library


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


def test_the_stores_are_compared_and_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rag.embed.SentenceEmbedder", lambda model: _Embedder())
    assert _library(tmp_path, []) is None
    library = Library.open(tmp_path, _Embedder())
    library.create_collection("c", "me", "c")
    library.wait(library.add_document("c", "f.md", b"# Ferry\n\nThe ferry carries 32 cars.", "me"), 60)
    problems: list[str] = []
    assert _library(tmp_path, problems) == {"documents": 1, "passages": 1, "files": 1}  # beside its owner
    assert problems == []
    library.database.write_sync(lambda c: c.execute("DELETE FROM passage_terms").rowcount)
    library.close(all=True)
    _library(tmp_path, problems)
    assert "missing from the stored terms" in problems[0]
    assert "coread reindex" in problems[1]
    report = reindex(Settings(data_dir=tmp_path), embeddings=True)
    assert report["problems"] == []
    assert _library(tmp_path, []) == {"documents": 1, "passages": 1, "files": 1}


def test_a_broken_database_is_a_problem_and_not_the_end_of_the_report(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "coread.sqlite").write_bytes(b"not a database" * 100)
    problems: list[str] = []
    assert _library(tmp_path, problems) == {"error": problems[0]}
    assert "can't be checked: file is not a database" in problems[0]


async def test_the_server_reindexes_through_its_door(runtime: Runtime, client: httpx.AsyncClient) -> None:
    await runtime.wait_seeded()
    token = {"X-Coread-Token": runtime.token}
    answer = await client.post("/api/admin/reindex", json={}, headers=token)
    assert answer.json()["problems"] == []
    assert answer.json()["passages"] > 0
    assert (await client.post("/api/admin/reindex", json={})).status_code in (401, 403)


class _Embedder(WordEmbedder):
    def close(self) -> None: ...
