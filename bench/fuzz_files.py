"""Damaged and hostile files of every format, uploaded: `python -m bench.fuzz_files [--files 500] [--json]`.

Each file goes through the library that serves, child process and all, with an embedder of hashed words. What
counts as a fault: a file that is neither ready nor failed with a reason; "internal", which is what an error
that nobody foresaw becomes, and a reader that ended without an answer, which is what becomes of one in the
child process; a ready document without text, passages or whole sections, with text that no passage holds, or
with text of a file of the server's own; a failed one of which anything can be read or found, or whose message
names the server's paths; a file that takes longer than the clock of a job allows; stores that disagree at the
end; a child process or a file left behind; a library that does not close.

The files are the same for the same `--seed`: every hostile one (`bench/fuzz_corpus.py`) once, the rest sound
ones that were truncated, flipped, overwritten, spliced, doubled or renamed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.fuzz_corpus import IN_FRONT, NAME_A_FILE, harmful, sound
from bench.word_embedder import WordEmbedder
from rag.errors import DuplicateDocument, NotFound, UploadRefused
from rag.library import Library
from rag.parse.types import Limits

#: Reasons that the parsers give on purpose, "too long" and the like. "crashed" and "internal" are not here.
REASONS = frozenset({
    "no text", "encoding", "not text", "not supported", "damaged", "encrypted", "too long", "too many pages",
    "time", "memory",
})  # fmt: skip
#: What a busy machine adds to a job's clock: start of the child, splitting, and indexing of each passage.
GRACE_S, PASSAGE_S = 30.0, 0.02
READABLE = frozenset({"fuzz"})
#: In the message of a reader that ended without one (`rag.parse.client`).
GAVE_UP = "gave up on the file"
#: What only the server knows and a person who uploads a file must not be told.
INSIDE = ("Traceback", 'File "', str(Path(__file__).resolve().parents[1]), sys.prefix)


@dataclass(frozen=True, slots=True)
class Case:
    """One file; `kind` says what was done to it."""

    kind: str
    name: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of it: "ready", "refused", "duplicate", "raised", "hangs", or the reason why it failed."""

    kind: str
    name: str
    size: int
    result: str
    seconds: float
    faults: tuple[str, ...]


