"""The list of conversations and the files made of them: found, renamed, exported, by their owner only."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from app import exports, render
from app.errors import NotFoundHere, TitleRefused, ValueRefused
from app.pages.conversations import ConversationHandlers
from app.pages.handlers import ChatHandlers
from app.principal import Principal
from app.runtime import Runtime
from app.store import Reference
from engine.errors import StepFailed
from engine.types import Delta
from tests.app.fakes import FakeEngine, failing
from tests.app.test_chat import ANN, BOB, QUESTION, ask, run, says
from tests.app.test_render import HOSTILE, rendered


async def test_a_search_looks_into_titles_and_messages_of_ones_own(
    runtime: Runtime, engine: FakeEngine
) -> None:
    engine.script = says("It opens at six, 100% sure.")
    first, _ = await ask(runtime, ANN, "When does the bakery open?")
    second, _ = await ask(runtime, ANN, QUESTION)
    await ask(runtime, BOB, "When does the bakery open? Bob's own words")

    async def found(query: str, who: Principal = ANN) -> list[str]:
        return [talk.id for talk in await runtime.store.conversations(who, query=query)]

    assert await found("") == [second, first]
    assert await found("BAKERY") == [first]
    assert await found("100% sure") == [second, first], "answers are searched too"
    assert await found("  OPENS   at six, ") == [second, first]
    for nothing in ("Bob's own words", "100_ sure", "1%6", "\\", "x" * 100):
        assert await found(nothing) == []
    with pytest.raises(ValueRefused, match="10,000 characters; at most 100"):
        await found("x" * 10_000)


async def test_a_search_that_nearly_matches_everywhere_is_cheap(runtime: Runtime) -> None:
    """A `LIKE` compares its whole pattern at every character: 3 s for these, on one of eight readers."""
    talk = await runtime.store.create(ANN, "Letters")
    for _ in range(200):
        await runtime.store.add_message(ANN, talk.id, None, "user", "a" * 16_000)
    began = time.process_time()
    assert await runtime.store.conversations(ANN, query="A" * 99 + "b") == []
    assert time.process_time() - began < 1.0
    assert [found.id for found in await runtime.store.conversations(ANN, query="A" * 100)] == [talk.id]


async def test_a_search_has_an_end_and_lets_others_read_in_between(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for word in ("oldest", "older", "newest"):
        talk = await runtime.store.create(ANN, word.title())
        for _ in range(4):
            await runtime.store.add_message(ANN, talk.id, None, "user", f"the {word} of the words")
        made.append(talk.id)
    reads = 0
    real = runtime.store._db.read

    async def counted(work: Any) -> Any:
        nonlocal reads
        reads += 1
        return await real(work)

    monkeypatch.setattr(runtime.store._db, "read", counted)

    async def found(query: str) -> list[str]:
        return [talk.id for talk in await runtime.store.conversations(ANN, query=query)]

    monkeypatch.setattr("app.store._SLICE_BYTES", 600)
    assert await found("older of") == [made[1]]
    assert reads > 5, "a slice of the messages at a time"
    monkeypatch.setattr("app.store.SEARCHED_BYTES", 2_000)
    assert await found("newest of") == [made[2]]
    assert await found("oldest of") == [], "further back than a search goes"
    assert await found("oldest") == [made[0]], "titles are all searched"


async def test_one_persons_searches_run_one_after_the_other(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[str] = []
    most = {"mine": 0, "all": 0}
    gate, both = asyncio.Event(), asyncio.Event()

    async def slow(principal: Principal, query: str, limit: int) -> list[Any]:
        running.append(principal.id)
        if principal == BOB:
            both.set()
        most["mine"] = max(most["mine"], running.count(ANN.id))
        most["all"] = max(most["all"], len(running))
        try:
            await gate.wait()
        finally:
            running.remove(principal.id)
        return []

    monkeypatch.setattr(runtime.store, "_search", slow)
    asked = [asyncio.ensure_future(runtime.store.conversations(ANN, query="a")) for _ in range(5)]
    asked.append(asyncio.ensure_future(runtime.store.conversations(BOB, query="a")))
    await asyncio.wait_for(both.wait(), 10.0)
    asked[0].cancel()
    gate.set()
    await asyncio.gather(*asked, return_exceptions=True)
    assert most == {"mine": 1, "all": 2}
    asked.clear()
    gc.collect()  # a cancelled one's traceback holds its frame
    assert not runtime.store._searching._locks


@pytest.mark.parametrize("title", ["", "  \n ", "x" * 121])
async def test_impossible_titles_are_refused(runtime: Runtime, title: str) -> None:
    talk = await runtime.store.create(ANN, "Before")
    with pytest.raises(TitleRefused, match="at most 120"):
        await runtime.store.rename(ANN, talk.id, title)
    assert (await runtime.store.conversation(ANN, talk.id)).title == "Before"


async def test_a_title_is_changed_by_the_owner_and_survives_the_next_turn(
    runtime: Runtime, engine: FakeEngine
) -> None:
    talk, _ = await ask(runtime, ANN)
    with pytest.raises(NotFoundHere):
        await runtime.store.rename(BOB, talk, "Mine")
    assert await runtime.store.rename(ANN, talk, "  Gull \n Rock ") == "Gull Rock"
    await ask(runtime, ANN, "And its lamp?", talk)
    assert (await runtime.store.conversation(ANN, talk)).title == "Gull Rock"


def browser(runtime: Runtime) -> tuple[Principal, Any]:
    """A visitor and the request that Gradio hands to a handler."""
    principal, cookie = runtime.signer.issue()
    headers = {"cookie": f"{runtime.signer.name}={cookie}"}
    return principal, SimpleNamespace(headers=headers, session_hash=cookie)


async def test_the_page_lists_filters_and_renames(
    runtime: Runtime, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = ConversationHandlers(runtime)
    ann, request = browser(runtime)
    talk, _ = await ask(runtime, ann, "When does the bakery open?")
    other, _ = await ask(runtime, ann)
    loaded = await handlers.load(None, request)
    assert [id for _, id in loaded["history"]["choices"]] == [other, talk]
    assert "opened" not in loaded
    filtered = await handlers.search("bakery", other, request)
    assert [id for _, id in filtered["history"]["choices"]] == [talk]
    assert "search" not in filtered, "what is being typed stays"
    assert (await handlers.search("zebra", None, request))["history"]["visible"] is True
    assert (await handlers.load(None, request))["history"]["choices"] == [], "still searched for"
    monkeypatch.setattr("gradio.Warning", lambda text, **_: None)
    assert await handlers.search("x" * 10_000, None, request) == {}
    assert (await handlers.load(None, request))["history"]["choices"] == [], "that one was refused"
    cleared = await handlers.search("  \n" + " " * 100_000, None, request)
    assert len(cleared["history"]["choices"]) == 2
    assert handlers._searched == {}, "nothing is kept for who searches for nothing"
    await handlers.search("zebra \n" + " " * 100_000, None, request)
    assert list(handlers._searched.values()) == ["zebra"]
    await handlers.search("", None, request)
    opened = await handlers.open(talk, request)
    assert opened["title"] == "When does the bakery open?"
    renamed = await handlers.rename(" Bread\n", talk, request)
    assert renamed["title"] == "Bread"
    assert "title" not in await handlers.rename("Bread", talk, request), (
        "nothing is written over what follows"
    )
    assert ("Bread", talk) in renamed["history"]["choices"]
    gone = await handlers.delete(talk, request)
    assert [id for _, id in gone["history"]["choices"]] == [other]
    assert gone["opened"]["visible"] == "hidden"


async def test_an_answer_that_ends_leaves_what_is_being_typed(runtime: Runtime, engine: FakeEngine) -> None:
    talks = ConversationHandlers(runtime)
    handlers = ChatHandlers(runtime, talks)
    _, request = browser(runtime)
    written: list[set[str]] = []
    conversation: str | None = None
    for _ in range(2):
        outputs = [o async for o in handlers.ask(QUESTION, conversation, None, request)]
        conversation = next(o["conversation"] for o in outputs if "conversation" in o)
        last = outputs[-1]
        written.append({"search", "title"} & set(last))
        assert "value" not in last.get("search", {})
        assert last["history"]["value"] == conversation
    assert written == [{"search", "title"}, set()], "the first answer gives a title, no other touches it"
    await talks.search("zebra", conversation, request)
    outputs = [o async for o in handlers.regenerate(conversation, request)]
    assert outputs[-1]["history"]["choices"] == [], "the list stays what was searched for"


async def test_a_search_that_changes_while_the_list_is_made_decides(
    runtime: Runtime, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = ConversationHandlers(runtime)
    ann, request = browser(runtime)
    talk, _ = await ask(runtime, ann, "When does the bakery open?")
    await ask(runtime, ann)
    asked, go_on = asyncio.Event(), asyncio.Event()
    conversations = runtime.store.conversations

    async def slowly(who: Principal, query: str = "") -> Any:
        found = await conversations(who, query=query)
        if not query:
            asked.set()
            await go_on.wait()
        return found

    monkeypatch.setattr(runtime.store, "conversations", slowly)
    after_turn = asyncio.create_task(handlers.listed(request, talk))
    await asked.wait()
    await handlers.search("bakery", talk, request)
    go_on.set()
    assert [id for _, id in (await after_turn)["history"]["choices"]] == [talk]


async def test_what_comes_late_is_not_written_on_another_conversation(
    runtime: Runtime, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    talks = ConversationHandlers(runtime)
    handlers = ChatHandlers(runtime, talks)
    ann, request = browser(runtime)
    await ask(runtime, ann, "When does the bakery open?")
    for late in ("entries", "after_turn"):
        whole = getattr(talks, late)

        async def slowly(*given: Any, whole: Any = whole) -> Any:
            made = await whole(*given)
            talks.take(request)  # the person opens another one
            return made

        outputs = []
        async for output in handlers.ask(QUESTION, None, None, request):
            outputs.append(output)
            if "Stop" in str(output.get("question", "")):
                monkeypatch.setattr(talks, late, slowly)
        monkeypatch.undo()
        assert not any("history" in output or "Receipt" in str(output) for output in outputs)


async def test_a_conversation_deleted_elsewhere_leaves_no_page_waiting(
    runtime: Runtime, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("gradio.Warning", lambda text, **_: said.append(text))
    engine.script = [Delta(0, "Hel", (82,)), "hold"]
    talks = ConversationHandlers(runtime)
    _, request = browser(runtime)
    _, other_tab = browser(runtime)
    other_tab.headers = request.headers
    conversation = ""
    shown: dict[str, Any] = {}
    async for output in ChatHandlers(runtime, talks).ask(QUESTION, None, None, request):
        shown |= output
        conversation = output.get("conversation", conversation)
        if "Hel" in str(output.get("chat", "")) and not said:
            await talks.delete(conversation, other_tab)
            said.append("deleted")
    assert shown["question"]["stop_btn"] is False, "nothing runs any more"
    assert said == ["deleted", "There is no such conversation&#46;"]
    assert "There is no such conversation" in str(shown["chat"])


async def test_a_first_question_that_failed_is_listed(
    runtime: Runtime, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.pages.handlers.tell", lambda error, request: None)
    engine.script = failing(StepFailed("The device is gone."))
    handlers = ChatHandlers(runtime, ConversationHandlers(runtime))
    _, request = browser(runtime)
    outputs = [o async for o in handlers.ask(QUESTION, None, None, request)]
    assert "The device is gone" in str(outputs[-1]["chat"])
    assert outputs[-1]["title"] == QUESTION
    assert outputs[-1]["opened"]["visible"] is True
    assert len(outputs[-1]["history"]["choices"]) == 1


async def test_a_stranger_opens_renames_and_deletes_nothing(
    runtime: Runtime, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("gradio.Warning", lambda text, **_: said.append(text))
    handlers = ConversationHandlers(runtime)
    _, request = browser(runtime)
    talk, _ = await ask(runtime, ANN)
    assert await handlers.open(talk, request) == {}
    assert await handlers.rename("Mine", talk, request) == {}
    assert await handlers.delete(talk, request) == {}
    assert len(said) == 3
    assert (await runtime.store.conversation(ANN, talk)).title == QUESTION


async def test_an_export_holds_every_branch_and_its_citations(runtime: Runtime, engine: FakeEngine) -> None:
    engine.script = says("The lighthouse on Gull Rock was built in 1871.")
    talk, first = await ask(runtime, ANN)
    assert first.message.parent_id is not None
    await run(runtime.chat.regenerate(ANN, talk, first.message.parent_id))
    exported = json.loads(json.dumps(await exports.export(runtime, ANN, talk)))
    assert exported["format"] == exports.FORMAT
    assert [m["role"] for m in exported["messages"]] == ["user", "assistant", "assistant"]
    assert exported["branch"] == [exported["messages"][0]["id"], exported["messages"][2]["id"]]
    source = exported["messages"][1]["sources"][0]
    document = await runtime.knowledge.document(frozenset({"sample"}), source["document"])
    assert document.text[source["start"] : source["end"]] == source["text"]
    assert source["verdict"] == "verified"
    assert source["ranks"]
    text = exports.markdown(exported)
    assert text.count("## Answer") == 1, "one branch"
    assert "**[1]** **The lighthouse**" in text
    assert "> The lighthouse on Gull Rock was built in 1871." in text


async def test_an_export_keeps_nothing_of_a_deleted_document(runtime: Runtime, engine: FakeEngine) -> None:
    document = await runtime.knowledge.upload(ANN, "mill.md", b"# The mill\n\nThe mill grinds barley.")
    async for _ in runtime.knowledge.progress(ANN, document, 0.1):
        pass
    talk, finished = await ask(runtime, ANN, "What does the mill grind?")
    assert finished.sources[0].title == "The mill"
    await runtime.knowledge.delete(ANN, document)
    exported = await exports.export(runtime, ANN, talk)
    assert "barley" not in json.dumps(exported)
    assert {"number": 1, "available": False} in exported["messages"][1]["sources"]
    assert "deleted or is no longer shared" in exports.markdown(exported)


@pytest.mark.parametrize("hostile", HOSTILE)
async def test_an_exported_file_fetches_nothing(runtime: Runtime, engine: FakeEngine, hostile: str) -> None:
    engine.script = says(hostile)
    talk, _ = await ask(runtime, ANN, hostile)
    out = rendered(exports.markdown(await exports.export(runtime, ANN, talk))).lower()
    for tag in ("<a ", "<img", "<script", "<iframe"):
        assert tag not in out


async def test_an_export_of_whole_documents_quotes_their_beginning_off_the_event_loop(
    runtime: Runtime, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann, cookie = runtime.signer.issue()
    client.cookies.set(runtime.signer.name, cookie)
    line = "The mill at *Tarn* grinds barley & never [on](http://x) Sundays.\n\n"
    document = await runtime.shelf.add(ann, None, "mill.md", f"# Mill\n\n{line * 400}".encode())
    await runtime.knowledge._library.wait(document)
    whole = await runtime.knowledge.document(await runtime.store.readable(ann), document)
    reference = Reference(1, document, whole.version, whole.collection_id, 0, len(whole.text))
    talk, parent = await runtime.store.create(ann), None
    for _ in range(3):
        asked = await runtime.store.add_message(ann, talk.id, parent, "user", "What?")
        answer = await runtime.store.add_message(
            ann, talk.id, asked.id, "assistant", "No.", references=[reference]
        )
        parent = answer.id
    on: list[int] = []
    real = render.answer

    def noted(text: str) -> str:
        on.append(threading.get_ident())
        assert len(text) <= render.MAX_QUOTED + 2
        return real(text)

    monkeypatch.setattr(render, "answer", noted)
    for ending in ("md", "json"):
        response = await client.get(f"/conversations/{talk.id}/export.{ending}")
        assert response.status_code == 200
        assert response.text.count("grinds barley") == 3 * (whole.text[: render.MAX_QUOTED].count("grinds"))
    sources = [source for message in response.json()["messages"] for source in message["sources"]]
    assert [source["end"] for source in sources] == 3 * [len(whole.text)]
    assert on
    assert threading.get_ident() not in on


async def test_one_persons_exports_are_made_one_after_the_other(
    runtime: Runtime, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann, cookie = runtime.signer.issue()
    client.cookies.set(runtime.signer.name, cookie)
    talk = await runtime.store.create(ann)
    inside, most = 0, 0
    real = exports.export

    async def noted(*given: Any) -> dict[str, Any]:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.01)
        inside -= 1
        return await real(*given)

    monkeypatch.setattr(exports, "export", noted)
    answers = await asyncio.gather(*(client.get(f"/conversations/{talk.id}/export.md") for _ in range(5)))
    assert [answer.status_code for answer in answers] == [200] * 5
    assert most == 1


async def test_the_route_serves_a_file_to_the_owner_only(
    runtime: Runtime, client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    ann, request = browser(runtime)
    talk, _ = await ask(runtime, ann, 'Café "x"\r\nset-cookie: a')
    _, stranger = browser(runtime)
    for ending, kind in (("md", "text/markdown"), ("json", "application/json")):
        url = f"/conversations/{talk}/export.{ending}"
        answer = await client.get(url, headers=request.headers)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        assert answer.headers["content-disposition"].startswith('attachment; filename="coread-caf-x-')
        assert answer.headers["cache-control"] == "no-store"
        assert "Hello." in answer.text
        assert (await client.get(url, headers=stranger.headers)).status_code == 404
        assert (await client.get(url)).status_code == 401
    unknown = await client.get(f"/conversations/{'0' * 24}/export.md", headers=request.headers)
    assert unknown.status_code == 404
