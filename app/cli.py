"""The `coread` command. Every error is one sentence on standard error and exit status 1."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from app.cache_home import ensure_cache_home
from app.cli_people import register
from app.errors import AppError, SettingsError
from app.render import counted
from app.settings import Settings, load_settings
from engine.errors import EngineError
from rag.errors import RagError

app = typer.Typer(
    help="Coread: a chat over a shared knowledge base. Many readers, one copy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object with documented keys.")]
DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Where everything is kept.")]


def fail(message: str) -> NoReturn:
    typer.echo(f"coread: {message}", err=True)
    raise typer.Exit(1)


def _guarded(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except (AppError, EngineError, RagError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, ensure_ascii=False, indent=2))


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Serve the page and the HTTP API until interrupted."""

    def work() -> None:
        from app.runtime import Runtime
        from app.server import serve as run

        run(Runtime(load_settings(host=host, port=port, data_dir=data_dir)))

    _guarded(work)


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="What you want to know.")],
    document: Annotated[
        str | None, typer.Option(help="Id of a document to read whole instead of searching.")
    ] = None,
    as_json: Json = False,
    data_dir: DataDir = None,
) -> None:
    """Ask the documents; JSON keys: answer, status, sources, receipt, notes."""
    from app.client import run_ask
    from app.pages.transcript import mark_words, sentences_line
    from app.pages.words import ENGLISH

    result = _guarded(lambda: run_ask(load_settings(data_dir=data_dir), question, document))
    if as_json:
        _print_json(result)
        return
    typer.echo(result["answer"])
    for source in result["sources"]:
        mark = mark_words(source["verdict"], ENGLISH)
        where = " · ".join(part for part in (source["title"], source["section"], mark) if part)
        typer.echo(f"  [{source['number']}] {where}")
    for note in result["notes"]:
        typer.echo(f"  note: {note}")
    receipt = result["receipt"] or {}
    if limit := receipt.get("length_limit"):
        typer.echo(f"  {ENGLISH('answer.length', n=limit)}")
    if told := sentences_line(receipt.get("sentences"), ENGLISH):
        typer.echo(f"  {told.strip('*')}")
    if receipt:
        typer.echo(
            f"  {receipt['reused_tokens']:,} of {receipt['prompt_tokens']:,} prompt tokens from memory, "
            f"{receipt['output_tokens']:,} written"
        )


@app.command()
def search(
    query: Annotated[str, typer.Argument(help="What to look for.")],
    limit: Annotated[int, typer.Option("--limit", "-k", min=1, max=50, help="How many passages.")] = 5,
    as_json: Json = False,
    data_dir: DataDir = None,
) -> None:
    """Find passages; JSON keys: query, hits."""
    from app.client import run_search

    result = _guarded(lambda: run_search(load_settings(data_dir=data_dir), query, limit))
    if as_json:
        _print_json(result)
        return
    for number, hit in enumerate(result["hits"], 1):
        where = " · ".join(part for part in (hit["title"], hit["section"]) if part)
        typer.echo(f"{number}. {where}  (score {hit['score']:.4f}, document {hit['document']})")
        typer.echo("   " + " ".join(hit["text"].split())[:300])
    if not result["hits"]:
        typer.echo("Nothing was found.")


@app.command()
def ingest(
    paths: Annotated[list[Path], typer.Argument(help="Files, or folders whose files are all taken.")],
    collection: Annotated[str, typer.Option(help="Name of the collection; made at first use.")],
    private: Annotated[
        bool, typer.Option("--private", help="Only this command line may read a newly made collection.")
    ] = False,
    as_json: Json = False,
    data_dir: DataDir = None,
) -> None:
    """Add files to a collection that everybody who can open this server may read; JSON keys: collection,
    documents (name, document, version, status: ready, unchanged or failed, passages, message)."""
    from app.client import run_ingest

    def report(row: dict[str, Any]) -> None:
        if as_json:
            return
        passages = counted(row["passages"], "passage")
        ready = passages if row["version"] < 2 else f"version {row['version']}, {passages}"
        mark, detail = {"ready": ("✓", ready), "unchanged": ("=", f"unchanged, {passages}")}.get(
            row["status"], ("✗", row["message"])
        )
        typer.echo(f"{mark} {row['name']}: {detail}")

    rows = _guarded(lambda: run_ingest(load_settings(data_dir=data_dir), paths, collection, private, report))
    if as_json:
        _print_json({"collection": collection, "documents": rows})
    if any(row["status"] not in ("ready", "unchanged") for row in rows):
        raise typer.Exit(1)