def cases(count: int, seed: int = 1) -> Iterator[Case]:
    """`count` files: of each hostile kind one, at most half of all, then changed sound ones."""
    chance = random.Random(seed)
    builders = list(harmful().items())
    chance.shuffle(builders)
    builders = builders[: max(1, count // 2)]
    for kind, build in builders:
        name, data = build()
        yield Case(kind, name, data)
    whole = sound()
    for number in range(len(builders), count):
        # Every format gets its share, whatever the seed.
        name, data = whole[number % len(whole)]
        yield _changed(chance, name, data, whole)


def _changed(chance: random.Random, name: str, data: bytes, others: list[tuple[str, bytes]]) -> Case:
    kind = chance.choice(["truncated", "flipped", "overwritten", "spliced", "doubled", "renamed", "cut out"])
    position = chance.randrange(1, len(data))
    if kind == "truncated":
        data = data[:position]
    elif kind == "flipped":
        changed = bytearray(data)
        for _ in range(chance.randrange(1, 60)):
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        data = bytes(changed)
    elif kind == "overwritten":
        length = chance.choice([1, 4, 64, 1024])
        junk = chance.choice([bytes(length), b"\xff" * length, chance.randbytes(length)])
        data = data[:position] + junk + data[position + length :]
    elif kind == "spliced":
        _, other = chance.choice(others)
        data = data[:position] + other[chance.randrange(len(other)) :]
    elif kind == "doubled":
        end = chance.randrange(position, len(data))
        data = data[:end] + data[position:end] * chance.choice([2, 50, 2_000]) + data[end:]
    elif kind == "cut out":
        data = data[: position // 2] + data[position:]
    if kind == "renamed" or chance.random() < 0.1:
        name = chance.choice(others)[0]
    return Case(kind, name, data)


def upload(library: Library, case: Case, limits: Limits) -> Outcome:
    """Upload one file, wait for its end and look at what is left of it."""
    started = time.monotonic()

    def outcome(result: str, *faults: str, passages: int = 0) -> Outcome:
        seconds = time.monotonic() - started
        if seconds > limits.seconds + GRACE_S + passages * PASSAGE_S:
            faults += (f"took {seconds:.0f} s",)
        return Outcome(case.kind, case.name, len(case.data), result, seconds, faults)

    try:
        id = library.add_document("fuzz", case.name, case.data, "fuzz")
    except UploadRefused:
        return outcome("refused")
    except DuplicateDocument:
        return outcome("duplicate")
    except Exception as error:  # nobody who uploads a file could make sense of it
        return outcome("raised", f"raised {error!r}"[:300])
    try:
        info = library.wait(id, limits.seconds + 4 * GRACE_S)
    except TimeoutError:
        library.cancel_document(id)  # the next file gets its chance
        return outcome("hangs", "neither ready nor failed")
    if info.status == "ready":
        return outcome("ready", *_ready_faults(library, id, case), passages=info.passages)
    faults = [] if info.reason in REASONS and info.message else [f"failed with {info.reason!r}"]
    if info.version or info.passages:
        faults.append("failed and half there")
    try:
        library.document(id, READABLE)
        faults.append("failed and readable")
    except NotFound:
        pass
    message = info.message or ""
    if GAVE_UP in message:
        faults.append(f"the reader ended without an answer: {message}")
    if inside := [x for x in (*INSIDE, str(library.data_dir.path)) if x in message]:
        faults.append(f"the message names {inside}")
    return outcome(str(info.reason), *faults)


def _ready_faults(library: Library, id: str, case: Case) -> list[str]:
    document, info = library.document(id, READABLE), library.info(id, READABLE)
    faults: list[str] = []
    if not document.text.strip() or not info.passages:
        faults.append("ready and empty")
    if "\0" in document.text or document.text.count("\ufffd") > 0.01 * len(document.text) + 1:
        faults.append("ready and undecoded")
    if case.kind in NAME_A_FILE and document.text.strip() != IN_FRONT:
        faults.append("ready with what another file holds")
    ends = [0, *(section.end for section in document.sections)]
    starts = [*(section.start for section in document.sections), len(document.text)]
    if ends != starts:
        faults.append("sections do not cover the text")
    if left := _unheld(library, id, document.text, [section.title for section in document.sections]):
        faults.append(f"{left:,} characters that no passage holds")
    return faults


def _unheld(library: Library, id: str, text: str, titles: list[str]) -> int:
    """Characters of the text, blanks left out, that no search could find: they stand in no passage, and not
    as the heading of sections below, which is searched with each of their passages."""
    above = {part for title in titles for part in title.split(" › ")[:-1]}
    spans = library.database.read_sync(
        lambda c: c.execute(
            "SELECT p.start, p.stop FROM passages p JOIN documents d ON d.key = p.document WHERE d.id = ? "
            "ORDER BY p.start",
            (id,),
        ).fetchall()
    )
    left, held = 0, 0
    for start, stop in [*spans, (len(text), len(text))]:
        lines = text[held:start].splitlines() if start > held else []
        left += sum(len("".join(line.split())) for line in lines if line.strip("# \t") not in above)
        held = max(held, stop)
    return left


def run(folder: Path, files: int, seed: int = 1, limits: Limits | None = None) -> dict[str, Any]:
    """Upload them one after another: `files`, `results` (reason -> number), `faults`, `slowest`."""
    limits = limits or Limits(seconds=20.0)
    outcomes: list[Outcome] = []
    before = psutil.Process().children(recursive=True)
    with _temporary(folder / "tmp"):
        library = Library.open(folder / "data", WordEmbedder(), parse_limits=limits)
        try:
            library.create_collection("Fuzz", "fuzz", "fuzz")
            for case in cases(files, seed):
                outcome = upload(library, case, limits)
                outcomes.append(outcome)
                if outcome.faults:
                    print(f"{outcome.kind} ({outcome.name}): {', '.join(outcome.faults)}", file=sys.stderr)
            ready = {d.id for d in library.documents(READABLE) if d.status == "ready"}
            faults = [f"{o.kind} ({o.name}): {fault}" for o in outcomes for fault in o.faults]
            hits = library.search("ferry Kittiwake words page", READABLE, 200)
            if ready and not hits:
                faults.append("nothing is found")
            if found := {hit.document_id for hit in hits} - ready:
                faults.append(f"found though not ready: {sorted(found)}")
            faults += library.check().problems
        finally:
            closed = _close(library)
        if not closed:
            faults.append(f"the library does not close within {GRACE_S:g} s")
        faults += left_behind(folder, before)
    hostile = frozenset(harmful())
    slowest = sorted(outcomes, key=lambda o: -o.seconds)[:5]
    return {
        "files": len(outcomes),
        "seed": seed,
        "results": dict(Counter(o.result for o in outcomes).most_common()),
        "hostile": {o.kind: o.result for o in outcomes if o.kind in hostile},
        "faults": faults,
        "slowest": [{"kind": o.kind, "seconds": round(o.seconds, 1), "result": o.result} for o in slowest],
    }


@contextmanager
def _temporary(folder: Path) -> Iterator[None]:
    """Have temporary files made there, where what is left can be told from other people's."""
    folder.mkdir(parents=True)
    kept, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = kept


def left_behind(folder: Path, before: list[psutil.Process]) -> list[str]:
    """Child processes that were not there before, and files where none should be."""
    children = [p for p in psutil.Process().children(recursive=True) if p not in before]
    faults = [f"process {p.pid} is left" for p in children]
    for place in (folder / "tmp", folder / "data" / "tmp"):
        faults += [f"{path.relative_to(folder)} is left" for path in sorted(place.iterdir())]
    known = {"data", "tmp"}
    return faults + [f"{path.name} has appeared" for path in folder.iterdir() if path.name not in known]


def _close(library: Library) -> bool:
    """Whether it closes: where a job hangs in this process it would be waited for without an end."""
    closing = threading.Thread(target=library.close, kwargs={"all": True}, daemon=True)
    closing.start()
    closing.join(GRACE_S)
    return not closing.is_alive()


def main() -> None:
    """The command; exit status 1 where there was a fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="coread-fuzz-") as folder:
        result = run(Path(folder), options.files, options.seed)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print(f"{result['files']} files: " + ", ".join(f"{n} {r}" for r, n in result["results"].items()))
        print("slowest: " + "; ".join(f"{s['kind']} {s['seconds']} s" for s in result["slowest"]))
        print("\n".join(result["faults"]) or "no faults")
    sys.exit(1 if result["faults"] else 0)


if __name__ == "__main__":
    main()
