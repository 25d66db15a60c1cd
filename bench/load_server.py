"""A real server process for measurements: started as a person starts it, watched from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from app.openai_api import SEARCHING_MODEL
from bench.resident import Resident, resident

START_S = 300.0
#: What uvicorn logs after the application's own shutdown has come to its end.
STOPPED = "Application shutdown complete"


class ServerFailed(Exception):
    """The server did not start, or answered a command with an error; the message says which."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look from outside. `at` in seconds since the server was set up; memory in bytes of the process
    alone; `running` and `queued` are -1 where the server did not say within five seconds."""

    at: float
    memory: Resident
    cpu_s: float
    running: int
    queued: int


class ServerProcess:
    """`coread serve` on a free port over `data_dir`, logging to `log`."""

    def __init__(self, data_dir: Path, log: Path, module: str = "app.cli", **settings: str) -> None:
        self.data_dir, self._log, self._module = data_dir, log, module
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.pool_bytes = 0
        self._began = time.monotonic()

    def start(self, port: int = 0) -> None:
        """Start (0: on a free port); returns once questions can be answered and all documents are ready.

        Raises `ServerFailed`; no process is left then.
        """
        try:
            self._start(port)
        except BaseException:
            if self._process is not None:
                self.kill()
            raise

    def _start(self, port: int) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("COREAD_")}
        environment |= {f"COREAD_{name.upper()}": value for name, value in self._settings.items()}
        command = [sys.executable, "-m", self._module, "serve", "--port", str(port)]
        command += ["--data-dir", str(self.data_dir)]
        with self._log.open("ab") as log:
            offset = self._log.stat().st_size
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        deadline = time.monotonic() + START_S
        self.url = self._announced(offset, deadline)
        while True:
            status = self.status()
            if status.get("state") == "failed":
                raise ServerFailed(f"The server cannot answer: {status.get('detail')}")
            if status.get("state") == "ready" and not status.get("seeding"):
                self.pool_bytes = int(status["pool_bytes"])
                return
            if self.process.poll() is not None:
                raise ServerFailed(f"The server ended with {self.process.returncode} while it loaded.")
            if time.monotonic() > deadline:
                raise ServerFailed(f"The server was not ready within {START_S:g} s: {status}")
            time.sleep(0.5)

    def _announced(self, offset: int, deadline: float) -> str:
        mark = b"Coread listens on "
        while time.monotonic() < deadline:
            text = self._log.read_bytes()[offset:]
            if mark in text and b" (data in" in text.split(mark, 1)[1]:
                return text.split(mark, 1)[1].split(b" ", 1)[0].decode()
            if self.process.poll() is not None:
                raise ServerFailed(f"The server ended: {text[-2_000:].decode('utf-8', 'replace')}")
            time.sleep(0.1)
        raise ServerFailed(f"The server did not open its port within {START_S:g} s.")

    @property
    def process(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerFailed("The server has not been started.")
        return self._process

    def status(self) -> dict[str, Any]:
        """What `/readyz` says; an empty dict where it does not answer within five seconds."""
        try:
            status: dict[str, Any] = httpx.get(f"{self.url}/readyz", timeout=5.0, trust_env=False).json()
        except (httpx.HTTPError, ValueError):
            return {}
        return status

    def model(self) -> str:
        """The bare model's name, as programs ask for it (a health check tells strangers none).

        Raises `ServerFailed` where the server lists none.
        """
        try:
            answer = httpx.get(f"{self.url}/v1/models", timeout=5.0, trust_env=False)
            names = [str(model["id"]) for model in answer.raise_for_status().json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise ServerFailed(f"The server lists no models: {type(error).__name__}: {error}") from error
        bare = [name for name in names if name != SEARCHING_MODEL]
        if not bare:
            raise ServerFailed(f"The server lists no model beside the search: {names}")
        return bare[0]

    def sample(self) -> Sample:
        """Memory and work now."""
        found, status = psutil.Process(self.process.pid), self.status()
        times = found.cpu_times()
        return Sample(
            time.monotonic() - self._began, resident(self.process.pid, self.pool_bytes),
            times.user + times.system,
            int(status.get("running", -1)), int(status.get("queued", -1)),
        )  # fmt: skip

    def check(self) -> dict[str, Any]:
        """All accounts of memory and all stores recomputed by the server itself."""
        token = (self.data_dir / "admin.key").read_bytes().hex()
        headers = {"x-coread-token": token}
        response = httpx.get(f"{self.url}/api/admin/check", headers=headers, timeout=120.0, trust_env=False)
        if response.status_code != 200:
            raise ServerFailed(f"The check answered {response.status_code}: {response.text[:300]}")
        result: dict[str, Any] = response.json()
        return result

    def log_lines(self, *words: str) -> list[str]:
        """Lines of the log that hold any of the words."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return [line[:300] for line in lines if any(word in line for word in words)]

    def ended_well(self, status: int) -> bool:
        """Whether `status`, which `stop` gave, is that of a server that shut down in order: it says so in its
        log, and then ends by the very signal that it was sent, or with 0."""
        text = self._log.read_text(encoding="utf-8", errors="replace")
        return status in (0, -signal.SIGTERM) and STOPPED in text.rsplit("Coread listens on ", 1)[-1]

    def stop(self, timeout: float = 60.0) -> int:
        """End it as an operator does; its exit status (negative where it had to be killed)."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()

    def kill(self) -> None:
        """As a power cut does."""
        self.process.kill()
        self.process.wait()
