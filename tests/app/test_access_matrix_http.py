"""The access matrix through the real doors: a served page in accounts mode, every credential, every action.

Ann owns a document that she shared with Bob, and a conversation about it. Each cell is one HTTP exchange (or
one event of the page), judged by whether the secret came back or the deed was done. `docs/security.md` shows
the same table; the last test holds it in step.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from app.pages.build import build_demo
from app.principal import Principal
from app.runtime import Runtime
from app.server import bind, create_app
from app.settings import Settings, load_settings
from app.store import Reference
from bench.load_page import Layout, Measured, Page, PageError, PageRefused
from engine.service import Generation
from engine.types import GenerationRequest
from tests.app.fakes import CharTokenizer
from tests.app.small_engine import SmallEngine

SECRET = "# The vault\n\nThe zebra password of the vault is Quintessence.\n"
QUESTION = "What is the zebra password of the vault?"
PASSWORD = "correct horse"
DOCS = Path(__file__).parents[2] / "docs" / "security.md"
BEGIN, END = "<!-- access matrix: kept in step by a test -->", "<!-- end of the access matrix -->"

WHO = (
    "owner", "granted reader", "stranger", "administrator", "nobody", "ended session",
    "owner's key", "reader's key", "stranger's key", "administrator's key", "revoked key",
)  # fmt: skip
_SIGNED_IN = {"owner", "granted reader", "stranger", "administrator"}
_KEYS = {"owner's key", "reader's key", "stranger's key", "administrator's key"}
_READERS = {"owner", "granted reader"}
#: Who may, by action. Whoever is not named here must be refused.
MAY: dict[str, set[str]] = {
    "open the page": _SIGNED_IN,
    "list the document": _READERS,
    "find it by searching": _READERS,
    "ask about it alone": _READERS,
    "see it cited in an older answer": _READERS,
    "open it behind a citation": _READERS,
    "see its name on the memory page (block hover)": _READERS,
    "download the stored file by its path": set(),
    "open the conversation": {"owner"},
    "download the conversation": {"owner"},
    "see the conversation's row on the memory page": {"owner"},
    "see the conversation's blocks in the memory panel": {"owner"},
    "the same from `/api/memory`": {"owner"},
    "see counts on the memory page": _SIGNED_IN,
    "use `/v1`": _KEYS,
    "get the document's text through `/v1`": {"owner's key", "reader's key"},
    "`/metrics`": {"administrator", "administrator's key"},
    "list and add people": {"administrator"},
    "`/api/admin`": set(),
    "see the document in the library": _READERS,
    "read a section of it there": _READERS,
    "download its file there": _READERS,
    "put a new version in its place": {"owner"},
    "see what deleting it would free": {"owner"},
    "keep it in memory": {"owner"},
    "add to its collection": {"owner"},
    "share its collection": {"owner"},
    "delete the document": {"owner"},
}


class Recording(SmallEngine):
    """Keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(blocks=600, threaded=True)
        self.asked: list[str] = []

    async def submit(self, request: GenerationRequest) -> Generation:
        self.asked.append(CharTokenizer().decode([t for s in request.segments for t in s.tokens]))
        return await super().submit(request)


@dataclass(slots=True)
class World:
    runtime: Runtime
    engine: Recording
    url: str
    layout: Layout
    document: str
    collection: str
    version: int
    conversation: str
    headers: dict[str, dict[str, str]]
    #: Of everybody with an account: an answer of their own that cites the document, and its conversation.
    cited: dict[str, tuple[str, str]] = field(default_factory=dict)

    def page(self, who: str) -> Page:
        made = Page(self.url, Measured(), self.headers[who])
        made.layout = self.layout
        return made

    def citation(self, who: str) -> tuple[str, str]:
        return self.cited.get(who, self.cited["owner"])


@pytest.fixture(autouse=True)
def cheap_scrypt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.passwords._N", 2**4)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(data_dir=tmp_path / "data", answer_tokens=8, access="accounts")


@pytest.fixture
def engine() -> Recording:
    return Recording()


