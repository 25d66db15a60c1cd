"""Schemathesis against a served `/v1` and `/api`: `python -m tests.app.try_api [EXAMPLES]`.

Requests are made from the description, valid ones and broken ones; an answer must be one that the description
names, in its form, and never a fault of the server.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_schema_conformance", "response_headers_conformance",
)  # fmt: skip
#: Would start readers that go on for minutes.
_LEFT_OUT = "/api/admin/demo"


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    token: str


@contextmanager
def serving() -> Iterator[Server]:
    """A server in a process of its own (see `serve_fake`)."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.app.serve_fake"], cwd=ROOT, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Server(**json.loads(process.stdout.readline()))
    finally:
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
        process.stdout.close()


def try_everything(server: Server, examples: int) -> tuple[int, str]:
    """The exit status (0: nothing was found) and the report."""
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "run", f"{server.url}/api/openapi.json",
        "--checks", ",".join(CHECKS), "--max-examples", str(examples), "--seed", "1", "--no-color",
        "--phases", "examples,coverage,fuzzing", "--exclude-path", _LEFT_OUT,
        "-H", f"x-coread-token: {server.token}", "--request-timeout", "30",
        "--suppress-health-check", "all",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:  # it keeps what it found beside itself
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=540, check=False)
    return done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    with serving() as started:
        status, report = try_everything(started, int(sys.argv[1]) if len(sys.argv) > 1 else 100)
    print(report)
    raise SystemExit(status)
