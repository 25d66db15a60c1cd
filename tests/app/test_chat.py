"""A turn: scopes, sources, stop, branches, what happens when somebody leaves or a document goes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from app import commands, exports, render
from app.chat import Invitation
from app.errors import NotFoundHere, QuestionRefused, SignedOut, TurnRunning
from app.live import HEARTBEAT_S
from app.pages import transcript
from app.pages.words import ENGLISH, LANGUAGES, Words, phrase
from app.principal import OWNER, Principal
from app.prompting import Span
from app.refusal import CLOSEST, is_refusal, refusal
from app.runtime import Runtime
from app.updates import Finished, Found, Stage, Text, Update
from engine.errors import LimitReached, StepFailed
from engine.types import Delta, Done, Reading, Scope
from tests.app.fakes import CharTokenizer, FakeEngine, failing, receipt

ANN, BOB = Principal("anonymous", "b-ann"), Principal("anonymous", "b-bob")
QUESTION = "When was the lighthouse on Gull Rock built?"


def says(text: str) -> list[Any]:
    ids = tuple(ord(c) + 10 for c in text)
    return [Reading(5, 10, 5), Delta(0, text, ids), Done(0, "stop", text, ids, receipt(100, 60, len(ids)))]


async def run(updates: Any) -> list[Update]:
    return [update async for update in updates]


async def ask(
    runtime: Runtime, who: Principal, question: str = QUESTION, talk: str = ""
) -> tuple[str, Finished]:
    talk = talk or (await runtime.store.create(who)).id
    last = (await run(runtime.chat.ask(who, talk, question)))[-1]
    assert isinstance(last, Finished)
    return talk, last


def prompt_of(engine: FakeEngine, index: int = -1) -> str:
    return CharTokenizer().decode([t for s in engine.requests[index].segments for t in s.tokens])


async def test_an_answer_with_its_sources_and_receipt(runtime: Runtime, engine: FakeEngine) -> None:
    engine.script = says("The lighthouse on Gull Rock was built in 1871.")
    talk = await runtime.store.create(ANN)
    updates = await run(runtime.chat.ask(ANN, talk.id, QUESTION))
    assert isinstance(updates[0], Stage)
    assert any(isinstance(u, Found) and u.sources[0].title == "The lighthouse" for u in updates)
    assert "".join(u.delta for u in updates if isinstance(u, Text)) == engine.script[1].text
    finished = updates[-1]
    assert isinstance(finished, Finished)
    assert finished.message.receipt is not None
    assert finished.message.receipt["reused_tokens"] == 60
    assert finished.sources[0].verdict == "verified"
    assert "built in 1871" in finished.sources[0].text


async def test_a_passage_knows_the_title_and_the_headings_over_it(runtime: Runtime) -> None:
    """A name that stands only in them is no invention of the answer's."""
    document = await runtime.knowledge.document(frozenset({"sample"}), "sample-lighthouse")
    span = Span(document.id, document.version, "sample", document.text.index("Its lamp"), len(document.text))
    built = await runtime.prompter.build(
        readable=frozenset({"sample"}), path=(), question=QUESTION, account="ann", spans=[span],
        answer_tokens=16,
    )  # fmt: skip
    assert built.placed[0].headings == ((0, "The lighthouse"),)
    cited = await runtime.prompter.attribute("The lighthouse has a lamp that burns rape oil.", built)
    assert cited.references[0].verdict == "verified"
    cited = await runtime.prompter.attribute("The bakery has a lamp that burns rape oil.", built)
    assert cited.references[0].verdict == "similar"
    both = "The lighthouse has a lamp that burns rape oil. The bakery has a lamp that burns rape oil. Moo 77."
    cited = await runtime.prompter.attribute(both, built)
    assert cited.sentences == {"verified": 1, "similar": 1, "unsupported": 1}
    assert cited.references[0].verdict == "similar"  # one place, and not all that leans on it is said there
    # Where only the beginning is compared, it ends with a sentence.
    sentence = "The lighthouse has a lamp that burns rape oil."
    for most, counted in ((6_000, 6_000 // (len(sentence) + 1)), (None, 1_000)):
        cited = await runtime.prompter.attribute(" ".join([sentence] * 1_000), built, most)
        assert cited.sentences == {"verified": counted}
    cited = await runtime.prompter.attribute("moo " * 10_000, built, 6_000)
    assert cited.sentences == {"unsupported": 1}


async def test_scopes_are_the_servers(runtime: Runtime, engine: FakeEngine) -> None:
    await ask(runtime, ANN)
    request = engine.requests[0]
    scopes = {segment.origin: segment.scope for segment in request.segments}
    assert scopes["instructions"] == Scope.public()
    assert scopes["document"] == Scope.collection("sample")
    assert scopes["question"] == request.output_scope == Scope.account(ANN.id)
    assert {s.document for s in request.segments if s.origin == "document"} == {"sample-lighthouse"}


async def test_two_people_share_everything_but_their_questions(runtime: Runtime, engine: FakeEngine) -> None:
    for who, question in ((ANN, QUESTION), (BOB, "What does the lamp of the lighthouse on Gull Rock burn?")):
        await ask(runtime, who, question)
    first, second = ([s for s in r.segments if not s.scope.private] for r in engine.requests)
    assert first == second


async def test_the_next_turn_begins_with_the_one_before_and_its_very_tokens(
    runtime: Runtime, engine: FakeEngine
) -> None:
    engine.script = says("In 1871.")
    talk, _ = await ask(runtime, ANN)
    await ask(runtime, ANN, "And what does it burn?", talk)
    first, second = ([t for s in r.segments for t in s.tokens] for r in engine.requests)
    carried = [ord(c) + 10 for c in "In 1871."]
    assert second[: len(first) + len(carried)] == first + carried


@pytest.mark.parametrize("question", ["", "   \n", "x" * 5_000_000, "page " * 20_000])
async def test_impossible_questions_get_a_sentence(
    runtime: Runtime, engine: FakeEngine, question: str
) -> None:
    talk = await runtime.store.create(ANN)
    with pytest.raises(QuestionRefused) as refused:
        await run(runtime.chat.ask(ANN, talk.id, question))
    assert len(str(refused.value)) < 200
    assert not engine.requests
    assert await runtime.store.path(ANN, talk.id) == []


async def test_nobody_asks_in_a_conversation_of_somebody_else(runtime: Runtime, engine: FakeEngine) -> None:
    talk, _ = await ask(runtime, ANN)
    for forbidden in (
        lambda: run(runtime.chat.ask(BOB, talk, "Mine?")),
        lambda: runtime.chat.stop(BOB, talk),
        lambda: runtime.chat.delete(BOB, talk),
        lambda: runtime.chat.invite(BOB, talk, None),
    ):
        with pytest.raises(NotFoundHere):
            await forbidden()
    assert len(engine.requests) == 1


async def test_only_one_turn_runs_in_a_conversation(runtime: Runtime, engine: FakeEngine) -> None:
    engine.script = [Delta(0, "Ha", (82,)), "hold"]
    talk = await runtime.store.create(ANN)
    first = runtime.chat.ask(ANN, talk.id, QUESTION)
    while not isinstance(await anext(first), Text):
        pass
    with pytest.raises(TurnRunning):
        await run(runtime.chat.ask(ANN, talk.id, "Another?"))
    await runtime.chat.stop(ANN, talk.id)
    rest = await run(first)
    assert isinstance(rest[-1], Finished)
    assert rest[-1].message.status == "stopped"
    assert rest[-1].message.receipt is not None, "a stopped answer has its receipt too"


async def test_silence_is_broken_by_signs_of_life(runtime: Runtime, engine: FakeEngine) -> None:
    engine.script = [3.2 * HEARTBEAT_S, *says("Late.")]
    talk = await runtime.store.create(ANN)
    updates = await run(runtime.chat.ask(ANN, talk.id, QUESTION))
    waiting = [u for u in updates if isinstance(u, Stage) and u.name == "waiting"]
    assert len(waiting) >= 3


async def test_locking_an_account_ends_its_running_answer_and_nobody_elses(
    runtime: Runtime, engine: FakeEngine
) -> None:
    ann = await runtime.accounts.create("Ann", "a long enough password", "reader")
    runs: dict[str, asyncio.Task[list[Update]]] = {}
    for name, who in (("ann", ann.principal), ("bob", BOB)):
        engine.script = [Delta(0, "Ha", (82,)), "hold"]
        engine.submitted.clear()
        talk = await runtime.store.create(who)
        runs[name] = asyncio.create_task(run(runtime.chat.ask(who, talk.id, QUESTION)))
        await asyncio.wait_for(engine.submitted.wait(), 20)
    await runtime.accounts.set_disabled(ann.id, True)
    finished = (await asyncio.wait_for(runs["ann"], 20))[-1]
    assert isinstance(finished, Finished)
    assert finished.message.status == "stopped"
    assert [generation.aborted for generation in engine.generations] == [True, False]
    engine.generations[1].abort()
    await asyncio.wait_for(runs["bob"], 20)


async def test_an_account_that_is_locked_while_its_question_is_looked_up_gets_nothing(
    runtime: Runtime, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann = await runtime.accounts.create("Ann", "a long enough password", "reader")
    looked, go_on, build = asyncio.Event(), asyncio.Event(), runtime.prompter.build

    async def slowly(**asked: Any) -> Any:
        looked.set()
        await go_on.wait()
        return await build(**asked)

    monkeypatch.setattr(runtime.prompter, "build", slowly)
    talk = await runtime.store.create(ann.principal)
    told = asyncio.create_task(run(runtime.chat.ask(ann.principal, talk.id, QUESTION)))
    await asyncio.wait_for(looked.wait(), 20)
    await runtime.accounts.set_disabled(ann.id, True)
    go_on.set()
    with pytest.raises(SignedOut):
        await asyncio.wait_for(told, 20)
    assert engine.requests == []
    assert await runtime.store.path(ann.principal, talk.id) == []


async def test_a_model_that_loops_is_stopped(runtime: Runtime, engine: FakeEngine) -> None:
    engine.script = says("It opens at six." + " It is a bakery." * 12)
    talk, finished = await ask(runtime, ANN)
    assert finished.message.text == "It opens at six. It is a bakery."
    assert finished.message.status == "complete"
    assert "repeat itself" in finished.notes[0]
    path = await runtime.store.path(ANN, talk)
    for language in LANGUAGES:
        w = Words(language)
        shown = str(transcript.answer_entries(path[1], (), w))
        assert render.plain(w("note.looped")) in shown, "after a reload too"
    text = exports.markdown(await exports.export(runtime, ANN, talk))
    assert f"*({finished.notes[0]})*" in text
    assert transcript.notes_entries(finished.notes, ENGLISH) == [], "it stands under the answer"
    engine.script = says("Yes.")
    await ask(runtime, ANN, "Go on?", talk)
    assert "It is a bakery." not in prompt_of(engine)
    assert QUESTION not in prompt_of(engine)


async def test_what_was_left_out_stays_in_the_receipt(runtime: Runtime, engine: FakeEngine) -> None:
    _, finished = await ask(runtime, ANN)
    notes = (phrase("note.passages", n=2), phrase("note.lost"))
    stored = json.loads(
        json.dumps({**(finished.message.receipt or {}), "notes": [n.stored() for n in notes]})
    )
    message = replace(finished.message, receipt=stored)
    for w in map(Words, LANGUAGES):
        *_, shown = transcript.answer_entries(message, (), w)
        assert render.plain(w("note.passages", n=2)) in shown["content"]
        assert render.plain(w("note.lost")) in shown["content"]
        assert render.plain(w("note.lost")) in str(transcript.notes_entries(notes, w)), (
            "and is said when the answer ends"
        )
    for wrong in (None, {}, 3, "x", [None, 3, {"key": "note.of another version", "values": {}}]):
        message = replace(finished.message, receipt={**stored, "notes": wrong})
        assert "note" not in str(transcript.answer_entries(message, (), ENGLISH)[-1]["content"])


async def test_an_answer_cut_by_its_length_says_so(runtime: Runtime, engine: FakeEngine) -> None:
    *before, done = says("It opens at")
    assert isinstance(done, Done)
    engine.script = [*before, replace(done, reason="length")]
    cut = (await ask(runtime, ANN))[1].message
    assert cut.status == "complete"
    shown = transcript.answer_entries(cut, (), ENGLISH)[0]["content"]
    assert "Ended at the length limit of 11 tokens." in shown
    assert "11 個 token 的長度上限" in transcript.answer_entries(cut, (), Words("zh-Hant"))[0]["content"]
    engine.script = says("It opens at six.")
    assert "length" not in str(transcript.answer_entries((await ask(runtime, ANN))[1].message, (), ENGLISH))


async def test_a_wrong_answer_is_not_in_the_next_prompt_but_its_question_is_searched_with(
    runtime: Runtime, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.script = says("The lighthouse cost £1.25. It was sold in 1999.")
    talk, wrong = await ask(runtime, ANN)
    assert {source.verdict for source in wrong.sources} == {"unsupported"}
    searched: list[Any] = []
    search = runtime.knowledge.search

    async def watched(readable: Any, query: str, limit: int, history: Any = ()) -> Any:
        searched.append(list(history))
        return await search(readable, query, limit, history)

    monkeypatch.setattr(runtime.knowledge, "search", watched)
    engine.script = says("It was built in 1871. It cost £1.25.")
    _, right = await ask(runtime, ANN, "And when was it built?", talk)
    assert searched == [[QUESTION]]
    assert "1.25" not in prompt_of(engine)
    assert QUESTION not in prompt_of(engine)
    assert right.sources[0].verdict == "verified"
    engine.script = says("Rape oil.")
    await ask(runtime, ANN, "And what does its lamp burn?", talk)
    assert searched[-1] == [QUESTION, "And when was it built?"]
    assert "It was built in 1871. It cost £1.25." in prompt_of(engine), "one sentence of it is supported"
    assert len(await runtime.store.path(ANN, talk)) == 6, "what is on screen stays"


async def test_a_refused_question_is_not_kept(runtime: Runtime, engine: FakeEngine) -> None:
    engine.refuse = LimitReached("running requests", 1)
    talk = await runtime.store.create(ANN)
    with pytest.raises(LimitReached):
        await run(runtime.chat.ask(ANN, talk.id, QUESTION))
    assert await runtime.store.path(ANN, talk.id) == []


async def test_a_failed_step_fails_its_turn_only(runtime: Runtime, engine: FakeEngine) -> None:
    engine.script = failing(StepFailed("The step failed."))
    talk = await runtime.store.create(ANN)
    with pytest.raises(StepFailed):
        await run(runtime.chat.ask(ANN, talk.id, QUESTION))
    engine.script = None
    await ask(runtime, BOB)


async def test_answering_again_makes_a_branch_with_the_same_prompt(
    runtime: Runtime, engine: FakeEngine
) -> None:
    talk, first = await ask(runtime, ANN)
    asked = first.message.parent_id
    assert asked is not None
    again = (await run(runtime.chat.regenerate(ANN, talk, asked)))[-1]
    assert isinstance(again, Finished)
    assert again.message.parent_id == asked
    assert engine.requests[0].segments == engine.requests[1].segments
    assert engine.requests[1].sampling.temperature > 0
    assert len(await runtime.store.siblings(ANN, talk, first.message.id)) == 2


async def test_a_deleted_document_leaves_prompt_history_and_sources(
    runtime: Runtime, engine: FakeEngine
) -> None:
    text = b"# The mill\n\nThe mill at Tarn grinds barley with seven stones."
    document = await runtime.knowledge.upload(ANN, "mill.md", text)
    async for info in runtime.knowledge.progress(ANN, document, 0.1):
        assert info.status != "failed"
    engine.script = says("The mill at Tarn grinds barley with seven stones.")
    talk, first = await ask(runtime, ANN, "What does the mill at Tarn grind?")
    assert first.sources[0].title == "The mill"
    with pytest.raises(NotFoundHere):
        await runtime.knowledge.delete(BOB, document)
    assert await runtime.knowledge.delete(ANN, document) == 3
    engine.script = says("I do not know.")
    _, second = await ask(runtime, ANN, "How many stones does the mill have?", talk)
    assert "barley" not in prompt_of(engine), "neither the document nor the answer made from it"
    assert second.notes
    path = await runtime.store.path(ANN, talk)
    tombstones = await runtime.knowledge.sources(ANN, path[1].references)
    assert [source.available for source in tombstones] == [False]
    assert tombstones[0].text == ""


async def test_an_upload_is_read_by_its_owner_only(runtime: Runtime, engine: FakeEngine) -> None:
    document = await runtime.knowledge.upload(ANN, "key.txt", b"The zebra password is quagga.")
    async for _ in runtime.knowledge.progress(ANN, document, 0.1):
        pass
    assert document in {view.id for view in await runtime.knowledge.documents(ANN)}
    for other in (BOB, OWNER):
        assert document not in {view.id for view in await runtime.knowledge.documents(other)}
        found = await commands.search(runtime, other, "zebra password quagga", 5)
        assert "quagga" not in str(found["hits"])
        talk = await runtime.store.create(other, document_id=document)
        with pytest.raises(NotFoundHere):
            await run(runtime.chat.ask(other, talk.id, "What is the zebra password?"))


async def test_this_document_is_read_whole(runtime: Runtime, engine: FakeEngine) -> None:
    talk = await runtime.store.create(ANN, document_id="sample-bakery")
    await ask(runtime, ANN, "What does rye cost?", talk.id)
    assert "opens at six" in prompt_of(engine)
    assert "four crowns" in prompt_of(engine)


async def test_the_second_reader_is_somebody_else_over_the_same_text(
    runtime: Runtime, engine: FakeEngine
) -> None:
    talk, _ = await ask(runtime, ANN)
    invitation = await runtime.chat.invite(ANN, talk, None)
    await run(invitation.updates)
    mine, guest = engine.requests
    assert guest.conversation != mine.conversation
    assert guest.output_scope != mine.output_scope
    assert guest.principal == ANN.id, "it counts against the inviter's limits"
    shared = [s for s in guest.segments if not s.scope.private]
    assert shared == [s for s in mine.segments if not s.scope.private]
    assert [s for s in guest.segments if s.scope.private] != [s for s in mine.segments if s.scope.private]


async def test_a_second_reader_whom_nobody_looks_at_leaves_nothing_and_makes_way(
    runtime: Runtime, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[Principal] = []
    create = runtime.store.create

    async def watched(principal: Principal, *args: Any) -> Any:
        created.append(principal)
        return await create(principal, *args)

    monkeypatch.setattr(runtime.store, "create", watched)
    clicks = await asyncio.gather(
        *(runtime.chat.invite(ANN, None, "sample-bakery") for _ in range(2)), return_exceptions=True
    )
    assert [type(click) for click in clicks] == [Invitation, TurnRunning]
    assert isinstance(clicks[0], Invitation)
    with pytest.raises(TurnRunning):
        await runtime.chat.invite(ANN, None, "sample-bakery")
    await clicks[0].updates.aclose()  # a page that was closed before the first update
    assert created == []

    runtime.chat.grace_s = 0.0
    late = await runtime.chat.invite(BOB, None, "sample-bakery")
    await asyncio.sleep(0.01)
    again = await runtime.chat.invite(BOB, None, "sample-bakery")  # nobody looked at the first in time
    first = await anext(again.updates)
    assert isinstance(first, Stage)
    with pytest.raises(TurnRunning):
        await run(late.updates)
    await again.updates.aclose()
    await runtime.chat.close()
    (reader,) = created
    assert await runtime.store.conversations(reader) == []


async def test_a_second_reader_that_cannot_be_deleted_is_in_the_log(
    runtime: Runtime, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def full(*_: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(runtime.store, "delete", full)
    invitation = await runtime.chat.invite(ANN, None, "sample-bakery")
    await run(invitation.updates)
    await runtime.chat.close()
    assert "second reader could not be deleted: the disk is full" in caplog.text


async def test_while_the_engine_is_down_things_can_be_deleted(
    runtime: Runtime, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = await runtime.knowledge.upload(ANN, "key.txt", b"The zebra password is quagga.")
    async for _ in runtime.knowledge.progress(ANN, document, 0.1):
        pass
    talk, _ = await ask(runtime, ANN)

    def down(*_: Any) -> Any:
        raise AssertionError("an engine that is down was asked")

    failed = replace(engine.status(), state="failed")
    monkeypatch.setattr(FakeEngine, "status", lambda self: failed)
    monkeypatch.setattr(FakeEngine, "unlink_document", down)
    monkeypatch.setattr(FakeEngine, "close_conversation", down)
    assert await runtime.knowledge.delete(ANN, document) == 0
    assert document not in {view.id for view in await runtime.knowledge.documents(ANN)}
    await runtime.chat.delete(ANN, talk)
    assert await runtime.store.conversations(ANN) == []


async def test_an_invitation_needs_something_to_read(runtime: Runtime) -> None:
    with pytest.raises(NotFoundHere, match="choose a document"):
        await runtime.chat.invite(ANN, None, None)


async def test_eight_people_at_once_never_see_each_others_text(runtime: Runtime, engine: FakeEngine) -> None:
    people = [Principal("anonymous", f"b-{n}") for n in range(8)]
    results = await asyncio.gather(*(ask(runtime, p, f"{QUESTION} nonce-{p.id}") for p in people))
    for (talk, _), person in zip(results, people, strict=True):
        mine = next(r for r in engine.requests if r.conversation == talk)
        text = CharTokenizer().decode([t for s in mine.segments for t in s.tokens])
        assert f"nonce-{person.id}" in text
        assert text.count("nonce-") == 1


# -- where the documents do not say --------------------------------------------------------------------------

NOT_THERE = "Who is the mayor of Ardmoor?"


@pytest.fixture
def strict(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Refuses what the test's own word vectors say nothing near to."""

    async def answerable(readable: Any, query: str, hits: Any, history: Any = ()) -> bool:
        return query != NOT_THERE

    monkeypatch.setattr(runtime.knowledge, "answerable", answerable)
    monkeypatch.setattr(
        runtime.prompter, "_settings", runtime.settings.model_copy(update={"refuse_unanswerable": True})
    )
    return runtime


async def test_a_question_that_the_documents_do_not_answer_is_not_given_to_the_model(
    strict: Runtime, engine: FakeEngine
) -> None:
    talk = await strict.store.create(ANN)
    updates = await run(strict.chat.ask(ANN, talk.id, NOT_THERE))
    assert engine.requests == []
    finished = updates[-1]
    assert isinstance(finished, Finished)
    assert finished.message.text == refusal() == "".join(u.delta for u in updates if isinstance(u, Text))
    assert (finished.message.model, finished.message.receipt, finished.message.status) == (
        None, None, "complete"
    )  # fmt: skip
    assert {source.verdict for source in finished.sources} == {CLOSEST}
    assert {source.title for source in finished.sources} == {"The lighthouse", "The bakery"}
    stored = await strict.store.path(ANN, talk.id)
    assert [m.role for m in stored] == ["user", "assistant"]
    assert is_refusal(stored[1])
    assert not is_refusal(stored[0])
    assert is_refusal(replace(stored[1], text="As an earlier version worded it."))
    assert not is_refusal(replace(stored[1], model="a model that says just this"))
    part = replace(stored[1], text="A part that was kept while the engine was down", references=())
    assert not is_refusal(part)
    shown = transcript.answer_entries(finished.message, finished.sources, Words("zh-Hant"))
    assert "它們並不是答案" in str(shown[0]["content"])
    assert "並非答案" in str(shown[0]["content"])  # each passage is marked


async def test_a_refusal_leaves_no_trace_in_the_next_prompt(strict: Runtime, engine: FakeEngine) -> None:
    engine.script = says("In 1871.")
    talk, _ = await ask(strict, ANN)
    await ask(strict, ANN, NOT_THERE, talk)
    await ask(strict, ANN, "And what does its lamp burn?", talk)
    first, last = ([t for s in r.segments for t in s.tokens] for r in engine.requests)
    assert last[: len(first)] == first
    assert "mayor" not in prompt_of(engine)
    assert "do not seem" not in prompt_of(engine)


async def test_a_document_that_was_chosen_is_always_read(strict: Runtime, engine: FakeEngine) -> None:
    talk = await strict.store.create(ANN, document_id="sample-bakery")
    await run(strict.chat.ask(ANN, talk.id, NOT_THERE))
    assert len(engine.requests) == 1


async def test_refusing_can_be_switched_off(runtime: Runtime, engine: FakeEngine) -> None:
    assert not runtime.settings.refuse_unanswerable  # see conftest
    await ask(runtime, ANN, NOT_THERE)
    assert len(engine.requests) == 1


async def test_a_prompt_of_several_passages_begins_with_what_is_in_memory(
    runtime: Runtime, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        runtime.prompter, "_settings", runtime.settings.model_copy(update={"prompt_passages": 2})
    )

    def documents() -> list[str | None]:
        return [s.document for s in engine.requests[-1].segments if s.origin == "document"]

    await ask(runtime, ANN)
    assert documents() == ["sample-bakery", "sample-lighthouse"]  # nothing is in memory: the same for all

    def resident(segments: Any) -> int:
        held = [s for s in segments if s.document != "sample-bakery"]
        return sum(len(s.tokens) for s in held) if held == list(segments) else len(segments[0].tokens)

    monkeypatch.setattr(type(engine), "resident_tokens", lambda self, segments: resident(segments))
    await ask(runtime, BOB)
    assert documents() == ["sample-lighthouse", "sample-bakery"]


def test_an_answer_of_several_sentences_says_how_far_the_marks_reach() -> None:
    w = ENGLISH
    line = transcript.sentences_line({"verified": 1, "similar": 1, "unsupported": 1}, w)
    assert line == "*Of 3 sentences: 1 ✓ verified, 1 ≈ similar, 1 ? unsupported.*"
    for whole in ({"verified": 2}, {"similar": 1}, {}, None):
        assert transcript.sentences_line(whole, w) == ""
