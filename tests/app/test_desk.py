"""What the links in messages open: the exact passage of a source, for those who may read it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from app import exports, render
from app.errors import CommentRefused, NotFoundHere
from app.pages import desk, transcript
from app.pages.words import ENGLISH
from app.principal import OWNER, Principal
from app.runtime import Runtime
from app.store import MAX_COMMENT, Feedback, Ranking
from app.updates import Source
from tests.app.fakes import FakeEngine
from tests.app.test_chat import ANN, BOB, ask, says
from tests.app.test_render import HOSTILE, rendered


async def test_a_source_opens_at_its_passage(runtime: Runtime, engine: FakeEngine) -> None:
    engine.script = says("The lighthouse on Gull Rock was built in 1871.")
    _, finished = await ask(runtime, ANN)
    shown = await desk.source(runtime, ANN, {"message": finished.message.id, "number": 1})
    assert shown["title"] == "The lighthouse"
    assert "built in 1871" in shown["text"]
    whole = shown["before"] + shown["text"] + shown["after"]
    document = await runtime.knowledge.document(frozenset({"sample"}), "sample-lighthouse")
    assert whole == document.text, "nothing is lost around the passage"
    assert shown["verdict"].startswith("verified: ")
    assert re.search(r"lexical\S* rank 1", shown["where"])


async def test_ranks_and_scores_are_stored_with_the_answer(runtime: Runtime, engine: FakeEngine) -> None:
    talk, finished = await ask(runtime, ANN)
    stored = (await runtime.store.path(ANN, talk))[-1]
    assert stored.references == finished.message.references
    found = [r.found for r in stored.references if not r.zone]
    assert found[0] is not None
    assert found[0].score > 0
    assert all(rank >= 1 for _, rank in found[0].ranks)


@pytest.mark.parametrize("who", [BOB, OWNER, Principal("anonymous", "")])
async def test_a_source_opens_for_the_conversations_owner_only(
    runtime: Runtime, engine: FakeEngine, who: Principal
) -> None:
    _, finished = await ask(runtime, ANN)
    with pytest.raises(NotFoundHere):
        await desk.source(runtime, who, {"message": finished.message.id, "number": 1})


@pytest.mark.parametrize(
    "asked", [{}, {"message": 7}, {"message": "x", "number": 1}, {"message": "'; --", "number": "1"}]
)
async def test_nonsense_gets_a_sentence(runtime: Runtime, asked: dict[str, Any]) -> None:
    with pytest.raises(NotFoundHere):
        await desk.source(runtime, ANN, asked)


async def test_a_source_that_lost_its_reader_opens_no_longer(runtime: Runtime, engine: FakeEngine) -> None:
    document = await runtime.knowledge.upload(
        ANN, "mill.md", b"# The mill\n\nThe mill at Tarn grinds barley."
    )
    async for _ in runtime.knowledge.progress(ANN, document, 0.1):
        pass
    engine.script = says("The mill at Tarn grinds barley.")
    _, finished = await ask(runtime, ANN, "What does the mill at Tarn grind?")
    asked = {"message": finished.message.id, "number": 1}
    assert "barley" in (await desk.source(runtime, ANN, asked))["text"]
    reference = finished.message.references[0]
    await runtime.store.revoke(reference.collection_id, ANN.id)
    with pytest.raises(NotFoundHere):
        await desk.source(runtime, ANN, asked)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_title_yields_our_own_link_only(hostile: str) -> None:
    source = Source(1, "d", hostile, "text", section=hostile, found=Ranking(0.5, (("dense", 1),)))
    for entry in transcript.source_entries([source], ENGLISH, "0a" * 12):
        out = rendered(entry["content"])
        assert re.findall(r'href="([^"]*)"', out) == [f"#cr-source-{'0a' * 12}-1"]
        assert not re.search(r"<(img|script|iframe|svg|input|form)\b", out, re.IGNORECASE)


def test_every_verdict_has_its_words() -> None:
    for word in ("verified", "similar", "unsupported"):
        assert transcript.verdict_words(word, ENGLISH).startswith(word)
    assert transcript.verdict_words(None, ENGLISH) == ""
    assert render.plain(transcript.how_found(Ranking(0.0491, (("lexical", 2),)), ENGLISH))


async def test_a_rating_and_a_comment_are_stored_and_replaced(runtime: Runtime, engine: FakeEngine) -> None:
    talk, finished = await ask(runtime, ANN)
    id = finished.message.id
    await desk.feedback(runtime, ANN, {"message": id, "rating": "bad"})
    await desk.feedback(runtime, ANN, {"message": id, "rating": "good", "comment": " Short <b>. "})
    stored = (await runtime.store.path(ANN, talk))[-1]
    assert stored.feedback == Feedback("good", "Short <b>.")
    assert "you found it helpful" in transcript.answer_entries(stored, (), ENGLISH)[0]["content"]
    exported = (await exports.export(runtime, ANN, talk))["messages"][-1]
    assert (exported["rating"], exported["comment"]) == ("good", "Short <b>.")
    await runtime.chat.delete(ANN, talk)
    with pytest.raises(NotFoundHere):
        await desk.feedback(runtime, ANN, {"message": id, "rating": "good"})


async def test_only_answers_of_ones_own_are_rated(runtime: Runtime, engine: FakeEngine) -> None:
    talk, finished = await ask(runtime, ANN)
    id, question = finished.message.id, finished.message.parent_id
    for who, message in ((BOB, id), (ANN, question), (ANN, None), (ANN, "x")):
        with pytest.raises(NotFoundHere):
            await desk.feedback(runtime, who, {"message": message, "rating": "good"})
    for asked in ({"rating": "great"}, {}, {"rating": "good", "comment": 5}):
        with pytest.raises(CommentRefused):
            await desk.feedback(runtime, ANN, {"message": id, **asked})
    long = {"message": id, "rating": "bad", "comment": "x" * (MAX_COMMENT + 1)}
    with pytest.raises(CommentRefused, match="at most 2,000"):
        await desk.feedback(runtime, ANN, long)
    assert (await runtime.store.path(ANN, talk))[-1].feedback is None
