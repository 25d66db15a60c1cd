"""Stopping while uploads are waited for."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from rag.errors import RagError
from rag.library import Library
from rag.types import DocumentInfo


def test_stopping_answers_those_who_wait_and_passes_over_those_who_gave_up(library: Library) -> None:
    """Seeding is cancelled when the server stops: its waiting future is cancelled before the stop."""
    given_up: Future[DocumentInfo] = Future()
    given_up.cancel()
    waiting: Future[DocumentInfo] = Future()
    library._ingest._waiters["d-1"] = [given_up, waiting]
    library.close()
    assert given_up.cancelled()
    with pytest.raises(RagError, match="stopping"):
        waiting.result(timeout=0)
