"""Edited questions: branches beside each other that share what stands before them, and the switcher."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from app.errors import NotFoundHere, QuestionRefused
from app.pages import transcript
from app.pages.conversations import ConversationHandlers
from app.pages.handlers import ChatHandlers
from app.pages.words import ENGLISH
from app.runtime import Runtime
from app.updates import Finished
from tests.app.fakes import CharTokenizer, FakeEngine
from tests.app.test_chat import ANN, BOB, QUESTION, ask, prompt_of, run, says
from tests.app.test_conversations import browser


async def test_an_edited_question_is_a_branch_that_shares_what_stands_before_it(
    runtime: Runtime, engine: FakeEngine
) -> None:
    talk, first = await ask(runtime, ANN)
    _, second = await ask(runtime, ANN, "What does its lamp burn?", talk)
    path = await runtime.store.path(ANN, talk)
    edited = (await run(runtime.chat.edit(ANN, talk, path[2].id, "What did its lamp burn?")))[-1]
    assert isinstance(edited, Finished)
    after = await runtime.store.path(ANN, talk)
    assert [m.id for m in after[:2]] == [m.id for m in path[:2]]
    assert after[2].text == "What did its lamp burn?"
    assert await runtime.store.siblings(ANN, talk, after[2].id) == [path[2].id, after[2].id]
    before, branch = ([t for s in r.segments for t in s.tokens] for r in engine.requests[1:])
    same = next(i for i, (a, b) in enumerate(zip(before, branch, strict=False)) if a != b)
    assert CharTokenizer().decode(branch[:same]).endswith("What d"), "they part inside the edited question"
    assert first.message.id in {m.id for m in after}
    assert second.message.id not in {m.id for m in after}


async def test_the_first_question_can_be_edited_too(runtime: Runtime, engine: FakeEngine) -> None:
    talk, _ = await ask(runtime, ANN)
    path = await runtime.store.path(ANN, talk)
    await run(runtime.chat.edit(ANN, talk, path[0].id, "When does the bakery open?"))
    assert (await runtime.store.alternatives(ANN, talk))[None][0] == path[0].id
    assert "Gull Rock" not in prompt_of(engine).split("<|im_start|>user")[-1]


async def test_only_ones_own_questions_are_edited(runtime: Runtime, engine: FakeEngine) -> None:
    talk, first = await ask(runtime, ANN)
    question = first.message.parent_id or ""
    other, _ = await ask(runtime, BOB)
    for who, where, what in ((BOB, talk, question), (BOB, other, question), (ANN, talk, first.message.id)):
        with pytest.raises(NotFoundHere):
            await run(runtime.chat.edit(who, where, what, "Mine?"))
    with pytest.raises(QuestionRefused):
        await run(runtime.chat.edit(ANN, talk, question, "  "))
    with pytest.raises(NotFoundHere):
        await runtime.store.show_branch(BOB, question)
    assert len(engine.requests) == 2


async def test_a_switch_goes_down_to_the_newest_end(runtime: Runtime, engine: FakeEngine) -> None:
    talk, _ = await ask(runtime, ANN)
    await ask(runtime, ANN, "And its lamp?", talk)
    old = await runtime.store.path(ANN, talk)
    await run(runtime.chat.edit(ANN, talk, old[0].id, "When does the bakery open?"))
    assert len(await runtime.store.path(ANN, talk)) == 2
    assert await runtime.store.show_branch(ANN, old[0].id) == talk
    assert await runtime.store.path(ANN, talk) == old


def links(entries: list[Any], action: str) -> list[str]:
    return [id for e in entries for id in re.findall(rf"\(#cr-{action}-([0-9a-f]+)", e["content"])]


async def test_the_page_edits_and_switches(runtime: Runtime, engine: FakeEngine) -> None:
    talks = ConversationHandlers(runtime)
    chat = ChatHandlers(runtime, talks)
    ann, request = browser(runtime)
    engine.script = says("In 1871.")
    talk, _ = await ask(runtime, ann)
    entries = await talks.entries(ann, talk, ENGLISH)
    (question,) = links(entries, "edit")
    assert links(entries, "branch") == [], "one version needs no switcher"
    event: Any = SimpleNamespace(_data={"message": question, "text": "When does the bakery open?"})
    outputs = [output async for output in chat.edit(request, event)]
    edited = outputs[-1]["chat"]
    assert "2 of 2" in edited[0]["content"]
    assert links(edited, "branch") == [question, question]
    back = (await talks.branch(request, SimpleNamespace(_data={"message": question})))["chat"]  # type: ignore[arg-type]
    assert "1 of 2" in back[0]["content"]
    assert "Gull Rock" in back[0]["content"]


@pytest.mark.parametrize("sent", [None, [], {"message": 5}, {"message": "0" * 24, "text": QUESTION}])
async def test_nonsense_from_the_script_is_refused(
    runtime: Runtime, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, sent: Any
) -> None:
    said: list[str] = []
    monkeypatch.setattr("gradio.Warning", lambda text, **_: said.append(text))
    talks = ConversationHandlers(runtime)
    _, request = browser(runtime)
    event: Any = SimpleNamespace(_data=sent)
    assert await talks.branch(request, event) == {}
    assert [o async for o in ChatHandlers(runtime, talks).edit(request, event)] == []
    assert len(said) == 2
    assert not engine.requests


async def test_each_branch_says_what_it_cost_in_blocks(runtime: Runtime, engine: FakeEngine) -> None:
    talk, first = await ask(runtime, ANN)
    await run(runtime.chat.regenerate(ANN, talk, first.message.parent_id or ""))
    entries = await ConversationHandlers(runtime).entries(ANN, talk, ENGLISH)
    receipt = first.message.receipt
    assert receipt is not None
    blocks = -(-(receipt["computed_tokens"] + receipt["output_tokens"]) // 16)
    assert f"about {blocks} blocks of its own" in entries[1]["content"]
    assert f"the others: 1: {blocks}" in entries[1]["content"]
    question = await runtime.store.path(ANN, talk)
    cost = transcript.costs(await runtime.store.messages(ANN, talk), 16)
    assert cost[question[0].id] == 2 * blocks, "a question's branch costs what all answers under it cost"
    assert transcript.costs([], 16) == {}
    switcher = transcript.Branch(("a", "b", "c"), 0, (1, 0, 2)).switcher(ENGLISH)
    assert "[‹](#cr-branch-c " in switcher
    assert "[›](#cr-branch-b " in switcher
    assert "this branch: about 1 block of its own · the others: 3: 2" in switcher
    assert transcript.Branch(("a",), 0, (9,)).switcher(ENGLISH) == ""


async def test_a_conversation_is_read_while_an_answer_is_stored(
    runtime: Runtime, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two reads of the store another message may come."""
    talk, first = await ask(runtime, ANN)
    store, parent = runtime.store, first.message.id

    def followed(read: Any) -> Any:
        async def reads(*args: Any) -> Any:
            nonlocal parent
            found = await read(*args)
            parent = (await store.add_message(ANN, talk, parent, "user", "And then?")).id
            return found

        return reads

    for name in ("path", "alternatives", "messages"):
        monkeypatch.setattr(store, name, followed(getattr(store, name)))
    for _ in range(3):
        assert await ConversationHandlers(runtime).entries(ANN, talk, ENGLISH)
    monkeypatch.undo()
    assert len(await store.path(ANN, talk)) > 4
