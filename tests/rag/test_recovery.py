"""kill -9 between any two steps: what was reported ready is there, what was reported deleted is not, and
every store agrees."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rag.library import Library
from tests.rag.conftest import HashEmbedder

ROOT = Path(__file__).parents[2]

# Each write transaction, file operation and index change is a step; the process ends itself before the given
# one (or after the last), without any clean-up.
SCRIPT = """
import json, os, signal, sys
from rag import database, datadir, indexes, ingest
from rag.library import Library
from rag.parse.formats import parse
from rag.parse.types import Limits
from tests.rag.conftest import HashEmbedder
count = 0
armed = False
last, when = 0, "never"

def step(owner, name):
    real = getattr(owner, name)
    def wrapped(*args, **kwargs):
        global count
        if not armed:
            return real(*args, **kwargs)
        count += 1
        mine = count
        if mine == last and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if mine == last and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(owner, name, wrapped)

# Parsing in this process: its child would only cost time here.
ingest.parse_file = lambda path, name, *rest: parse(path.read_bytes(), name, Limits())
for owner, name in ((database.Database, "write_sync"), (datadir.DataDir, "store"), (ingest, "parse_file"),
                    (datadir.DataDir, "remove"), (indexes.Indexes, "changed")):
    step(owner, name)

def scenario(folder):
    global armed
    log = os.open(folder + ".said", os.O_CREAT | os.O_WRONLY)

    def say(*words):
        os.write(log, (" ".join(words) + "\\n").encode())

    library = Library.open(folder, HashEmbedder(), threads=1)
    library.create_collection("c", "me", "c")
    old = library.add_document("c", "old.md", b"An old note about lanterns.", "me")
    library.wait(old)
    say("ready", old)
    armed = True
    one = library.add_document("c", "one.md", b"# One\\n\\nThe first note about ferries.", "me")
    say("added", one)
    library.wait(one)
    say("ready", one)
    library.replace_document(one, "one.md", b"# One\\n\\nThe second version about ferries.", "me")
    library.wait(one)
    say("replaced", one)
    library.delete_document(old)
    say("deleted", old)
    armed = False
    say("steps", str(count))
    library.close(all=True)

def run(folder, step, moment):
    # In a child of its own: imports are paid for once, and no thread exists yet when it is made.
    global last, when
    last, when = step, moment
    child = os.fork()
    if not child:
        try:
            scenario(folder)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

base = sys.argv[1]
results = {"whole": run(f"{base}/whole", 0, "never")}
said = dict(line.split() for line in open(f"{base}/whole.said"))
for step_number in range(1, int(said["steps"]) + 1):
    results[f"{step_number}"] = run(f"{base}/{step_number}", step_number, "before")
results["last"] = run(f"{base}/last", int(said["steps"]), "after")
print(json.dumps(results))
"""


def assert_sound(folder: Path, said: dict[str, str]) -> None:
    library = Library.open(folder, HashEmbedder())
    try:
        infos = library.documents({"c"})
        for info in infos:
            assert library.wait(info.id, 60).status == "ready"
        report = library.check()
        assert report.problems == ()
        present = {info.id for info in infos}
        if "added" in said:
            assert said["added"] in present
        if "deleted" in said:
            assert said["deleted"] not in present
        hits = library.search("note lanterns ferries version", {"c"}, 10)
        assert {h.document_id for h in hits} == present
        for hit in hits:
            assert library.document(hit.document_id, {"c"}).text[hit.start : hit.end] == hit.text
        if "replaced" in said:
            assert "second version" in library.document(said["replaced"], {"c"}).text
    finally:
        library.close(all=True)


@pytest.mark.slow
def test_kill_9_between_any_two_steps(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    results = json.loads(ended.stdout)
    assert len(results) > 12
    for name, code in results.items():
        assert code == (0 if name == "whole" else -9), name
        said = dict(line.split() for line in (tmp_path / f"{name}.said").read_text().splitlines())
        assert_sound(tmp_path / name, said)
