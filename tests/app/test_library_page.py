"""The library page's calls and files: what they answer, to whom, and in which words."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from app.errors import NotFoundHere
from app.pages import library_calls, library_page, transcript
from app.pages.build import build_demo
from app.pages.library_files import DOWNLOADS_EACH, NAME_HEADER, _saved_as
from app.pages.library_source import choices_of, chosen, value_of
from app.pages.words import Words
from app.principal import Principal
from app.runtime import Runtime
from app.server import create_app
from app.store import Reference
from tests.app.fakes import CharTokenizer, FakeEngine
from tests.app.test_render import HOSTILE

HTML = {"accept": "text/html"}
MILL = b"# The mill\n\nThe mill at Tarn grinds barley.\n\n## Sails\n\nIt has four sails.\n"
EN, ZH = Words("en"), Words("zh-Hant")


class Browser:
    """One person's cookie jar, on another machine."""

    def __init__(self, runtime: Runtime, client: httpx.AsyncClient) -> None:
        self.runtime, self.client = runtime, client

    @property
    def principal(self) -> Principal:
        return self.runtime.principal({"cookie": self.cookie})

    @property
    def cookie(self) -> str:
        return "; ".join(f"{name}={value}" for name, value in self.client.cookies.items())

    async def send(self, data: bytes, name: str = "mill.md", path: str = "", **query: str) -> httpx.Response:
        from urllib.parse import quote

        headers = {NAME_HEADER: quote(name, safe=""), "content-type": "application/octet-stream"}
        return await self.client.post(f"/library/files{path}", content=data, params=query, headers=headers)

    async def add(self, data: bytes = MILL, name: str = "mill.md") -> str:
        response = await self.send(data, name)
        assert response.status_code == 200, response.text
        id: str = response.json()["id"]
        await self.runtime.knowledge._library.wait(id)
        return id

    async def call(self, name: str, asked: Any, language: str = "en") -> dict[str, Any]:
        functions = {fn.__name__: fn for fn in library_calls.functions(self.runtime)}
        headers = {"cookie": self.cookie, "accept-language": language}
        answer: dict[str, Any] = await functions[name](asked, SimpleNamespace(headers=headers))
        json.dumps(answer)  # it must reach the browser
        return answer


async def browser(runtime: Runtime) -> Browser:
    transport = httpx.ASGITransport(create_app(runtime, build_demo(runtime)), client=("10.0.0.7", 50_000))
    client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7860")
    assert (await client.get("/library", headers=HTML)).status_code == 200
    return Browser(runtime, client)


@pytest.fixture
async def ann(runtime: Runtime) -> AsyncIterator[Browser]:
    made = await browser(runtime)
    yield made
    await made.client.aclose()


@pytest.fixture
async def bob(runtime: Runtime) -> AsyncIterator[Browser]:
    made = await browser(runtime)
    yield made
    await made.client.aclose()


async def test_a_file_is_added_listed_read_and_fetched_again(ann: Browser) -> None:
    id = await ann.add(name="Mühle – 磨坊.md")
    look = await ann.call("look", {"follow": [id]})
    own = next(c for c in look["collections"] if c["own"])
    assert look["collections"][0] == own, "one's own come first"
    assert look["chosen"] == own["id"]
    (listed,) = look["documents"]
    assert [(d["id"], d["status"]) for d in look["followed"]] == [(id, "ready")]
    assert (listed["name"], listed["title"], listed["status"]) == ("Mühle – 磨坊.md", "The mill", "ready")
    assert (listed["own"], listed["problem"], listed["size"]) == (True, "", len(MILL))
    assert look["usage"]["documents"] == 1
    page = await ann.call("document", {"id": id})
    assert [s["title"] for s in page["sections"]] == ["The mill", "The mill › Sails"]
    assert [v["version"] for v in page["versions"]] == [1]
    assert "text" not in page["sections"][0]
    assert "four sails" in (await ann.call("section", {"id": id, "index": 1}))["text"]
    fetched = await ann.client.get(f"/library/files/{id}")
    assert fetched.content == MILL
    assert fetched.headers["content-type"] == "application/octet-stream"
    assert fetched.headers["content-disposition"].startswith("attachment; filename*=UTF-8''M%C3%BChle")
    assert fetched.headers.get_list("content-security-policy") == ["default-src 'none'; sandbox"]
    assert fetched.headers["x-content-type-options"] == "nosniff"