@pytest.fixture
async def world(runtime: Runtime, engine: Recording) -> AsyncIterator[World]:
    people = await _people(runtime)
    listener = bind("127.0.0.1", 0)
    config = uvicorn.Config(
        create_app(runtime, build_demo(runtime)), log_level="error", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
    ann = people["owner"]
    document = await runtime.knowledge.upload(ann, "vault.md", SECRET.encode())
    async for _ in runtime.knowledge.progress(ann, document, 0.05):
        pass
    view = next(d for d in await runtime.knowledge.documents(ann) if d.id == document)
    await runtime.store.grant(view.collection_id, people["granted reader"].id)
    talk = await runtime.store.create(ann, document_id=document)
    async for _ in runtime.chat.ask(ann, talk.id, QUESTION):
        pass
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    headers = await _credentials(runtime, people)
    first = Page(url, Measured(), headers["owner"])
    await first.load()
    await first.close()
    assert first.layout is not None
    made = World(
        runtime, engine, url, first.layout, document, view.collection_id, view.version, talk.id, headers
    )
    for who, principal in people.items():
        made.cited[who] = await _cite(made, principal)
    yield made
    server.should_exit = True
    await running
    listener.close()


async def _people(runtime: Runtime) -> dict[str, Principal]:
    names = {"owner": "Ann", "granted reader": "Bob", "stranger": "Eve", "administrator": "Root"}
    return {
        who: (
            await runtime.accounts.create(
                name, PASSWORD, "administrator" if who == "administrator" else "reader"
            )
        ).principal
        for who, name in names.items()
    }


async def _credentials(runtime: Runtime, people: dict[str, Principal]) -> dict[str, dict[str, str]]:
    async def signed_in(who: str) -> dict[str, str]:
        name = runtime.accounts.account(people[who].id).name
        token = await runtime.accounts.sign_in(name, PASSWORD, "127.0.0.1", "test")
        return {"cookie": f"{runtime.signer.name}_s={token}"}

    async def key(owner: str) -> tuple[str, dict[str, str]]:
        made, secret = await runtime.keys.create("key", people[owner].id)
        return made.id, {"authorization": f"Bearer {secret}"}

    headers = {who: await signed_in(who) for who in people}
    ended = await signed_in("owner")
    await runtime.accounts.sign_out(ended)
    revoked, old = await key("owner")
    await runtime.keys.revoke(revoked)
    # An identity cookie of open mode, properly signed, is nobody where people sign in.
    _, cookie = runtime.signer.issue()
    headers |= {"nobody": {"cookie": f"{runtime.signer.name}={cookie}"}, "ended session": ended}
    headers |= {"revoked key": old}
    for who, owner in (
        ("owner's key", "owner"), ("reader's key", "granted reader"), ("stranger's key", "stranger"),
        ("administrator's key", "administrator"),
    ):  # fmt: skip
        _, headers[who] = await key(owner)
    return headers


async def _cite(world: World, who: Principal) -> tuple[str, str]:
    """An answer that was written while its reader could read the document."""
    talk = await world.runtime.store.create(who)
    asked = await world.runtime.store.add_message(who, talk.id, None, "user", "An older question")
    reference = Reference(1, world.document, world.version, world.collection, 0, len(SECRET))
    answer = await world.runtime.store.add_message(
        who, talk.id, asked.id, "assistant", "An older answer [1].", references=(reference,)
    )
    return talk.id, answer.id


# What each cell does


async def opens_the_page(world: World, page: Page, who: str) -> bool:
    await page.load()
    return True


async def lists(world: World, page: Page, who: str) -> bool:
    await page.load()
    return world.document in page.documents


async def _asks(world: World, page: Page, document: str) -> bool:
    await page.load()
    before = len(world.engine.asked)
    await page.ask(QUESTION, document)
    return any("Quintessence" in prompt for prompt in world.engine.asked[before:])


async def searches(world: World, page: Page, who: str) -> bool:
    return await _asks(world, page, "")


async def chooses(world: World, page: Page, who: str) -> bool:
    return await _asks(world, page, world.document)


async def is_shown_a_citation(world: World, page: Page, who: str) -> bool:
    response = await page.http.get(f"/conversations/{world.citation(who)[0]}/export.json")
    assert ("Quintessence" in response.text) == ("The vault" in response.text)
    return "Quintessence" in response.text


async def opens_behind_a_citation(world: World, page: Page, who: str) -> bool:
    asked = {"message": world.citation(who)[1], "number": 1}
    return "Quintessence" in json.dumps(await page.served("cr-desk", "source", asked, "source"))


async def hovers(world: World, page: Page, who: str) -> bool:
    blocks = [n for n in range(600) if world.document in _documents(world, n)]
    assert blocks, "no block of the document is in memory"
    shown = await page.served("cr-dashboard", "block", blocks[0], "hover")
    return "vault" in json.dumps(shown)


def _documents(world: World, block: int) -> frozenset[str]:
    view = world.runtime.engine.block(block)
    return view.documents if view is not None else frozenset()


async def downloads_the_file(world: World, page: Page, who: str) -> bool:
    folder = world.runtime.upload_dir.parents[1]
    stored = [path for path in folder.rglob("*") if path.is_file() and path.read_bytes() == SECRET.encode()]
    assert stored, "the uploaded file is not stored"
    spellings = [f"/gradio_api/file={path}" for path in stored] + [f"/file={path}" for path in stored]
    return any("Quintessence" in text for text in [(await page.http.get(path)).text for path in spellings])


async def opens_the_conversation(world: World, page: Page, who: str) -> bool:
    await page.load()
    return QUESTION in json.dumps(await page.act("open", [world.conversation], "open"))


async def downloads_the_conversation(world: World, page: Page, who: str) -> bool:
    files = [
        (await page.http.get(f"/conversations/{world.conversation}/export.{kind}")).text
        for kind in ("md", "json")
    ]
    assert len({QUESTION in text for text in files}) == 1
    return QUESTION in files[0]


async def sees_its_row(world: World, page: Page, who: str) -> bool:
    shown = await page.dashboard(world.conversation)
    assert (world.conversation in json.dumps(shown)) == (shown["conversation"] == world.conversation)
    return bool(shown["conversation"] == world.conversation)


async def sees_its_blocks(world: World, page: Page, who: str) -> bool:
    page.conversation = world.conversation
    return bool((await page.memory())["mine_blocks"])


async def reads_api_memory(world: World, page: Page, who: str) -> bool:
    response = await page.http.get(f"/api/memory?conversation={world.conversation}")
    return response.status_code == 200 and bool(response.json()["mine_blocks"])


async def sees_counts(world: World, page: Page, who: str) -> bool:
    return bool((await page.dashboard())["open"]["everybody"]["conversations"])


async def uses_v1(world: World, page: Page, who: str) -> bool:
    return (await page.http.get("/v1/models")).status_code == 200


async def reads_through_v1(world: World, page: Page, who: str) -> bool:
    before = len(world.engine.asked)
    body = {"model": "coread", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4}
    response = await page.http.post("/v1/chat/completions", json=body)
    assert response.status_code in (200, 401)
    return any("Quintessence" in prompt for prompt in world.engine.asked[before:])


async def reads_metrics(world: World, page: Page, who: str) -> bool:
    return "coread:up" in (await page.http.get("/metrics")).text


async def manages_people(world: World, page: Page, who: str) -> bool:
    listed = (await page.http.get("/people")).text
    form = {"name": f"New {who}", "password": PASSWORD, "role": "administrator"}
    await page.http.post("/people", data=form)
    made = any(account.name == f"New {who}" for account in world.runtime.accounts.accounts())
    assert made == ("Root" in listed)
    return made


async def commands(world: World, page: Page, who: str) -> bool:
    return (await page.http.get("/api/admin/status")).status_code == 200


async def _library(page: Page, call: str, asked: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = await page.served("cr-library", call, asked, "library")
    if "error" in answer:
        raise PageRefused(answer["error"])
    return answer


async def sees_it_in_the_library(world: World, page: Page, who: str) -> bool:
    shown = await _library(page, "look", {"collection": world.collection, "follow": [world.document]})
    assert (world.document in json.dumps(shown)) == ("The vault" in json.dumps(shown))
    return world.document in json.dumps(shown)


async def reads_a_section(world: World, page: Page, who: str) -> bool:
    shown = await _library(page, "section", {"id": world.document, "index": 0})
    return "Quintessence" in shown["text"]


async def downloads_the_original(world: World, page: Page, who: str) -> bool:
    return "Quintessence" in (await page.http.get(f"/library/files/{world.document}")).text


async def replaces(world: World, page: Page, who: str) -> bool:
    text = f"{SECRET}\nChanged by {who}.\n".encode()
    response = await page.http.post(f"/library/files/{world.document}", content=text)
    if response.status_code != 200:
        return False
    library = world.runtime.knowledge._library
    changed = (await library.wait(world.document)).version
    await library.replace_document(world.document, "vault.md", SECRET.encode(), "test")
    await library.wait(world.document)
    return changed > 1


async def weighs(world: World, page: Page, who: str) -> bool:
    return (await _library(page, "weight", {"id": world.document}))["passages"] > 0


async def pins(world: World, page: Page, who: str) -> bool:
    await _library(page, "pin", {"id": world.document, "kept": True})
    kept = world.document in await world.runtime.store.pins()
    await _library(page, "pin", {"id": world.document, "kept": False})
    return kept


async def adds(world: World, page: Page, who: str) -> bool:
    address = f"/library/files?collection={world.collection}"
    before = await world.runtime.knowledge._library.documents([world.collection])
    await page.http.post(address, content=f"# From {who}\n\nA text.".encode())
    return len(await world.runtime.knowledge._library.documents([world.collection])) > len(before)


async def shares(world: World, page: Page, who: str) -> bool:
    # With a reader who has it already, so that nobody's rights change.
    return bool(await _library(page, "share", {"id": world.collection, "name": "Bob"}))


async def deletes(world: World, page: Page, who: str) -> bool:
    await _library(page, "delete", {"id": world.document})
    listed = await world.runtime.knowledge._library.documents([world.collection])
    return world.document not in {info.id for info in listed}


Action = Callable[[World, Page, str], Awaitable[bool]]
ACTIONS: dict[str, Action] = dict(
    zip(
        MAY,
        (
            opens_the_page, lists, searches, chooses, is_shown_a_citation, opens_behind_a_citation, hovers,
            downloads_the_file, opens_the_conversation, downloads_the_conversation, sees_its_row,
            sees_its_blocks, reads_api_memory, sees_counts, uses_v1, reads_through_v1, reads_metrics,
            manages_people, commands, sees_it_in_the_library, reads_a_section, downloads_the_original,
            replaces, weighs, pins, adds, shares, deletes,
        ),
        strict=True,
    )
)  # fmt: skip


async def cell(world: World, action: str, who: str) -> bool:
    """True where the deed was done. A refusal of the page or of a door is what False means; anything else
    that goes wrong is a fault of the server or of the test."""
    page = world.page(who)
    try:
        return await ACTIONS[action](world, page, who)
    except (PageError, PageRefused):
        return False
    finally:
        await page.close()


async def test_every_cell(world: World) -> None:
    seen: dict[str, set[str]] = {}
    for action in ACTIONS:
        # The owner comes last: what she deletes is gone for everybody.
        seen[action] = {who for who in reversed(WHO) if await cell(world, action, who)}
    assert seen == MAY


def table() -> str:
    """The matrix as Markdown."""
    rows: list[Any] = [f"| | {' | '.join(WHO)} |", "|---" * (len(WHO) + 1) + "|"]
    rows += [
        f"| {action} | {' | '.join('yes' if who in may else '·' for who in WHO)} |"
        for action, may in MAY.items()
    ]
    return "\n".join(rows)


def test_the_document_shows_this_table() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert BEGIN in text
    shown = text.split(BEGIN, 1)[1].split(END, 1)[0].strip()
    assert shown == table(), f"docs/security.md must show:\n{table()}"
