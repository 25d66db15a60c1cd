"""Whose upload is read next: everybody's in turn, so that one person's hundred files hold up nobody else's.

The owner of whose documents fewest are being read comes first, then whoever's turn is longest ago (or two
people's hundred files would hold up a third), then the document that waits longest; each owner's own
documents keep their order. Only the oldest job of each owner is ever looked at.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """A document that waits or is being read. `document` and `collection` are integer keys; `queued` (seconds
    since the epoch) tells the job from an earlier or later one for the same document, which may have been
    cancelled or superseded; `owner` is who added the document."""

    document: int
    document_id: str
    collection: int
    content_hash: str
    name: str
    size: int
    queued: float
    owner: str


def choose(
    waiting: Iterable[Job],
    running: Mapping[str, int],
    turns: Mapping[str, int],
    *,
    idle_owner: bool = False,
) -> Job | None:
    """The job to begin. `running` counts the documents being read by their owner; `turns` has the number of
    each owner's last turn, none for those who had none lately.

    With `idle_owner` only a job whose owner has none being read will do.
    """

    def place(job: Job) -> tuple[int, int, float, int]:
        return running.get(job.owner, 0), turns.get(job.owner, 0), job.queued, job.document

    return min(
        (job for job in waiting if not (idle_owner and running.get(job.owner, 0))), key=place, default=None
    )


def oldest_of_each_owner(connection: sqlite3.Connection) -> list[Job]:
    """The queued job that waits longest, for each owner who has one."""
    rows = connection.execute(
        "SELECT document, id, collection, content_hash, name, size, queued, created_by FROM ("
        "  SELECT j.*, d.id, d.collection, d.created_by, ROW_NUMBER() OVER ("
        "    PARTITION BY d.created_by ORDER BY j.queued, j.document) AS place "
        "  FROM jobs j JOIN documents d ON d.key = j.document WHERE j.status = 'queued'"
        ") WHERE place = 1"
    )
    return [Job(*row) for row in rows]