async def test_slow_readers_hold_a_piece_of_a_file_and_a_few_at_a_time(ann: Browser, bob: Browser) -> None:
    whole = b"<p>The mill grinds barley.</p><!--" + b"x" * 6_000_000 + b"-->"
    id = await ann.add(whole, "mill.html")
    app, pieces, slow = ann.client._transport.app, [], asyncio.Event()  # type: ignore[attr-defined]

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def read_slowly() -> None:
        async def send(message: Any) -> None:
            if message.get("body"):
                pieces.append(len(message["body"]))
                if len(pieces) == DOWNLOADS_EACH:
                    slow.set()
                await asyncio.Event().wait()

        headers = [(b"host", b"127.0.0.1:7860"), (b"cookie", ann.cookie.encode())]
        path = f"/library/files/{id}"
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "path": path,
            "raw_path": path.encode(), "root_path": "", "scheme": "http", "query_string": b"",
            "headers": headers, "client": ("10.0.0.7", 5), "server": ("127.0.0.1", 7860),
        }  # fmt: skip
        await app(scope, receive, send)

    readers = [asyncio.ensure_future(read_slowly()) for _ in range(DOWNLOADS_EACH)]
    await asyncio.wait_for(slow.wait(), 20.0)
    assert max(pieces) <= 2**18, "not the whole file for each"
    refused = await ann.client.get(f"/library/files/{id}")
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert "fetching 4 files" in refused.json()["error"]["message"]
    assert (await bob.client.get(f"/library/files/{id}")).status_code == 404, "a stranger learns nothing"
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    fetched = await ann.client.get(f"/library/files/{id}")
    assert fetched.content == whole
    assert int(fetched.headers["content-length"]) == len(whole)
    for _ in range(DOWNLOADS_EACH + 1):
        assert (await ann.client.get("/library/files/nothing")).status_code == 404, "a refusal holds no place"
    assert (await ann.client.get(f"/library/files/{id}")).status_code == 200


async def test_first_files_at_once_make_one_collection(ann: Browser) -> None:
    sent = await asyncio.gather(*(ann.send(MILL + bytes([48 + n]), f"{n}.md") for n in range(6)))
    assert [response.status_code for response in sent] == [200] * 6
    own = [c for c in (await ann.call("look", {}))["collections"] if c["own"]]
    assert [c["documents"] for c in own] == [6]


async def test_a_duplicate_names_the_document_that_is_there(ann: Browser) -> None:
    id = await ann.add(name="first.md")
    again = await ann.send(MILL, "second.md")
    assert again.json() == {
        "error": "This is in the collection already, as “first.md”.", "code": "duplicate_document",
        "existing": id,
    }  # fmt: skip


async def test_a_file_of_a_known_name_names_the_document_that_has_it(ann: Browser) -> None:
    assert (await ann.send(MILL)).json()["namesake"] == ""
    (known,) = (await ann.call("look", {}))["documents"]
    await ann.runtime.knowledge._library.wait(known["id"])
    assert abs(known["created"] - time.time()) < 60
    again = (await ann.send(MILL + b"\nAnd a door.\n")).json()
    assert again["namesake"] == known["id"] != again["id"]


async def test_a_failing_file_says_why_and_is_tried_again(ann: Browser) -> None:
    response = await ann.send(b"\x00\x01\x02" * 400, "photo.bin")
    id = response.json()["id"]
    await ann.runtime.knowledge._library.wait(id)
    (failed,) = (await ann.call("look", {}))["documents"]
    assert failed["status"] == "failed"
    assert len(failed["problem"]) > 10
    chinese = (await ann.call("look", {}, "zh-TW"))["documents"][0]["problem"]
    assert failed["problem"] in chinese
    assert any("\u4e00" <= c <= "\u9fff" for c in chinese)
    assert failed["retry"] is False  # its bytes stay what they are
    look = await ann.call("look", {})
    assert (look["total"], look["failed"], look["collections"][0]["failed"], look["usage"]["failed"]) == (
        1,
    ) * 4
    profile = (await ann.client.get("/profile", headers=HTML)).text
    assert "1 of them failed" in profile
    assert await ann.call("retry", {"id": id}) == {"done": True}
    assert (await ann.runtime.knowledge._library.wait(id)).status == "failed"
    assert (await ann.call("delete", {"id": id}))["passages"] == 0
    assert (await ann.call("look", {}))["documents"] == []


