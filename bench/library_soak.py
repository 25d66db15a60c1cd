"""Uploads, searches and deletions at once, killed at random moments: `python -m bench.library_soak [--json]`.

Ten people upload 200 documents each at the same time, read them, replace some and delete some, while others
search. A child process does it and writes down what the library said; this process kills it (kill -9) at
random moments and starts it again, until all the work is done. Then everything is compared: what was reported
ready is there with its text and is found, what was reported deleted is nowhere, what was replaced has its new
text, and SQLite, vector index, lexical index and files agree.

The embedder is one of hashed words (`bench/word_embedder.py`): a real one would take an hour on one core and
is not what is tested. Parsing runs in its child processes, as it always does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.word_embedder import WordEmbedder
from rag.errors import DuplicateDocument, NotFound
from rag.library import Library

ROOT = Path(__file__).resolve().parents[1]
COLLECTION = "soak"
READABLE = frozenset({COLLECTION})
#: Until a document must be ready or failed, behind those of nine others.
READY_S = 300.0
#: Until a reader whose library was killed has ended by its own clock (`rag.parse.types.Limits.seconds`).
ORPHAN_S = 90.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is done. Seconds between two kills are drawn evenly from `kill_after_s`."""

    people: int = 10
    documents: int = 200
    searchers: int = 2
    kills: int = 40
    kill_after_s: tuple[float, float] = (1.0, 12.0)
    seed: int = 1
    #: Of the whole run; a fault where it is not done by then.
    timeout_s: float = 3_600.0


