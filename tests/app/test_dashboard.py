"""Who sees what on the memory page, what an update costs, and that nothing on it can run."""

from __future__ import annotations

import asyncio
import base64
import gzip
import inspect
import json
import re
import threading
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from app.dashboard import page, wire
from app.dashboard.block import place_of
from app.dashboard.feed import Asked, DashboardFeed
from app.dashboard.names import Viewers
from app.dashboard.routes import FEED
from app.dashboard.shared import LOOK_S, Shared, cells_of, flashes, packed
from app.dashboard.tables import MAX_OTHERS, all_rows, document_label, table
from app.pages.build import build_demo
from app.pages.words import TEXTS
from app.principal import Principal
from app.runtime import Runtime
from engine.block_events import BlockEvent
from engine.ledger import MemorySnapshot, SinceStart, Totals
from rag.types import DocumentText, SectionText
from tests.app.small_engine import SmallEngine

HOSTILE = "${window.ran=1}<img src=x onerror=window.ran=1>"


@pytest.fixture
def engine() -> SmallEngine:
    return SmallEngine(blocks=300, threaded=True)


async def ask(runtime: Runtime, who: Principal, question: str, document: str | None = None) -> str:
    talk = await runtime.store.create(who, document_id=document)
    async for _ in runtime.chat.ask(who, talk.id, question):
        pass
    return talk.id