async def test_a_new_version_is_listed(ann: Browser) -> None:
    id = await ann.add()
    response = await ann.send(MILL + b"\nAnd a door.\n", "mill 2.md", f"/{id}")
    assert response.json() == {"id": id}
    await ann.runtime.knowledge._library.wait(id)
    old = Reference(1, id, 1, (await ann.call("look", {}))["chosen"], 0, 5)
    (source,) = await ann.runtime.knowledge.sources(ann.principal, [old])
    assert (source.available, source.replaced, source.text) == (False, True, "")
    assert "replaced by a newer version" in transcript.source_entries([source], EN)[0]["content"]
    assert "The mill&#44; an earlier version" in transcript.source_entries([source], EN)[0]["content"]
    page = await ann.call("document", {"id": id})
    assert [(v["version"], v["name"]) for v in page["versions"]] == [(2, "mill 2.md"), (1, "mill.md")]
    assert (await ann.send(MILL + b"\nAnd a door.\n", "x", f"/{id}")).json()["code"] == "duplicate_document"


async def test_too_large_is_refused_without_reading_on(ann: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    object.__setattr__(ann.runtime.settings, "max_upload_bytes", 2_000)
    try:
        response = await ann.send(b"x" * 3_000)
    finally:
        object.__setattr__(ann.runtime.settings, "max_upload_bytes", 20 * 2**20)
    assert response.status_code == 413
    assert response.json()["error"].startswith("The file is too large: at most 0.0 MiB")
    assert (await ann.send(b"")).json()["code"] == "upload_refused"


ASKED: list[tuple[str, Any]] = [
    ("document", {"id": "{d}"}), ("section", {"id": "{d}", "index": 0}), ("retry", {"id": "{d}"}),
    ("cancel", {"id": "{d}"}), ("weight", {"id": "{d}"}), ("weight", {"collection": "{c}"}),
    ("delete", {"id": "{d}"}), ("delete", {"collection": "{c}"}), ("pin", {"id": "{d}", "kept": True}),
    ("pin", {"id": "{d}", "kept": False}), ("warm", {"id": "{c}"}), ("warm", {"id": "{c}", "stop": True}),
    ("rename", {"id": "{c}", "name": "mine"}), ("share", {"id": "{c}", "name": "Ann"}),
    ("share", {"id": "{c}", "everybody": True}), ("share", {"id": "{c}", "out": "x"}),
    ("leave", {"id": "{c}"}),
]  # fmt: skip


async def test_a_stranger_gets_the_same_answer_as_for_nothing_at_all(ann: Browser, bob: Browser) -> None:
    id = await ann.add()
    collection = (await ann.call("look", {}))["chosen"]
    for name, asked in ASKED:
        answers = []
        for c, d in ((collection, id), ("c-nothing", "d-nothing")):
            filled = json.loads(json.dumps(asked).replace("{d}", d).replace("{c}", c))
            answers.append(await bob.call(name, filled))
        assert answers[0] == answers[1], (name, asked)
        assert set(answers[0]) == {"error"}, (name, asked)
    for path in (f"/{id}", "/d-nothing"):
        assert (await bob.client.get(f"/library/files{path}")).status_code == 404
        assert (await bob.send(b"# mine", "x.md", path)).status_code == 404
    assert (await bob.send(b"# mine", "x.md", collection=collection)).json() == (
        await bob.send(b"# mine", "x.md", collection="c-nothing")
    ).json()
    text = json.dumps(await bob.call("look", {"collection": collection, "follow": [id], "filter": "mill"}))
    assert id not in text
    assert collection not in text
    assert "mill.md" not in text
    assert (await ann.client.get(f"/library/files/{id}")).content == MILL


async def test_nobody_in_particular_gets_nothing(ann: Browser, client: httpx.AsyncClient) -> None:
    id = await ann.add()
    assert (await client.get(f"/library/files/{id}")).status_code == 401
    assert (await client.post(f"/library/files/{id}", content=b"x")).status_code == 401
    assert (await client.post("/library/files", content=b"x")).status_code == 401
    functions = {fn.__name__: fn for fn in library_calls.functions(ann.runtime)}
    answer = await functions["look"]({}, SimpleNamespace(headers={}))
    assert set(answer) == {"error"}
    other = {"sec-fetch-site": "cross-site"}
    assert (await ann.client.post("/library/files", content=b"x", headers=other)).status_code == 403


@pytest.mark.parametrize("asked", [None, [], "x", 7, {"id": 3}, {"id": None, "index": {}}, {"follow": "abc"},
                                   {"collection": ["x"], "filter": 9}])  # fmt: skip
async def test_nonsense_is_answered_with_a_sentence_or_the_page(ann: Browser, asked: Any) -> None:
    for function in library_calls.functions(ann.runtime):
        answer = await ann.call(function.__name__, asked)
        assert "error" in answer or function.__name__ == "look", function.__name__
        assert "wrong inside" not in answer.get("error", ""), function.__name__


async def test_what_others_read_is_a_sum_without_names(
    ann: Browser, bob: Browser, engine: FakeEngine
) -> None:
    id = await ann.add()
    talk = await ann.runtime.store.create(ann.principal, document_id=id)
    async for _ in ann.runtime.chat.ask(ann.principal, talk.id, "What does the mill grind?"):
        pass
    mine, theirs = await ann.call("look", {}), await bob.call("look", {})
    assert mine["others"] == {"blocks": 0, "open": 0}
    assert mine["documents"][0]["memory"]["open"] == 1
    assert theirs["others"] == {"blocks": 3, "open": 1}


async def test_a_filter_finds_names_and_titles(ann: Browser) -> None:
    await ann.add(b"# Barley\n\nOne.", "a.md")
    await ann.add(b"# Oats\n\nTwo.", "b.md")
    for wanted, titles in (("OATS", ["Oats"]), ("a.md", ["Barley"]), ("", ["Barley", "Oats"]), ("zebra", [])):
        look = await ann.call("look", {"filter": wanted})
        assert [d["title"] for d in look["documents"]] == titles
        assert look["total"] == 2


async def test_a_conversation_reads_one_collection_only(ann: Browser, engine: FakeEngine) -> None:
    runtime, who = ann.runtime, ann.principal
    await ann.add()
    views = await runtime.collections.readable(who)
    documents = await runtime.knowledge.documents(who)
    choices = choices_of(documents, views, EN)
    assert choices[0] == ("Search all documents", "")
    assert ("Collection: Own documents", f"collection:{views[0].id}") in choices
    assert ("只讀：The mill", documents[-1].id) in choices_of(documents, views, ZH) or len(documents) == 3

    async def read(value: str, question: str) -> str:
        talk = await runtime.store.create(who)
        await runtime.store.set_document(who, talk.id, *chosen(value))
        assert value_of(await runtime.store.conversation(who, talk.id)) == value
        before = len(engine.requests)
        async for _ in runtime.chat.ask(who, talk.id, question):
            pass
        asked = engine.requests[before:]  # none where the documents hold no answer
        return CharTokenizer().decode([t for r in asked for s in r.segments if s.document for t in s.tokens])

    own, mill = f"collection:{views[0].id}", "What does the mill at Tarn grind?"
    lighthouse = "When was the lighthouse on Gull Rock built?"
    assert "1871" in await read("", lighthouse)
    assert "1871" not in await read(own, lighthouse)
    assert "barley" in await read(own, mill)
    assert "barley" not in await read("collection:sample", mill)
    assert "opens at six" in await read("sample-bakery", lighthouse)
    for gone in ("collection:c-nothing", "collection:"):
        with pytest.raises(NotFoundHere, match="choose another"):
            await read(gone, "And now?")


@pytest.mark.parametrize("hostile", [*HOSTILE, "../../etc/passwd", "..\\x", "a\x00b", "CON.txt", "x" * 300])
async def test_hostile_names_are_data(ann: Browser, hostile: str) -> None:
    id = await ann.add(MILL + repr(hostile).encode(), hostile)
    fetched = await ann.client.get(f"/library/files/{id}")
    assert "\n" not in fetched.headers["content-disposition"]
    saved = _saved_as(hostile)
    assert not set('\\/:*?"<>|\n\r\0') & set(saved)
    assert not saved.startswith(".")
    assert len(saved) <= 150
    page = await ann.call("document", {"id": id})
    assert page["document"]["name"]


def test_the_script_makes_no_markup_of_data() -> None:
    script = library_page.script()
    for sink in ("innerHTML", "insertAdjacentHTML", "outerHTML", "document.write", "eval("):
        assert sink not in script
