"""A server with everything real but the language model and the embedder, for programs in other processes:
`python -m tests.app.serve_fake` prints its address and token, and serves until its input ends."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
import threading
from pathlib import Path

import gradio as gr
import uvicorn

from app.lifecycle import PatientProtocol
from app.runtime import Runtime
from app.server import bind, create_app
from app.settings import load_settings
from tests.app.conftest import FakeParts
from tests.app.small_engine import SmallEngine


def main() -> None:
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        engine = SmallEngine(blocks=600, threaded=True, pause_s=0.002)
        parts = FakeParts(engine)  # type: ignore[arg-type]
        runtime = Runtime(load_settings(data_dir=Path(folder), port=0, answer_tokens=24), parts)
        listener = bind("127.0.0.1", 0)
        runtime.open()
        config = uvicorn.Config(
            create_app(runtime, gr.Blocks()), http=PatientProtocol, log_level="error",
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        server = uvicorn.Server(config)
        threading.Thread(target=lambda: (sys.stdin.read(), setattr(server, "should_exit", True))).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        print(json.dumps({"url": url, "token": runtime.token}), flush=True)
        server.run(sockets=[listener])


if __name__ == "__main__":
    main()