@app.command()
def size(
    model: Annotated[str, typer.Option(help="A known model's name, or a folder with a config.json.")],
    memory: Annotated[str, typer.Option(help="The device's memory, as in 24GB.")],
    common: Annotated[int, typer.Option(help="Tokens that the readers have in common.")] = 6000,
    own: Annotated[int, typer.Option(help="Tokens of each reader: question and answer.")] = 500,
    documents: Annotated[int, typer.Option(help="Documents that the readers spread over.")] = 1,
    as_json: Json = False,
) -> None:
    """How many readers fit a device, contiguous, paged and sharing; JSON keys: see `sizing.estimate`."""
    from app.sizing import report, run_size

    found = _guarded(lambda: run_size(model, memory, common, own, documents))
    if as_json:
        _print_json(found)
        return
    for line in report(found):
        typer.echo(line)


@app.command()
def demo(
    readers: Annotated[int, typer.Option(help="How many scripted readers come, 12 to 48.")] = 12,
    record: Annotated[Path | None, typer.Option(help="Keep what the memory page is told, to replay.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    data_dir: DataDir = None,
) -> None:
    """Scripted readers on the real engine, in the running server if there is one: watch them at /memory."""
    from app.demo_command import run_demo

    said = _guarded(lambda: run_demo(load_settings(host=host, port=port, data_dir=data_dir), readers, record))
    if said:
        typer.echo(said)


@app.command(name="eval")
def evaluation(
    split: Annotated[str, typer.Option(help="Which half of the sample questions: dev or test.")] = "test",
    limit: Annotated[int | None, typer.Option(min=4, help="So many questions at most.")] = None,
    beir: Annotated[
        Path | None, typer.Option(help="A folder in the BEIR layout; retrieval only is measured on it.")
    ] = None,
    answers: Annotated[bool, typer.Option(help="Also have the model answer.")] = True,
    keep: Annotated[
        Path | None, typer.Option(help="A folder that keeps the prepared sample library between runs.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure search, answers, refusals, citations and prompt layout; JSON keys: see docs/evaluation.md."""
    from app.evaluation.report import evaluate, evaluate_folder, lines

    def say(text: str) -> None:
        if not as_json:
            typer.echo(text, err=True)

    def work() -> dict[str, Any]:
        settings = load_settings()
        if beir is not None:
            return evaluate_folder(settings, beir)
        if split not in ("dev", "test"):
            raise SettingsError(f"--split is {split[:40]!r}; it must be dev or test.")
        return evaluate(
            settings,
            split="dev" if split == "dev" else "test",
            limit=limit,
            answers=answers,
            folder=keep,
            say=say,
        )

    result = _guarded(work)
    if as_json:
        _print_json(result)
        return
    for line in lines(result):
        typer.echo(line)


@app.command()
def doctor(as_json: Json = False, data_dir: DataDir = None) -> None:
    """Say what was found on this machine and what to do about what is missing."""
    from app.doctor import examine, lines

    def settings() -> Settings:
        return load_settings(data_dir=data_dir)

    report = _guarded(lambda: examine(settings()))
    if as_json:
        _print_json(report)
    else:
        for line in lines(report):
            typer.echo(line)
    if report["problems"]:
        raise typer.Exit(1)


@app.command()
def reindex(
    embeddings: Annotated[
        bool, typer.Option("--embeddings", help="Embed every passage anew, too; takes long.")
    ] = False,
    as_json: Json = False,
    data_dir: DataDir = None,
) -> None:
    """Rebuild the search indexes from the stored texts; JSON keys: documents, passages, files, problems."""
    from app.library_commands import reindex as run

    report = _guarded(lambda: run(load_settings(data_dir=data_dir), embeddings))
    if as_json:
        _print_json(report)
    else:
        typer.echo(
            f"{counted(report['documents'], 'document')} with {counted(report['passages'], 'passage')}."
        )
        for problem in report["problems"]:
            typer.echo(f"PROBLEM    {problem}")
    if report["problems"]:
        raise typer.Exit(1)


register(app, _guarded)


def main() -> None:
    """Entry point of the `coread` command."""
    ensure_cache_home()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(
            errors="replace"
        )  # a terminal that cannot show a character is no reason to fail
    app()


if __name__ == "__main__":
    main()
