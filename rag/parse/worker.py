"""The child process that parses one file: `python -m rag.parse.worker`, a job on stdin, the result on stdout.

It limits itself before it looks at the file: processor time, address space, no writing, no core dump. It
imports no torch and no faiss, so it starts in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from rag.errors import ParseFailed
from rag.parse.types import Limits


def limit_process(limits: Limits) -> None:
    """Apply the limits to this process. Where the system has none (Windows) the parent's clock remains."""
    try:
        import resource
    except ImportError:
        return
    seconds = max(1, int(limits.seconds) + 1)
    for kind, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # some systems refuse single ones
            resource.setrlimit(kind, (value, value))


def run(job: dict[str, Any]) -> dict[str, Any]:
    """{"path", "name", "limits"} -> {"parsed": …} or {"failed": reason, "message": sentence}."""
    from rag.parse.formats import parse

    try:
        with open(job["path"], "rb") as file:
            data = file.read()
        return {"parsed": parse(data, job["name"], Limits(**job["limits"])).to_json()}
    except ParseFailed as error:
        return {"failed": error.reason, "message": error.message}
    except MemoryError:
        return {
            "failed": "memory",
            "message": "Reading the document takes more memory than one document may.",
        }
    except RecursionError:
        return {"failed": "damaged", "message": "The document is nested too deeply to be read."}


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    # Parsers print warnings; the result goes to a descriptor that they don't know.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    limit_process(Limits(**job["limits"]))
    out.write(json.dumps(run(job)).encode("ascii"))
    out.flush()


if __name__ == "__main__":
    main()
