"""The HTTP server: the page, `/v1`, `/api`, health. The port is bound before any model is loaded."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from app import error_pages
from app.account_pages import account_router
from app.admin_api import admin_router
from app.allocator import few_arenas, give_back_forever
from app.dashboard.routes import FeedMiddleware, dashboard_router
from app.demo_command import demo_router
from app.errors import AppError, PortUnavailable
from app.exports import exports_router
from app.gate import GateMiddleware
from app.lifecycle import freeze_when, patient_protocol, raise_file_limit, sweep_forever
from app.metrics import metrics_router
from app.openai_api import openai_router, unknown_router
from app.openapi import errors, openapi_router
from app.pages.library_files import library_router
from app.people_api import people_router
from app.principal import IdentityMiddleware
from app.request_log import RequestLogMiddleware, configure_logging
from app.runtime import Runtime
from app.security import BodyLimitMiddleware, CookiesMiddleware, HeaderLimitMiddleware, HeadersMiddleware
from app.streams import EventStreams, drop_unfetched_forever
from app.watchdog import watch_engine

if TYPE_CHECKING:
    import gradio as gr

log = logging.getLogger("coread")
#: A `/v1` request: more than any model reads, however it is escaped.
MAX_MESSAGES_BYTES = 8 * 2**20
#: Python's threads take turns of so many seconds. A page's request takes dozens of turns, and at Python's own
#: 5 ms each waits that long behind the engine's thread and those that build prompts.
TURN_S = 0.0005
#: Threads for what would hold up the event loop. Python's own number (CPUs + 4) lets a few prompts that are
#: being built hold up every page.
THREADS = 24


def bind(host: str, port: int) -> socket.socket:
    """A listening socket, so that a visitor waits for the page instead of being refused.

    Raises `PortUnavailable` with one sentence that says what to do.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror:
        raise PortUnavailable(f"The host {host!r} cannot be resolved; set COREAD_HOST.") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(512)
    except OSError as error:
        listener.close()
        reason = {
            errno.EADDRINUSE: "is in use by another program",
            errno.EACCES: "needs more rights than this user has",
            errno.EADDRNOTAVAIL: "is not an address of this machine",
        }.get(error.errno or 0, f"cannot be opened ({error.strerror})")
        raise PortUnavailable(f"{host}:{port} {reason}; choose another with --port or COREAD_PORT.") from None
    listener.setblocking(False)
    return listener


