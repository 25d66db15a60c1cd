"""Builds data/questions.jsonl from data/questions.txt: turns every quoted anchor into its sentence's offsets.

    python -m data.build            write questions.jsonl
    python -m data.build --check    fail if questions.jsonl is not what the source gives

A source block is one question; blocks are separated by blank lines, lines that begin with `#` are comments:

    dev petrel90-weight: How heavy is a Petrel 90?
      = 84 kilograms | 84 kg
      @ petrel-90.md: A complete Petrel 90 weighs

    test petrel90-price-next: And what does it cost?
      user: How heavy is a Petrel 90?
      assistant: It weighs 84 kilograms.
      = 9,800 crowns | 9800
      @ petrel-90.md: costs 9,800 crowns

`=` lists acceptable answers, the literal one first; a question without `=` and `@` is unanswerable. `@` names
a document and an anchor that occurs in it exactly once; the gold span is the sentence, list item or table row
around the anchor. A fact that stands in several documents gets one `@` line for each.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from data import QUESTION_FILE, GoldSpan, HistoryTurn, Kind, Question, SampleDataError, Split, documents

SOURCE_FILE = QUESTION_FILE.with_name("questions.txt")

_HEAD = re.compile(r"(dev|test) ([a-z0-9-]+): (\S.*)")
_LINE = re.compile(r"  (=|@|user:|assistant:) (\S.*)")
_SENTENCE_END = re.compile(r"[.!?][\"*)]*\s+(?=[\"*(]*[A-Z0-9Ž「])|。")


def sentence_around(text: str, anchor: str) -> tuple[int, int]:
    """Offsets (start, end) of the sentence that holds `anchor`, or of the whole line for list items and rows.

    Documents keep a paragraph on one line, so a sentence never crosses a line break. An anchor that crosses a
    sentence's end takes both sentences. Raises SampleDataError unless `anchor` occurs exactly once.
    """
    count = text.count(anchor)
    if count != 1:
        raise SampleDataError(f"anchor {anchor!r} occurs {count} times, must occur once")
    at = text.index(anchor)
    line_start = text.rfind("\n", 0, at) + 1
    line_end = text.find("\n", at)
    line_end = len(text) if line_end < 0 else line_end
    ends = [line_start + match.end() for match in _SENTENCE_END.finditer(text[line_start:line_end])]
    # A list marker such as "3. " looks like the end of a sentence; it is not one.
    marker = re.match(r"\d+\. ", text[line_start:line_end])
    if marker:
        ends = [end for end in ends if end > line_start + marker.end()]
    start = max((end for end in ends if end <= at), default=line_start)
    end = min((end for end in ends if end >= at + len(anchor)), default=line_end)
    return start, start + len(text[start:end].rstrip())


def _blocks(source: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number of the head, lines) for each question of the source."""
    block: list[str] = []
    head = 0
    for number, line in enumerate([*source.split("\n"), ""], start=1):
        if line.startswith("#"):
            continue
        if line.strip():
            if not block:
                head = number
            block.append(line)
        elif block:
            yield head, block
            block = []


def parse(source: str, texts: Mapping[str, str]) -> list[Question]:
    """All questions of a source, with gold spans into `texts` (document name to text).

    Raises SampleDataError naming the line for a malformed block, an unknown document, an anchor that is not
    unique, a gold span without the literal answer, or an id or question that occurs twice.
    """
    questions: list[Question] = []
    ids: set[str] = set()
    wordings: set[tuple[str, tuple[HistoryTurn, ...]]] = set()
    for number, block in _blocks(source):
        try:
            question = _parse_block(block, texts)
            if question.id in ids:
                raise SampleDataError(f"id {question.id!r} occurs twice")
            wording = (question.question.casefold(), question.history)
            if wording in wordings:
                raise SampleDataError(f"question {question.question!r} occurs twice")
        except SampleDataError as error:
            raise SampleDataError(f"questions source, line {number}: {error}") from error
        ids.add(question.id)
        wordings.add(wording)
        questions.append(question)
    return questions


def _parse_block(block: list[str], texts: Mapping[str, str]) -> Question:
    head = _HEAD.fullmatch(block[0])
    if head is None:
        raise SampleDataError(f"expected '<dev|test> <id>: <question>', not {block[0]!r}")
    answers: list[str] = []
    history: list[HistoryTurn] = []
    gold: list[GoldSpan] = []
    for line in block[1:]:
        match = _LINE.fullmatch(line)
        if match is None:
            raise SampleDataError(f"expected '  = ', '  @ ', '  user: ' or '  assistant: ', not {line!r}")
        mark, rest = match.groups()
        if mark == "=":
            answers += [part.strip() for part in rest.split(" | ")]
        elif mark == "@":
            gold.append(_gold_span(rest, texts))
        else:
            history.append(HistoryTurn("user" if mark == "user:" else "assistant", rest))
    if bool(answers) != bool(gold):
        raise SampleDataError("an answerable question needs both answers and gold spans")
    passages = [texts[span.document][span.start : span.end].casefold() for span in gold]
    if passages and answers[0].casefold() not in passages[0]:
        raise SampleDataError(f"{answers[0]!r} is not in the first gold span {passages[0]!r}")
    for passage in passages:
        if not any(answer.casefold() in passage for answer in answers):
            raise SampleDataError(f"none of {answers} is in the gold span {passage!r}")
    if [turn.role for turn in history] != ["user", "assistant"] * (len(history) // 2):
        raise SampleDataError("history must alternate, user first, and end with the assistant")
    kind: Kind = "unanswerable" if not answers else "followup" if history else "single"
    split: Split = "dev" if head[1] == "dev" else "test"
    return Question(head[2], split, kind, head[3], tuple(history), tuple(answers), tuple(gold))


def _gold_span(rest: str, texts: Mapping[str, str]) -> GoldSpan:
    document, _, anchor = rest.partition(": ")
    if document not in texts:
        raise SampleDataError(f"no document {document!r}")
    return GoldSpan(document, *sentence_around(texts[document], anchor))


def to_jsonl(questions: list[Question]) -> str:
    """The committed form: one JSON object a line, keys in a fixed order, text as UTF-8."""
    return "".join(json.dumps(_record(question), ensure_ascii=False) + "\n" for question in questions)


def _record(question: Question) -> dict[str, object]:
    return {
        "id": question.id,
        "split": question.split,
        "kind": question.kind,
        "question": question.question,
        "history": [{"role": turn.role, "content": turn.content} for turn in question.history],
        "answers": list(question.answers),
        "gold": [{"document": span.document, "start": span.start, "end": span.end} for span in question.gold],
    }


def build(source_file: Path = SOURCE_FILE) -> str:
    """The content that questions.jsonl must have for the present documents and source."""
    texts = {document.name: document.text for document in documents()}
    return to_jsonl(parse(source_file.read_text(encoding="utf-8"), texts))


def main() -> int:
    """Write or check questions.jsonl; the exit status is 1 when the source is faulty or the file is stale."""
    parser = argparse.ArgumentParser(description="Build data/questions.jsonl from data/questions.txt")
    parser.add_argument("--check", action="store_true", help="only compare, write nothing")
    check = parser.parse_args().check
    try:
        content = build()
    except SampleDataError as error:
        print(error, file=sys.stderr)
        return 1
    if not check:
        QUESTION_FILE.write_text(content, encoding="utf-8", newline="\n")
        return 0
    if not QUESTION_FILE.exists() or QUESTION_FILE.read_text(encoding="utf-8") != content:
        print(f"{QUESTION_FILE.name} is stale: run python -m data.build", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