class Log:
    """What the library has said so far, a line each, on disk before anything else is done."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def say(self, word: str, id: str = "-") -> None:
        os.write(self._file, f"{word} {id}\n".encode())

    @staticmethod
    def read(path: Path) -> dict[str, set[str]]:
        """Word -> ids of which it was said."""
        said: dict[str, set[str]] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            word, id = line.split()
            said.setdefault(word, set()).add(id)
        return said


def content(person: int, number: int, version: int = 1) -> tuple[str, bytes]:
    """(name, file) of one document; the word `token` stands in no other document or version."""
    words = random.Random(f"{person}-{number}-{version}")
    lines = [f"About {token(person, number, version)}."]
    lines += [f"Line {n}: the harbour of berth {words.randrange(10_000)} has a crane." for n in range(30)]
    text = "\n\n".join(lines[: words.randrange(2, 31)])
    kind = number % 4
    if kind == 0:
        return f"{number}.md", f"# Note {person}-{number}\n\n{text}\n\n## More\n\nThe end.".encode()
    if kind == 1:
        return f"{number}.html", f"<html><body><h1>Note</h1><p>{text}</p></body></html>".encode()
    if kind == 2:
        return f"{number}.csv", ("name,what\n" + "\n".join(f"{i},{x}" for i, x in enumerate(lines))).encode()
    return f"{number}.txt", text.encode("utf-16")


def token(person: int, number: int, version: int) -> str:
    return f"kestrel{person}x{number}v{version}"


def document_id(person: int, number: int) -> str:
    return f"d-{person}-{number}"


def deletes(number: int) -> bool:
    return number % 5 == 4


def replaces(number: int) -> bool:
    return number % 7 == 3 and not deletes(number)


def work(folder: Path, plan: Plan) -> None:
    """The child: do what the log does not say is done."""
    path = folder / "said"
    before = Log.read(path)
    log = Log(path)
    library = Library.open(folder / "data", WordEmbedder())
    library.create_collection("Soak", "soak", COLLECTION)
    log.say("open")
    errors: list[BaseException] = []
    deleted = set(before.get("deleted", ()))
    done = threading.Event()

    def guarded(work: Callable[[int], None]) -> Callable[[int], None]:
        def run(n: int) -> None:
            try:
                work(n)
            except BaseException as error:
                errors.append(error)
                log.say("error", "_".join(repr(error).split())[:300])

        return run

    def person(n: int) -> None:
        for number in range(plan.documents):
            id = document_id(n, number)
            if id in before.get("finished", ()):
                continue
            if id not in before.get("deleting", ()):
                if id not in before.get("added", ()):
                    _add(library, log, n, number)
                _wait_ready(library, log, id)
                log.say("ready", id)
            if replaces(number):
                log.say("replacing", id)
                name, data = content(n, number, 2)
                with suppress(DuplicateDocument):  # it may have happened before the last kill
                    library.replace_document(id, name, data, "soak")
                _wait_ready(library, log, id)
                log.say("replaced", id)
            if deletes(number):
                log.say("deleting", id)
                with suppress(NotFound):  # likewise
                    library.delete_document(id)
                deleted.add(id)
                log.say("deleted", id)
            log.say("finished", id)

    def search(n: int) -> None:
        chance = random.Random(n)
        while not done.is_set():
            gone = set(deleted)
            words = token(chance.randrange(plan.people), chance.randrange(plan.documents), 1)
            for hit in library.search(f"harbour crane berth {words}", READABLE, 20):
                if hit.document_id in gone:
                    raise AssertionError(f"{hit.document_id} was found after it was deleted")
                try:
                    document = library.document(hit.document_id, READABLE)
                except NotFound:
                    continue  # deleted since
                if document.version == hit.version and document.text[hit.start : hit.end] != hit.text:
                    raise AssertionError(f"{hit.document_id} has another text than was found")

    people = [threading.Thread(target=guarded(person), args=(n,)) for n in range(plan.people)]
    searchers = [threading.Thread(target=guarded(search), args=(n,)) for n in range(plan.searchers)]
    for thread in people + searchers:
        thread.start()
    for thread in people:
        thread.join()
    done.set()
    for thread in searchers:
        thread.join()
    library.close(all=True)
    if not errors:
        log.say("all")


def _add(library: Library, log: Log, person: int, number: int) -> None:
    id = document_id(person, number)
    name, data = content(person, number)
    with suppress(DuplicateDocument):  # likewise
        library.add_document(COLLECTION, name, data, "soak", document_id=id)
    log.say("added", id)


def _wait_ready(library: Library, log: Log, id: str) -> None:
    """What was read while the process was killed three times is given up, as it is meant to be: whoever has
    uploaded it asks for it again. No other failure is in order, of a first version or of a second."""
    while True:
        try:
            info = library.wait(id, READY_S)
        except TimeoutError as error:
            raise AssertionError(f"{id} is neither ready nor failed after {READY_S:g} s") from error
        if info.reason != "crashed":
            break
        log.say("given-up", id)
        library.retry_document(id)
    if info.status != "ready" or info.reason:
        raise AssertionError(f"{id} {info.status}: {info.reason} {info.message}")


def run(folder: Path, plan: Plan) -> dict[str, Any]:
    """Work, kill, start again, until all is done; then compare. `faults` is empty where nothing was lost."""
    chance = random.Random(plan.seed)
    kills = 0
    starts = 0
    caught: list[dict[str, int]] = []
    began = time.monotonic()
    until = began + plan.timeout_s
    while "all" not in (said := Log.read(folder / "said")):
        if said.get("error"):
            return {"faults": sorted(said["error"]), "kills": kills}
        if time.monotonic() >= until:
            return {"faults": [f"not done after {plan.timeout_s:.0f} s"], "kills": kills}
        opens = _count(folder / "said", "open -")
        starts += 1
        with _child(folder, plan) as child:
            early = chance.random() < 0.2  # now and then while it starts, else in the middle of the work
            while (
                not early
                and child.poll() is None
                and _count(folder / "said", "open -") == opens
                and time.monotonic() < until
            ):
                time.sleep(0.02)
            patience = max(0.0, until - time.monotonic())
            if kills < plan.kills:
                after = chance.uniform(0.5, 3.0) if early else chance.uniform(*plan.kill_after_s)
                patience = min(after, patience)
            try:
                code = child.wait(patience)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                kills += 1
                now = Log.read(folder / "said")
                caught.append({word: len(now.get(word, ())) for word in ("added", "ready", "deleted")})
                continue
        if code != 0:
            return {"faults": [f"the child ended with {code}"], "kills": kills}
    seconds = time.monotonic() - began
    orphans = [f"a reader ({pid}) outlives its library" for pid in _orphans(folder)]
    result = compare(folder, plan)
    if result["given_up"] and kills < 3:
        result["faults"].append(f"{result['given_up']} were given up after {kills} kills; it takes three")
    if plan.kills and not kills:
        result["faults"].append("the work was done before anything was killed: nothing is shown")
    result["faults"] += orphans
    return {
        "plan": asdict(plan), "kills": kills, "starts": starts, "seconds": seconds, "killed_when": caught,
        **result,
    }  # fmt: skip


@contextmanager
def _child(folder: Path, plan: Plan) -> Iterator[subprocess.Popen[bytes]]:
    """The process that works; it does not outlive this one, whatever happens here."""
    temporary = folder / "tmp"  # what a killed process leaves there goes with the rest
    temporary.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "bench.library_soak"]
    command += ["--work", str(folder), "--plan", json.dumps(asdict(plan))]
    child = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "TMPDIR": str(temporary)})
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def _orphans(folder: Path) -> list[int]:
    """Readers of killed libraries that have not ended by `ORPHAN_S`: each works in a folder of its own."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if Path(process.cwd()).is_relative_to((folder / "tmp").resolve()):
                found.append(process)
    _, alive = psutil.wait_procs(found, timeout=ORPHAN_S)
    return [process.pid for process in alive]


