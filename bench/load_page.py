"""One reader's browser over HTTP: loads the page, joins Gradio's queue, follows its event stream, polls the
memory feed. Everything that it does is timed; nothing is asserted here."""

from __future__ import annotations

import asyncio
import html
import json
import re
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

HTML = {"accept": "text/html"}
#: A page action that has not ended by then counts as hanging.
ACTION_S = 60.0
#: So has a question: what is not answered by then within a phase of ten minutes counts as an error.
ANSWER_S = 240.0
_CONFIG = re.compile(r"window\.gradio_config = (\{.*?\});</script>", re.DOTALL)


class PageError(Exception):
    """The server answered a reader with something that is neither a result nor a clean refusal."""


class PageRefused(Exception):
    """The page shows a warning; the message is what it says."""


@dataclass(slots=True)
class Measured:
    """What all readers of one phase saw. Times in seconds, by action."""

    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    errors: list[str] = field(default_factory=list)
    refusals: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    answers: int = 0
    stopped: int = 0
    #: Readers who left while something was still running for them.
    left: int = 0
    #: What went wrong in the measuring itself: with it, the figures are not what they claim to be.
    broken: list[str] = field(default_factory=list)
    #: When questions were refused (`time.monotonic`).
    refused_at: list[float] = field(default_factory=list)

    def error(self, action: str, error: BaseException) -> None:
        """Book what went wrong."""
        self.errors.append(f"{action}: {type(error).__name__}: {error}"[:300])


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things are on the page, as its own configuration says."""

    functions: dict[str, int]
    outputs: dict[str, tuple[int, ...]]
    components: dict[str, int]

    @classmethod
    def of(cls, config: dict[str, Any]) -> Layout:
        """From the configuration that Gradio gives its pages. Raises `KeyError` where it has another form."""
        dependencies = config["dependencies"]
        return cls(
            {d["api_name"]: d["id"] for d in dependencies},
            {d["api_name"]: tuple(d["outputs"]) for d in dependencies},
            {c["props"]["elem_id"]: c["id"] for c in config["components"] if c["props"].get("elem_id")},
        )


class Page:
    """A visitor with a cookie jar of their own."""

    def __init__(self, url: str, measured: Measured, headers: dict[str, str] | None = None) -> None:
        """`headers` prove who it is, where a cookie of the server's own making does not."""
        self.http = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(ACTION_S),
            trust_env=False,
            headers=headers,
            limits=httpx.Limits(max_connections=6),  # as browsers do
        )
        self.measured = measured
        self._hash = secrets.token_hex(8)
        self.layout: Layout | None = None
        self._have: dict[str, str] = {}
        self.documents: list[str] = []
        self.conversations: list[str] = []
        self.conversation = ""

    async def close(self) -> None:
        await self.http.aclose()

    # -- actions -----------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Load the page as a new tab does, and fill its lists."""
        async with asyncio.timeout(ACTION_S):
            began = time.monotonic()
            response = await self.http.get("/", headers=HTML)
            if response.status_code != 200:
                raise PageError(f"the page answered {response.status_code}")
            self.measured.times["page load"].append(time.monotonic() - began)
        self._hash = secrets.token_hex(8)
        if self.layout is None:
            self.layout = Layout.of((await self.http.get("/config")).json())
        self.conversation = ""
        self._have.clear()  # a new tab has nothing yet
        updates = await self.act("enter", [None], "conversation list")
        document = self._value("enter", updates, "cr-document")
        if isinstance(document, dict):
            sources = [id for _, id in document.get("choices", [])]
            self.documents = [id for id in sources if id and not id.startswith("collection:")]
        self._note_conversations("enter", updates)

    async def search(self, query: str) -> None:
        updates = await self.act("search", [query, None], "search conversations")
        self._note_conversations("search", updates)

    async def new(self) -> None:
        await self.act("new", [], "new conversation")
        self.conversation = ""

    async def open(self, conversation: str) -> None:
        """Show an earlier conversation."""
        await self.act("open", [conversation], "open conversation")
        self.conversation = conversation

    async def memory(self) -> dict[str, Any]:
        """One update of the memory panel, without what this page has already."""
        return await self._feed(self.conversation, "g", "memory feed")

    async def dashboard(self, conversation: str = "") -> dict[str, Any]:
        """One update of the memory page, with everything that it can show."""
        self._have.clear()
        return await self._feed(conversation or self.conversation, "htp", "memory page")

    async def _feed(self, conversation: str, want: str, action: str) -> dict[str, Any]:
        began = time.monotonic()
        asked = {"conversation": conversation, "want": want, "have": "_".join(self._have.values())}
        response = await self.http.get("/api/memory/feed", params=asked)
        if response.status_code not in (200, 204):
            raise PageError(f"the feed answered {response.status_code}: {response.text[:120]}")
        self.measured.times[action].append(time.monotonic() - began)
        update: dict[str, Any] = response.json() if response.status_code == 200 else {}
        self._have |= {key[0]: key for key in update.get("keys", [])}
        return update

    async def hover(self, block: int) -> None:
        await self.served("cr-dashboard", "block", block, "block hover")

    async def export(self) -> dict[str, Any]:
        """The conversation on screen as it is stored."""
        began = time.monotonic()
        response = await self.http.get(f"/conversations/{self.conversation}/export.json")
        if response.status_code != 200:
            raise PageError(f"the export answered {response.status_code}: {response.text[:120]}")
        self.measured.times["export"].append(time.monotonic() - began)
        exported: dict[str, Any] = response.json()
        return exported

    async def ask(self, question: str, document: str, stop_after_s: float | None = None) -> None:
        """Ask and read the answer to its end, or stop it. Raises `PageRefused` for a clean refusal."""
        began, first = time.monotonic(), 0.0
        stopping: asyncio.Task[str] | None = None
        mine = await self._join("ask", [question, None, document])
        wanted = {mine}
        try:
            async with asyncio.timeout(ANSWER_S):
                async for message in self._messages(wanted):
                    if message["msg"] == "process_generating" and not first:
                        first = time.monotonic() - began
                        self.measured.times["question taken"].append(first)
                        self._note_conversation(message["output"])
                        if stop_after_s is not None:
                            stopping = asyncio.create_task(self._stop_later(stop_after_s, wanted))
        finally:
            if stopping is not None:
                stopping.cancel()
                (outcome,) = await asyncio.gather(stopping, return_exceptions=True)
                if isinstance(outcome, Exception):  # the button that stops did not work
                    self.measured.error("stop", outcome)
        self.measured.times["answer"].append(time.monotonic() - began)
        self.measured.answers += 1
        if self.conversation not in self.conversations:  # a refused first question leaves none to open
            self.conversations.append(self.conversation)

    async def _stop_later(self, seconds: float, wanted: set[str]) -> str:
        await asyncio.sleep(seconds)
        id = await self._join("stop", [None])
        wanted.add(id)
        self.measured.stopped += 1
        return id

    # -- Gradio's protocol -------------------------------------------------------------------------------

    async def served(self, component: str, name: str, asked: Any, action: str) -> Any:
        """Call a function that a component's script may call."""
        began = time.monotonic()
        body = {
            "session_hash": self._hash, "component_id": self._laid_out.components[component],
            "fn_name": name, "data": asked,
        }  # fmt: skip
        response = await self.http.post("/gradio_api/component_server", json=body)
        if response.status_code != 200:
            raise PageError(f"{name} answered {response.status_code}: {response.text[:120]}")
        self.measured.times[action].append(time.monotonic() - began)
        return response.json()

    async def act(self, name: str, data: list[Any], action: str) -> list[list[Any]]:
        """One queued event from the click to its end; the data of its updates."""
        began = time.monotonic()
        updates: list[list[Any]] = []
        async with asyncio.timeout(ACTION_S):
            async for message in self._messages({await self._join(name, data)}):
                output = message.get("output") or {}
                if isinstance(output.get("data"), list):
                    updates.append(output["data"])
        self.measured.times[action].append(time.monotonic() - began)
        return updates

    async def _join(self, name: str, data: list[Any]) -> str:
        body = {
            "data": data, "event_data": None, "fn_index": self._laid_out.functions[name],
            "trigger_id": None, "session_hash": self._hash,
        }  # fmt: skip
        response = await self.http.post("/gradio_api/queue/join", json=body)
        if response.status_code != 200:
            raise PageError(f"{name} could not join: {response.status_code} {response.text[:120]}")
        return str(response.json()["event_id"])

    async def _messages(self, wanted: set[str]) -> AsyncIterator[dict[str, Any]]:
        """Messages of the events in `wanted` (more may be added meanwhile) until the stream is closed.

        Raises `PageRefused` for a warning and `PageError` for a failed event, once all have ended.
        """
        said: Exception | None = None
        left = set(wanted)
        url, parameters = "/gradio_api/queue/data", {"session_hash": self._hash}
        timeout = httpx.Timeout(ACTION_S)  # between two messages: the server gives signs of life
        async with self.http.stream("GET", url, params=parameters, timeout=timeout) as response:
            if response.status_code != 200:
                raise PageError(f"the event stream answered {response.status_code}")
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                message = json.loads(line[5:])
                kind = message["msg"]
                if kind == "close_stream":
                    break
                if kind == "log" and message.get("level") == "warning":
                    said = PageRefused(html.unescape(message.get("log", "")))  # as it is read
                elif kind in ("unexpected_error", "server_stopped"):
                    raise PageError(f"{kind}: {message.get('message')}")
                elif kind == "process_completed":
                    left.discard(message["event_id"])
                    if not message.get("success"):
                        said = PageError(f"an event failed: {str(message.get('output'))[:200]}")
                if message.get("event_id") in wanted:
                    yield message
        if left:
            raise PageError("the event stream ended before the event did")
        if said is not None:
            raise said

    # -- what came back ----------------------------------------------------------------------------------

    @property
    def _laid_out(self) -> Layout:
        if self.layout is None:
            raise PageError("the page has not been loaded")
        return self.layout

    def _value(self, function: str, updates: list[list[Any]], component: str) -> Any:
        place = self._laid_out.outputs[function].index(self._laid_out.components[component])
        for update in updates:
            if len(update) > place and isinstance(update[place], dict) and len(update[place]) > 1:
                return update[place]
        return None

    def _note_conversations(self, function: str, updates: list[list[Any]]) -> None:
        history = self._value(function, updates, "cr-history")
        if isinstance(history, dict):
            self.conversations = [id for _, id in history.get("choices", [])]

    def _note_conversation(self, output: dict[str, Any]) -> None:
        place = self._laid_out.outputs["ask"].index(self._laid_out.components["cr-memory"])
        data = output.get("data") or []
        value = data[place] if len(data) > place else None
        value = value.get("value") if isinstance(value, dict) else value
        if isinstance(value, str) and value:
            self.conversation = value


async def attempt(measured: Measured, action: str, work: Callable[[], Awaitable[object]]) -> bool:
    """Run one action and book what came of it, an error of any kind among it; True where it succeeded."""
    try:
        await work()
    except PageRefused as refusal:
        measured.refusals[str(refusal)[:160]] += 1
        measured.refused_at.append(time.monotonic())
        return False
    except Exception as error:
        measured.error(action, error)
        return False
    return True
