"""Which sample questions does the packaged model answer right? `python -m bench.suggested [--all]`.

Without `--all` the questions that an empty chat page suggests (`data.suggested_questions`), twice: on a first
start as soon as the page can be used, and again when all documents have been read. The command fails where
one of the answers is wrong or not from a document that holds it. With `--all` all single questions of the
development half: the suggested ones are of those that were answered right, in one whole verified sentence,
each from a document of its own, short and inviting.

Each is asked as a click on the page asks it: through search, gate, prompt, engine and attribution, one after
the other, as whoever owns the machine. The data lies in a folder of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import data
from app.commands import ask
from app.evaluation.match import holds_answer
from app.principal import OWNER
from app.runtime import Runtime
from app.settings import load_settings
from data import Question
from rag.sample import document_id


@dataclass(frozen=True, slots=True)
class Outcome:
    """A question and what the page answered (`app.commands.ask`)."""

    question: Question
    got: dict[str, Any]

    @property
    def right(self) -> bool:
        """A gold answer stands in the answer, and a source of it is a document that holds it."""
        gold = {document_id(span.document) for span in self.question.gold}
        sources = {source["document"] for source in self.got["sources"]}
        return holds_answer(self.got["answer"], self.question.answers) and bool(gold & sources)

    def line(self) -> str:
        """For people: right or wrong, document, question, answer, what attribution says of it."""
        verdicts = ", ".join(sorted({str(source["verdict"]) for source in self.got["sources"]}))
        said = " ".join(self.got["answer"].split())
        mark = "right" if self.right else "WRONG"
        where = self.question.gold[0].document
        return f"{mark}  {where:32} {self.question.question}\n       {said}  [{verdicts}]"


def asked(every: bool) -> list[Question]:
    """The suggested questions in their order, or all single ones of the development half."""
    single = [question for question in data.questions("dev") if question.kind == "single"]
    if every:
        return single
    by_text = {question.question: question for question in single}
    return [by_text[text] for text in data.suggested_questions()]


async def put(runtime: Runtime, questions: Sequence[Question]) -> list[Outcome]:
    """Ask them and print each answer as it comes."""
    found = []
    for question in questions:
        found.append(Outcome(question, await ask(runtime, OWNER, question.question)))
        print(found[-1].line(), flush=True)
    return found


async def measure(folder: Path, every: bool) -> list[Outcome]:
    """Start the product without its doors on `folder`, ask, and stop it. Raises what its start fails with."""
    runtime = Runtime(load_settings(data_dir=folder))
    questions, found = asked(every), []
    try:
        runtime.open()
        runtime.start()
        if not every:
            await runtime.wait_ready()
            print(f"First start, {'more documents to come' if runtime.status()['seeding'] else 'all read'}:")
            found += await put(runtime, questions)
        await runtime.wait_seeded()
        print("All documents read:")
        found += await put(runtime, questions)
    finally:
        await runtime.stop()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.suggested", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--all", action="store_true", help="all single questions of the development half")
    every = parser.parse_args().all
    with tempfile.TemporaryDirectory(prefix="coread-suggested-") as folder:
        found = asyncio.run(measure(Path(folder) / "data", every))
    right = sum(outcome.right for outcome in found)
    print(f"{right} of {len(found)} answered right")
    if right < len(found) and not every:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