async def test_names_go_only_to_those_who_may_know_them(runtime: Runtime, engine: SmallEngine) -> None:
    ann, _ = runtime.signer.issue()
    bob, _ = runtime.signer.issue()
    secret = await runtime.knowledge.upload(
        ann, "Zanzibar diary.md", f"# Zanzibar diary {HOSTILE}\n\n{'Rain. ' * 60}".encode()
    )
    async for _ in runtime.knowledge.progress(ann, secret, 0.1):
        pass
    hers = await ask(runtime, ann, "What does the quokka eat?", secret)
    his = await ask(runtime, bob, "When does the bakery open?", "sample-bakery")
    feed = DashboardFeed(runtime)
    seen = await feed.read(ann, Asked.everything(hers))
    assert seen["conversation"] == hers
    assert [row["kind"] for row in seen["rows"]["open"]] == ["own", "other"]
    assert any("Zanzibar" in node["label"] for node in seen["tree"]["nodes"])
    assert any(node["mine"] for node in seen["tree"]["nodes"])
    assert seen["pages"][0]["blocks"]

    for viewer, own in ((bob, his), (None, None)):
        other = await feed.read(viewer, Asked.everything(hers))
        assert other["conversation"] == own
        text = json.dumps(other)
        for hidden in ("Zanzibar", "quokka", secret, hers, ann.id):
            assert hidden not in text
        assert any(node["hidden"] == 1 for node in other["tree"]["nodes"])
        assert "The bakery" in text
    block = seen["mine_blocks"][len(seen["mine_blocks"]) // 2]
    assert "Zanzibar" in (await feed.block(ann, block) or {})["documents"]
    strangers = await feed.block(bob, block)
    assert strangers == {
        "kind": "document", "readers": 0, "open_readers": 1, "documents": "", "hidden": 1, "known": False,
    }  # fmt: skip


async def test_a_stranger_gets_counts_only(runtime: Runtime, engine: SmallEngine) -> None:
    """Every block that holds her document or her own text, hovered over by somebody else."""
    ann, _ = runtime.signer.issue()
    bob, _ = runtime.signer.issue()
    diary = "# Zanzibar diary\n\n" + "".join(
        f"Day {n}: rain over the harbour, tide {n * 37}. " for n in range(30)
    )
    secret = await runtime.knowledge.upload(ann, "diary.md", diary.encode())
    async for _ in runtime.knowledge.progress(ann, secret, 0.1):
        pass
    hers = await ask(runtime, ann, "What does the quokka eat?", secret)
    feed = DashboardFeed(runtime)
    blocks = (await feed.read(ann, Asked(hers)))["mine_blocks"]
    told = {"document": 0, "branch": 0}
    for block in blocks:
        mine, theirs = await feed.block(ann, block), await feed.block(bob, block)
        assert mine is not None
        assert theirs is not None
        assert mine["known"]
        if mine["kind"] == "instructions":
            assert theirs["known"]
            continue
        told[mine["kind"]] += 1
        assert set(theirs) == {"kind", "readers", "open_readers", "documents", "hidden", "known"}
        assert (theirs["documents"], theirs["known"]) == ("", False)
        assert theirs["open_readers"] == mine["open_readers"] == 1
        assert (await feed.block(None, block)) == theirs
    assert told["document"] > 20
    assert told["branch"] > 1


def test_a_block_is_placed_on_its_page_or_in_its_section() -> None:
    texts = (
        "The lamp burns rape oil all night. ",
        "The keeper reads by it. The keeper sleeps. ",
        "The keeper reads by it.",
    )
    starts = [sum(map(len, texts[:i])) for i in range(4)]

    def document(pages: tuple[int | None, ...]) -> DocumentText:
        sections = tuple(
            SectionText(i, f"Part {i}", 1, starts[i], starts[i + 1], texts[i], pages[i]) for i in range(3)
        )
        return DocumentText("d", "c", "d.pdf", "D", 1, "".join(texts), sections)

    paged, unpaged = document((3, 4, 4)), document((None, None, None))
    assert place_of(paged, " lamp burns rape oil") == (3, "")
    assert place_of(unpaged, " lamp burns rape oil") == (None, "Part 0")
    assert place_of(paged, "keeper reads by it") == (4, ""), "twice, but on one page"
    assert place_of(unpaged, "keeper reads by it") == (None, ""), "in two sections: not certain"
    assert place_of(paged, "something else altogether") == place_of(paged, "The") == (None, "")


class Counted(str):
    """A text that counts how often something is looked for in it."""

    looks = 0

    def find(self, *what: Any) -> int:
        self.looks += 1
        return super().find(*what)


@pytest.mark.parametrize(("page", "most"), [(None, 3), (7, 1_001)])
def test_a_text_that_repeats_is_placed_in_proportion(page: int | None, most: int) -> None:
    """A thousand short sections of one word: whoever reads them hovers over a block of that word."""
    body = "ab " * 40
    sections = tuple(
        SectionText(i, f"Part {i}", 1, i * len(body), (i + 1) * len(body), body, page) for i in range(1_000)
    )
    text = Counted(body * 1_000)
    placed = place_of(DocumentText("d", "c", "d.md", "D", 1, text, sections), "ab ab ab ab ab a")
    assert placed == ((page, "") if page else (None, ""))
    assert text.looks <= most


async def test_a_block_is_placed_off_the_event_loop(
    runtime: Runtime, engine: SmallEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann, _ = runtime.signer.issue()
    talk = await ask(runtime, ann, "When does the bakery open?", "sample-bakery")
    on: list[int] = []

    def noted(document: DocumentText, text: str) -> tuple[int | None, str]:
        on.append(threading.get_ident())
        return place_of(document, text)

    monkeypatch.setattr("app.dashboard.block.place_of", noted)
    feed = DashboardFeed(runtime)
    for block in (await feed.read(ann, Asked(talk)))["mine_blocks"]:
        assert (await feed.block(ann, block) or {})["known"]
    assert on
    assert threading.get_ident() not in on


@pytest.mark.parametrize("block", [-1, 300, 10**9, None, "0", 1.5, [0]])
async def test_what_is_no_block_has_no_answer(runtime: Runtime, block: Any) -> None:
    assert await DashboardFeed(runtime).block(None, block) is None


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"conversation": "x" * 5_000, "have": "x" * 100_000, "want": "h" * 999},
        {"have": "__m1_\0_m" + "9" * 40, "want": "zzz"},
    ],
)
async def test_whatever_a_browser_sends_gets_an_update(runtime: Runtime, query: dict[str, str]) -> None:
    update = await DashboardFeed(runtime).read(None, Asked.of(query))
    assert update["map"]["packed"]
    assert update["conversation"] is None


