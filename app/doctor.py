"""`coread doctor`: what was found on this machine, and what to do about what is missing.

Takes no lock, so it also runs beside a server, and then reports that server's engine. Otherwise it loads the
model and checks it, which is the only honest way to say that it works.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import httpx
import psutil

from app.data_dir import admin_token, resolve_data_dir
from app.errors import AppError
from app.render import size
from app.runtime import engine_json
from app.settings import Settings
from engine.errors import EngineError
from rag.datadir import read_holder
from rag.errors import RagError

_PACKAGES = ("coread", "torch", "transformers", "gradio", "faiss-cpu", "sentence-transformers", "triton")
_ENGINE_KEYS = (
    "model",
    "device",
    "dtype",
    "backend",
    "max_context",
    "block_size",
    "total_blocks",
    "pool_bytes",
    "conformance",
    "description",
)


def examine(settings: Settings) -> dict[str, Any]:
    """Keys: `versions`, `machine`, `data_dir`, `server`, `library` (None where nothing is stored yet),
    `engine`, `embedder`, `reranker` (None where none is set), `problems` (sentences that say what to do;
    empty means that all is well)."""
    problems: list[str] = []
    path, server = None, None
    try:
        path = resolve_data_dir(settings.data_dir)
        server = _server(path, read_holder(path).get("url"))
    except AppError as error:
        problems.append(str(error))
    report: dict[str, Any] = {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "machine": {
            "system": platform.platform(),
            "cpus": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "available_bytes": psutil.virtual_memory().available,
        },
        "data_dir": str(path) if path else None,
        "server": server,
        "library": _library(path, problems),
        "engine": _engine(settings, server, problems),
        "embedder": _embedder(settings, problems),
        "reranker": _reranker(settings, problems),
        "problems": problems,
    }
    return report


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _engine(settings: Settings, server: dict[str, Any] | None, problems: list[str]) -> dict[str, Any]:
    """The running server's engine, or one that is loaded, checked and given back here."""
    if server is not None and server.get("state") == "ready":
        return {key: server.get(key) for key in _ENGINE_KEYS}
    from engine.service import EngineService

    service = EngineService(settings.engine_config())
    service.start()
    try:
        service.wait_ready_sync()
        return engine_json(service.status())
    except EngineError as error:
        problems.append(str(error))
        return {"model": settings.model, "error": str(error)}
    finally:
        service.stop()


def _library(path: Path | None, problems: list[str]) -> dict[str, Any] | None:
    """Whether the stores of documents agree, read beside whoever owns them."""
    from rag.check import check_folder

    try:
        report = check_folder(path) if path is not None else None
    except RagError as error:  # a broken database must not hide the rest of the report
        problems.append(str(error))
        return {"error": str(error)}
    if report is None:
        return None
    if report.problems:
        problems += report.problems
        problems.append("`coread reindex` rebuilds what is derived from the stored texts.")
    return {"documents": report.documents, "passages": report.passages, "files": report.files}


def _embedder(settings: Settings, problems: list[str]) -> dict[str, Any]:
    from rag.embed import resolve_model

    try:
        return {"model": settings.embedder, "source": resolve_model(settings.embedder)}
    except RagError as error:
        problems.append(str(error))
        return {"model": settings.embedder, "error": str(error)}


def _reranker(settings: Settings, problems: list[str]) -> dict[str, Any] | None:
    """Loaded, which is the only way to know that it is a cross-encoder."""
    if settings.reranker == "none":
        return None
    from rag.rerank import CrossReranker

    try:
        CrossReranker(settings.reranker).load().result()
    except RagError as error:
        problems.append(str(error))
        return {"model": settings.reranker, "error": str(error)}
    return {"model": settings.reranker}


def _server(data_dir: Path, url: object) -> dict[str, Any] | None:
    if not isinstance(url, str):
        return None
    try:
        headers = {"x-coread-token": admin_token(data_dir)}
        answer = httpx.get(f"{url}/readyz", headers=headers, timeout=3.0, trust_env=False)
        said = answer.json()
    except (httpx.HTTPError, ValueError):
        return None  # left behind by a server that was killed
    # By now another program may listen there, which knows nothing of the token.
    return {"url": url, **said} if isinstance(said, dict) and {"state", "detail"} <= said.keys() else None


def _counts(library: dict[str, Any] | None) -> str:
    if not library:
        return "nothing is stored yet"
    return library.get("error") or ", ".join(f"{n:,} {what}" for what, n in library.items())


def lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    machine, engine, embedder = report["machine"], report["engine"], report["embedder"]
    versions = ", ".join(f"{name} {version or 'missing'}" for name, version in report["versions"].items())
    server = report["server"]
    out = [
        f"versions   {versions}",
        f"machine    {machine['cpus']} CPUs, {size(machine['memory_bytes'])} memory "
        f"({size(machine['available_bytes'])} available), {machine['system']}",
        f"data       {report['data_dir'] or 'unusable'}",
        f"library    {_counts(report['library'])}",
        f"server     {server['url'] + ': ' + server['detail'] if server else 'none is running here'}",
        "engine     " + ", ".join(f"{key} {value}" for key, value in engine.items()),
        "embedder   " + ", ".join(f"{key} {value}" for key, value in embedder.items()),
    ]
    if report["reranker"] is not None:
        out.append("reranker   " + ", ".join(f"{key} {value}" for key, value in report["reranker"].items()))
    out += [f"PROBLEM    {problem}" for problem in report["problems"]]
    return [*out, "All is well." if not report["problems"] else "Fix the problems above, then try again."]