def create_app(runtime: Runtime, demo: gr.Blocks, alone: bool = False) -> FastAPI:
    """The application over an opened runtime; starting it starts the loading of the models. `alone`: the
    process serves nothing else, so what is there once they are loaded is there for good."""
    import gradio as gr

    from app.gradio_sessions import keep_little, sweep_sessions_forever
    from app.pages.theme import make_theme, stylesheet
    from app.pages.words_page import LanguageMiddleware

    streams = EventStreams()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        workers = ThreadPoolExecutor(THREADS, thread_name_prefix="coread-work")
        asyncio.get_running_loop().set_default_executor(workers)
        runtime.start()
        chores = [
            asyncio.create_task(sweep_forever(runtime.upload_dir), name="coread-sweep"),
            asyncio.create_task(watch_engine(runtime), name="coread-watchdog"),
            asyncio.create_task(drop_unfetched_forever(demo, streams), name="coread-unfetched"),
            asyncio.create_task(sweep_sessions_forever(demo, streams), name="coread-sessions"),
            asyncio.create_task(give_back_forever(), name="coread-memory"),
        ]
        if alone:
            chores.append(asyncio.create_task(freeze_when(runtime.wait_ready()), name="coread-freeze"))
        try:
            yield
        finally:
            for chore in chores:
                chore.cancel()
            await runtime.stop()

    app = FastAPI(title="Coread", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    error_pages.install(app)
    app.include_router(dashboard_router(runtime), responses=errors())
    programs, described = openai_router(runtime), openapi_router(runtime, app)
    app.include_router(programs, responses=errors())
    app.include_router(admin_router(runtime), responses=errors())
    app.include_router(people_router(runtime), responses=errors())
    app.include_router(account_router(runtime))
    app.include_router(metrics_router(runtime), responses=errors())
    app.include_router(demo_router(runtime), responses=errors())
    app.include_router(exports_router(runtime))
    app.include_router(library_router(runtime))
    _add_health(app, runtime)
    app.include_router(described)
    app.include_router(unknown_router([*programs.routes, *described.routes]))
    mounted: FastAPI = gr.mount_gradio_app(
        app,
        demo,
        path="",
        theme=make_theme(),
        css=stylesheet(),
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        ssr_mode=False,
        show_error=False,
        max_file_size=runtime.settings.max_upload_bytes,
        app_kwargs={
            "docs_url": None,
            "redoc_url": None,
            "openapi_url": None,
            "exception_handlers": error_pages.gradio_handlers(),
        },
    )
    # Gradio looks where a file that a client names lies only once this is set, which its own `launch` does.
    demo.has_launched = True
    keep_little(demo)
    mounted.add_middleware(LanguageMiddleware)
    mounted.add_middleware(IdentityMiddleware, signer=runtime.signer)
    mounted.add_middleware(
        GateMiddleware,
        runtime=runtime,
        streams=streams,
        components=frozenset(demo.blocks),
        events=frozenset(number for number, event in demo.fns.items() if event.fn is not None),
    )
    mounted.add_middleware(
        BodyLimitMiddleware, limit=runtime.settings.max_body_bytes, smaller={"/v1": MAX_MESSAGES_BYTES}
    )
    mounted.add_middleware(error_pages.FaultsMiddleware)
    mounted.add_middleware(HeadersMiddleware, on_space=bool(os.environ.get("SPACE_ID")))
    mounted.add_middleware(RequestLogMiddleware)
    mounted.add_middleware(FeedMiddleware, runtime=runtime)
    mounted.add_middleware(CookiesMiddleware)
    mounted.add_middleware(HeaderLimitMiddleware)
    return mounted


def _add_health(app: FastAPI, runtime: Runtime) -> None:
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz(request: Request) -> JSONResponse:
        """200 once questions can be answered, 503 until then. What runs here, and the reason, is for those
        who may see the server's figures."""
        status = runtime.status()
        try:
            runtime.access.require_watcher(request)
        except AppError:
            status = {"state": status["state"]}
        return JSONResponse(status, status_code=200 if runtime.ready else 503)


def serve(runtime: Runtime, demo: gr.Blocks | None = None, announce: str = "") -> None:
    """Bind, open the data directory, then serve until a signal. Blocks. `announce`: one more line to print.

    Raises `PortUnavailable`, `DataDirUnusable` or `DataDirLocked` before anything is loaded.
    """
    settings = runtime.settings
    configure_logging(settings.log_level, settings.log_format)
    files = raise_file_limit()
    few_arenas()
    sys.setswitchinterval(TURN_S)
    listener = bind(settings.host, settings.port)
    try:
        data_dir = runtime.open()
        port = listener.getsockname()[1]
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)
        url = f"http://{shown}:{port}"
        runtime.announce(url)
        print(
            f"Coread listens on {url} (data in {data_dir}); the page says when it has warmed up.", flush=True
        )
        if announce:
            print(announce, flush=True)
        # Gradio's copies of uploads lie where only this user can look, and are gone after a restart.
        os.environ["GRADIO_TEMP_DIR"] = str(runtime.upload_dir)
        runtime.prepare()
        if demo is None:
            from app.pages.build import build_demo

            demo = build_demo(runtime)
        config = uvicorn.Config(
            create_app(runtime, demo, alone=True),
            log_level=settings.log_level,
            access_log=False,
            proxy_headers=True,
            timeout_graceful_shutdown=5,
            http=patient_protocol(files),
            log_config=None,
            h11_max_incomplete_event_size=64 * 1024,
        )
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        listener.close()