async def test_events_carry_their_numbers(runtime: Runtime, engine: SmallEngine) -> None:
    """A page flashes those above the number that it has seen: each once."""
    ann, _ = runtime.signer.issue()
    feed = DashboardFeed(runtime, share=1.0)
    before = await feed.read(ann, Asked())
    assert before["flash"] == {"published": [], "copied": []}, "what was before the first look is not told"
    await ask(runtime, ann, "When does the bakery open?")
    await asyncio.sleep(LOOK_S)
    after = await feed.read(ann, Asked())
    numbers = [number for number, _ in after["flash"]["published"]]
    assert numbers
    assert before["event_number"] < min(numbers) <= max(numbers) <= after["event_number"]


async def test_only_what_is_new_is_sent_and_adds_up_to_the_whole(
    runtime: Runtime, engine: SmallEngine
) -> None:
    ann, _ = runtime.signer.issue()
    feed = DashboardFeed(runtime, share=1.0)
    first = await feed.answer(ann, Asked.everything())
    have = frozenset(part.key for part in first)
    assert await feed.answer(ann, replace(Asked.everything(), have=have)) == []
    assert json.loads(wire.plain(first)) == json.loads(gzip.decompress(wire.gzipped(first)))
    assert json.loads(wire.plain(first))["keys"] == [part.key for part in first]

    await ask(runtime, ann, "When does the bakery open?", "sample-bakery")
    await asyncio.sleep(LOOK_S)
    second = await feed.answer(ann, replace(Asked.everything(), have=have))
    change = wire.merged(second)["map"]
    assert change["from"] in have
    cells = zlib.decompress(base64.b64decode(wire.merged(first)["map"]["packed"]))
    xor = zlib.decompress(base64.b64decode(change["packed"]))
    shared = await feed.shared()
    assert bytes(a ^ b for a, b in zip(cells, xor, strict=True)) == shared.cells
    unknown = await feed.answer(ann, Asked(have=frozenset({"m0.1"})))
    whole = wire.merged(unknown)["map"]
    assert "from" not in whole
    assert zlib.decompress(base64.b64decode(whole["packed"])) == shared.cells