def _count(path: Path, line: str) -> int:
    return path.read_text(encoding="utf-8").count(line + "\n") if path.exists() else 0


def compare(folder: Path, plan: Plan) -> dict[str, Any]:
    """What was said against what is there."""
    said = Log.read(folder / "said")
    ready, deleted = said.get("ready", set()), said.get("deleted", set())
    faults: list[str] = []
    library = Library.open(folder / "data", WordEmbedder())
    try:
        infos = {info.id: info for info in library.documents(READABLE)}
        expected = ready - said.get("deleting", set())
        everything = {document_id(p, n) for p in range(plan.people) for n in range(plan.documents)}
        faults += [f"{id} was never reported ready" for id in sorted(everything - ready)]
        faults += [f"{id} was reported ready and is gone" for id in sorted(expected - infos.keys())]
        faults += [f"{id} was reported deleted and is there" for id in sorted(deleted & infos.keys())]
        faults += [f"{id} is there and was never reported" for id in sorted(infos.keys() - expected)]
        for id in sorted(expected & infos.keys()):
            _, person, number = id.split("-")
            replaced = replaces(int(number))
            mine = token(int(person), int(number), 2 if replaced else 1)
            if infos[id].status != "ready" or infos[id].version < (2 if replaced else 1):
                faults.append(f"{id} is {infos[id].status}, version {infos[id].version}")
            elif mine not in library.document(id, READABLE).text:
                faults.append(f"{id} has another text")
            elif [hit.document_id for hit in library.search(mine, READABLE, 1)] != [id]:
                faults.append(f"{id} is not found by its own word")
        report = library.check()
        faults += report.problems
        if report.files != len(expected):
            faults.append(f"{report.files} files for {len(expected)} documents")
    finally:
        library.close(all=True)
    return {
        "documents": report.documents,
        "passages": report.passages,
        "files": report.files,
        "deleted": len(deleted),
        "replaced": len(said.get("replaced", ())),
        "given_up": len(said.get("given-up", ())),
        "faults": faults,
    }


def main() -> None:
    plan = Plan()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--people", type=int, default=plan.people)
    parser.add_argument("--documents", type=int, default=plan.documents)
    parser.add_argument("--kills", type=int, default=plan.kills)
    parser.add_argument("--seed", type=int, default=plan.seed)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, Plan(**json.loads(options.plan)))
        return
    if min(options.people, options.documents) < 1 or options.kills < 0:
        parser.error("--people and --documents must be at least 1, --kills at least 0")
    plan = Plan(people=options.people, documents=options.documents, kills=options.kills, seed=options.seed)
    with tempfile.TemporaryDirectory(prefix="coread-soak-") as folder:
        result = run(Path(folder), plan)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print("; ".join(f"{k} {v}" for k, v in result.items() if k not in ("plan", "killed_when", "faults")))
        print("\n".join(result["faults"]) or "no faults")
    sys.exit(1 if result["faults"] else 0)


if __name__ == "__main__":
    main()
