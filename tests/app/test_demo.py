"""The scripted readers: they come, share, branch and leave; what is recorded can be played."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.dashboard.feed import DashboardFeed
from app.dashboard.recording import Recorder, RecordingRefused, load, packed_recording, save
from app.demo import MIN_READERS, Demo, DemoRefused, DemoRunning, Pace, script
from app.errors import NotAllowed
from app.knowledge import DocumentView
from app.principal import OWNER, Principal
from app.runtime import Runtime
from tests.app.small_engine import SmallEngine


@pytest.fixture
def engine() -> SmallEngine:
    return SmallEngine(blocks=400, threaded=True, pause_s=0.001)


@pytest.fixture
def quick(runtime: Runtime) -> Demo:
    runtime.demo = Demo(runtime, Pace(between_s=0.03, reads_s=2.0))
    return runtime.demo


def document(id: str) -> DocumentView:
    return DocumentView(id, id.title(), f"{id}.md", "sample", 1, own=False)


def test_the_script_is_always_the_same_and_makes_readers_meet() -> None:
    parts = script([document(name) for name in "abcde"], 24)
    assert parts == script([document(name) for name in "abcde"], 24)
    read = [part.document.id for part in parts]
    assert len(set(read)) == 4
    assert max(read.count(id) for id in set(read)) >= 6
    assert sum(part.branch for part in parts) >= 3
    assert len({part.principal.id for part in parts}) == 24


async def test_readers_come_share_branch_and_leave(
    runtime: Runtime, engine: SmallEngine, quick: Demo
) -> None:
    feed = DashboardFeed(runtime)
    recorder = Recorder(feed, every_s=0.1)
    recording = asyncio.create_task(recorder.run())
    quick.start()
    with pytest.raises(DemoRunning):
        quick.start()
    progress = await quick.wait()
    recording.cancel()
    assert progress.failed == []
    assert (progress.arrived, progress.left) == (MIN_READERS, MIN_READERS)
    assert progress.answers == MIN_READERS + 4 + 3  # every third asks twice, every fourth branches
    since = engine.memory().since_start
    assert since.requests == since.answers == progress.answers
    assert since.prefill_tokens_skipped > since.prefill_tokens_computed
    assert since.peak_saved_bytes > 0
    assert since.blocks_copied > 0
    # Everybody has left: nothing is open, nothing is kept of them in the database.
    await asyncio.sleep(0.3)
    assert engine.memory().open == {}
    for part in script(await quick._documents(), MIN_READERS):
        assert await runtime.store.conversations(part.principal) == []
    await check_recording(recorder)


async def check_recording(recorder: Recorder) -> None:
    merged: dict[str, Any] = {}
    frames = [merged := merged | frame for frame in recorder.frames]
    frames = [frame for frame in frames if frame.get("open")]
    assert sum("map" in frame for frame in recorder.frames) > 2
    assert sum("from" in frame.get("map", {}) for frame in recorder.frames) > 1, "later maps are differences"
    most = max(frame["open"]["everybody"]["conversations"] for frame in frames)
    assert most >= 6
    busy = next(
        frame for frame in frames if "tree" in frame and frame["open"]["everybody"]["conversations"] >= 6
    )
    assert any(row.get("title", "").startswith("Scripted reader") for row in busy["rows"]["open"])
    assert busy["pages"]
    # The first block after the instructions may hold a beginning that both documents have.
    labels = {node["label"] for node in busy["tree"]["nodes"] if node["kind"] == "document"}
    assert labels <= {"The lighthouse", "The bakery", "The bakery, The lighthouse"}
    assert any(frame["flash"]["published"] for frame in frames)


async def test_only_an_administrator_may_start_it(quick: Demo) -> None:
    for who in (None, Principal("anonymous", "b-1"), Principal("api_key", "k-1")):
        assert not quick.status(who)["allowed"]
        with pytest.raises(NotAllowed):
            quick.start_by(who)
    assert quick.status(OWNER)["allowed"]
    for readers in (0, 11, 49):
        with pytest.raises(DemoRefused, match=f"{readers} readers"):
            quick.start_by(OWNER, readers)


async def test_stopping_sends_everybody_home(runtime: Runtime, quick: Demo) -> None:
    quick.start()
    await asyncio.sleep(0.15)
    await quick.stop()
    assert quick.conversations({"sample-lighthouse": "L", "sample-bakery": "B"}) == {}
    status = quick.status()
    assert status["arrived"] == status["left"] > 0


async def test_a_reader_whose_leaving_fails_ends_nobody_elses_visit(
    runtime: Runtime, quick: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick._pace = Pace(between_s=0.0, reads_s=0.0)
    delete, failures = runtime.chat.delete, iter([OSError("the disk is full")])

    async def full(principal: Principal, talk: str) -> None:
        if (failure := next(failures, None)) is not None:
            raise failure
        await delete(principal, talk)

    monkeypatch.setattr(runtime.chat, "delete", full)
    quick.start()
    progress = await quick.wait()
    assert (progress.arrived, progress.left) == (MIN_READERS, MIN_READERS)
    assert len(progress.failed) == 1
    assert "the disk is full" in progress.failed[0]
    assert quick.conversations({"sample-lighthouse": "L", "sample-bakery": "B"}) == {}


async def test_what_a_planned_demonstration_fails_with_is_in_the_log(
    runtime: Runtime, quick: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    quick._pace = Pace(between_s=0.0, reads_s=0.0)
    quick.plan(MIN_READERS, tmp_path / "none" / "r.json.gz")
    quick.begin_planned()
    assert quick._beginning is not None
    await asyncio.wait({quick._beginning})
    assert "coread-demo-plan has failed: " in caplog.text
    assert "cannot be written" in caplog.text

    async def broken() -> list[DocumentView]:
        raise OSError("no table")

    monkeypatch.setattr(quick, "_documents", broken)
    quick.start()
    with pytest.raises(OSError, match="no table"):
        await quick.wait()
    assert "coread-demo has failed: no table" in caplog.text
    assert quick.status()["problem"].startswith("The demonstration has failed")


async def test_the_command_starts_it_through_the_door(
    runtime: Runtime, client: httpx.AsyncClient, quick: Demo
) -> None:
    assert (await client.post("/api/admin/demo", json={})).status_code == 403
    headers = {"x-coread-token": runtime.token}
    started = await client.post("/api/admin/demo", json={"readers": 13}, headers=headers)
    assert started.json()["readers"] == 13
    again = await client.post("/api/admin/demo", json={}, headers=headers)
    assert again.status_code == 409
    await quick.stop()


def test_recordings_are_written_read_and_refused(tmp_path: Path) -> None:
    recording: dict[str, Any] = {
        "format": "coread-recording/2", "made": "2026-01-31", "kind": "engine", "model": "m",
        "device": "cpu", "every_s": 1.0, "frames": [{"engine": {"model": "m"}}],
    }  # fmt: skip
    path = tmp_path / "r.json.gz"
    save(recording, path)
    assert load(path) == recording
    assert set(packed_recording(path)) == {"packed"}
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(RecordingRefused, match="cannot be read"):
        load(path)
    for wrong in ({"format": "other"}, {"kind": "dream"}, {"frames": []}):
        save({**recording, **wrong}, path)
        with pytest.raises(RecordingRefused, match="not a recording"):
            load(path)
    with pytest.raises(RecordingRefused, match="cannot be written"):
        save(recording, tmp_path / "none" / "r.json.gz")