async def test_the_door_that_pages_poll(
    runtime: Runtime, engine: SmallEngine, client: httpx.AsyncClient
) -> None:
    assert (await client.get(FEED)).status_code == 401
    _, cookie = runtime.signer.issue()
    client.cookies.set(runtime.signer.name, cookie)
    packed = await client.get(FEED, params={"want": "hp"})
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.headers["cache-control"] == "private, no-store"
    assert packed.headers["x-content-type-options"] == "nosniff"
    plain = await client.get(FEED, params={"want": "hp"}, headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert int(plain.headers["content-length"]) == len(plain.content)
    assert plain.json()["map"] == packed.json()["map"]
    have = [key for key in plain.json()["keys"] if key[0] != "f"]
    later = await client.get(FEED, params={"want": "hp", "have": "_".join(have)})
    assert "map" not in later.json()
    assert not set(later.json()["keys"]) & set(have)


async def test_names_are_looked_up_again_only_after_something_was_written(
    runtime: Runtime, engine: SmallEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann, _ = runtime.signer.issue()
    viewers = Viewers(runtime)
    assert not (await viewers.names(ann)).own
    monkeypatch.setattr("app.dashboard.names.NAMES_S", 0.0)
    first, commits = await viewers.names(ann), runtime.store.commits
    assert await viewers.names(ann) is first or runtime.store.commits > commits
    talk = await runtime.store.create(ann, "Bread")
    await runtime.store.add_message(ann, talk.id, None, "user", "When does the bakery open?")
    assert (await viewers.names(ann)).own == {talk.id: "Bread"}


async def test_a_right_that_was_taken_takes_the_titles_at_once(runtime: Runtime, engine: SmallEngine) -> None:
    """The block under the pointer, its place, the tree: all of them, on the next request."""
    ann, _ = runtime.signer.issue()
    bob, _ = runtime.signer.issue()
    diary = "# Zanzibar diary\n\n" + "Rain over the harbour. " * 30
    document = await runtime.knowledge.upload(ann, "diary.md", diary.encode())
    async for _ in runtime.knowledge.progress(ann, document, 0.1):
        pass
    home = (await runtime.knowledge.readable_info(ann, document)).collection_id
    await runtime.store.grant(home, bob.id)
    hers = await ask(runtime, ann, "What does the quokka eat?", document)
    feed = DashboardFeed(runtime)
    blocks = (await feed.read(ann, Asked(hers)))["mine_blocks"]
    named = {b: (await feed.block(bob, b) or {})["documents"] for b in blocks}
    block = next(b for b, documents in named.items() if "Zanzibar" in documents)
    assert "Zanzibar" in json.dumps(await feed.read(bob, Asked.everything()))
    await runtime.store.revoke(home, bob.id)
    told = await feed.block(bob, block)
    assert told is not None
    assert (told["documents"], told["hidden"], told["known"]) == ("", 1, False)
    assert "Zanzibar" not in json.dumps(await feed.read(bob, Asked.everything()))
    assert "Zanzibar" in (await feed.block(ann, block) or {})["documents"], "hers stays hers"


async def test_one_look_serves_all_viewers(runtime: Runtime, engine: SmallEngine) -> None:
    feed = DashboardFeed(runtime)
    seen = {id(await feed.shared()) for _ in range(5)}
    assert len(seen) == 1


def test_a_copy_flashes_where_it_was_copied_to() -> None:
    events = [
        BlockEvent(1, "published", 4, "c"),
        BlockEvent(2, "copied", 4, "c", 9, 3),
        BlockEvent(3, "merged", 5, "", 4),
        BlockEvent(4, "evicted", 7, ""),
        BlockEvent(5, "unlinked", 8, ""),
    ]
    assert flashes(events) == {"published": [[1, 4]], "copied": [[2, 9]]}


def test_other_peoples_rows_are_bounded_and_still_add_up() -> None:
    engine = SmallEngine(blocks=2_000)
    for n in range(MAX_OTHERS + 12):
        engine.ask(f"c{n}", document=0, question=n, tokens=3)
    engine.run_until(lambda: len(engine.done()) == MAX_OTHERS + 12)
    snapshot = engine.memory()
    rows = table(all_rows(snapshot.open, snapshot.running), {"c5": "Mine"})
    assert [row["kind"] for row in rows] == ["own", *["other"] * MAX_OTHERS, "rest"]
    assert sum(row["count"] for row in rows) == MAX_OTHERS + 12
    assert sum(row["fair_share_bytes"] for row in rows) == snapshot.totals_open.physical_bytes
    assert "c6" not in json.dumps(rows)


def test_a_label_counts_what_it_may_not_name() -> None:
    titles = {"a": "Alpha", "b": "Beta"}
    assert document_label(frozenset({"a", "b"}), titles) == ("Alpha, Beta", 0)
    assert document_label(frozenset({"a", "x", "y"}), titles) == ("Alpha", 2)
    assert document_label(frozenset(), titles) == ("", 0)


def snapshot_of(blocks: int) -> MemorySnapshot:
    """A busy pool: runs of blocks in every state, as an allocator that prefers runs leaves them."""
    rng = np.random.default_rng(1)
    state = np.repeat(rng.integers(0, 6, blocks // 10).astype(np.uint8), 10)
    readers = np.repeat(rng.integers(0, 9, blocks // 10).astype(np.uint8), 10) * (state < 3) * (state > 0)
    totals = Totals(0, 0, 0, 0, 0)
    return MemorySnapshot(
        number=1, total_blocks=blocks, block_size=16, block_bytes=2048, free=0, held=0, retained=blocks,
        pinned=0, utilisation=None, readers=readers.astype(np.uint8).tobytes(),
        soft_readers=readers.astype(np.uint8).tobytes(), state=state.tobytes(), running={}, open={},
        totals_running=totals, totals_open=totals,
        since_start=SinceStart(), event_number=0,
    )  # fmt: skip


@pytest.mark.parametrize(("blocks", "most"), [(10_000, 4_000), (100_000, 40_000)])
def test_the_map_of_a_large_pool_is_a_small_update(blocks: int, most: int) -> None:
    assert len(packed(cells_of(snapshot_of(blocks)))) < most


def test_the_page_has_no_place_for_data() -> None:
    """After Handlebars, Gradio evaluates a template as JavaScript: this one holds none, and the script writes
    through canvas and textContent only."""
    for opening in ("${", "{{", "`"):
        assert opening not in page.template()
    for way_in in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert way_in not in page.script()


def test_its_texts_are_those_of_the_catalogue() -> None:
    """Nothing of them may end a string, a tag or a template where it stands."""
    marks = re.compile(r"@@([a-z0-9_.]+)@@")
    keys = set(marks.findall(page.template() + page.script()))
    assert {key for key in TEXTS if key.startswith("dash.")} <= keys <= set(TEXTS)
    for key in keys:
        for told in TEXTS[key]:
            assert not re.search(r"[\"\\`<>&\n]|\$\{|\{\{", told), key
    bare = re.sub(r"<!--.*?-->|<[^>]*>", "\n", marks.sub("", page.template()), flags=re.DOTALL)
    assert re.findall(r"[A-Za-z]{2,}.*", bare) == []
    lines = [line.split("//")[0] for line in page.script().splitlines()]
    strings = re.findall(r"\"([^\"\n]*)\"|`([^`]*)`", marks.sub("", "\n".join(lines)))
    found = [a or b for a, b in strings if re.search(r"[A-Z][a-z]+ [a-z]+ |[a-z]+ [a-z]+ [a-z]+", a or b)]
    assert found == ["the server answered ${answer.status}"], "for the console alone"


def test_every_name_of_the_script_stands_in_the_template() -> None:
    template = set(re.findall(r'data-cd="([a-z-]+)"', page.template()))
    used = set(re.findall(r'(?:\$|text)\("([a-z-]+)"', page.script()))
    assert used <= template
    for name in page.SCRIPTS:
        assert len((Path(page.__file__).parent / name).read_text(encoding="utf-8").splitlines()) < 300


def test_shared_holds_nothing_of_one_viewer() -> None:
    assert set(Shared.__dataclass_fields__) == {
        "number", "snapshot", "figures", "map_key", "cells", "running", "open",
    }  # fmt: skip


# -- colours -----------------------------------------------------------------------------------------------

#: Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
SEEN = {
    "everybody": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def lab(hex: str, seen: np.ndarray) -> np.ndarray:
    """CIELAB (D65) of a colour as somebody sees it."""
    srgb = np.array([int(hex[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(seen @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    f = np.cbrt(np.maximum(xyz / [0.9505, 1.0, 1.089], 0.008856))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("theme", [":root", ".dark"])
def test_colours_are_told_apart_with_every_kind_of_colour_vision(theme: str, seen: str) -> None:
    from app.pages.theme import stylesheet

    rules = re.search(rf"^{re.escape(theme)} {{(.*?)}}", stylesheet(), re.M | re.S)
    assert rules is not None
    colours = dict(re.findall(r"(--cr-[a-z0-9]+): (#[0-9a-f]{6})", rules[1]))
    names = ["free", "retained", "r1", "r2", "r3", "r4", "pinned", "mine"]
    points = [lab(colours[f"--cr-{name}"], SEEN[seen]) for name in names]
    for i, a in enumerate(points):
        for j in range(i):
            assert np.linalg.norm(a - points[j]) > 13, (names[i], names[j])
    readers = [point[0] for point in points[2:6]]
    assert readers in (sorted(readers), sorted(readers, reverse=True)), "lightness must rise or fall evenly"


def test_nobody_is_looked_for_a_thousand_times_a_second(runtime: Runtime) -> None:
    """Gradio's queue polls. That these two attributes are what it waits for is read in its own source."""
    from gradio.queueing import Queue

    queue = build_demo(runtime)._queue
    assert "self.sleep_when_free" in inspect.getsource(Queue.start_processing)
    assert "self.progress_update_sleep_when_free" in inspect.getsource(Queue.start_progress_updates)
    assert 0.01 <= queue.sleep_when_free <= 0.05
    assert queue.progress_update_sleep_when_free == 1.0
