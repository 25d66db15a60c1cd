"""Everything that one running Coread is made of, and its life: open, warm up, ready, stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from app.access import Access, Caller, Door
from app.accounts import Accounts
from app.chat import Chat
from app.collections import Collections
from app.collections_documents import Shelf
from app.collections_warm import Warmer
from app.dashboard.feed import DashboardFeed
from app.data_dir import admin_token, read_or_create_secret, resolve_data_dir
from app.demo import Demo
from app.errors import AppError, LoadingFailed, ShuttingDown, StillWarmingUp
from app.http_errors import sentence
from app.keys import ApiKeys
from app.knowledge import Knowledge
from app.limits import Limits
from app.messages import MessageEncoder
from app.people_schema import MIGRATIONS as PEOPLE
from app.principal import CookieSigner, Principal
from app.prompting import Prompter
from app.settings import Settings
from app.store import MIGRATIONS, Store
from engine.errors import EngineError
from rag.datadir import DataDir
from rag.errors import RagError

if TYPE_CHECKING:
    from engine.service import EngineService, EngineStatus
    from rag.aio import AsyncLibrary
    from rag.database import Database

log = logging.getLogger("coread")
T = TypeVar("T")
State = Literal["new", "warming_up", "ready", "failed", "stopped"]
#: At most so long does an engine that could answer wait for the documents behind the suggested questions.
#: Reading them takes seconds and began while the model was loaded; more means that something is wrong.
SUGGESTED_WAIT_S = 60.0
#: How long a server that ends waits for its engine's thread: while it answers, and while it loads.
_ENGINE_STOP_S, _LOADING_STOP_S = 10.0, 0.5


def engine_json(status: EngineStatus) -> dict[str, Any]:
    """What was found of model, device and pool."""
    shape = status.shape
    block_bytes = shape.block_bytes(status.block_size) if shape else 0
    return {
        "model": status.model,
        "device": status.device,
        "dtype": status.dtype,
        "backend": status.backend,
        "max_context": shape.max_context if shape else None,
        "block_size": status.block_size,
        "total_blocks": status.total_blocks,
        "pool_bytes": status.total_blocks * block_bytes,
        "conformance": status.conformance,
        "description": status.detail,
    }


@dataclass(frozen=True, slots=True)
class _Browser:
    """A caller of whom only the headers are known."""

    headers: Mapping[str, str]


class Parts(Protocol):
    """Makes the heavy parts; tests hand in their own. Each call may block and runs in a thread, but for
    `prepare`."""

    def prepare(self, settings: Settings) -> None:
        """Begin in the background with what the engine will wait for; returns at once."""

    def engine(self, settings: Settings) -> EngineService: ...
    def database(self, path: Path) -> Database: ...
    def library(
        self, settings: Settings, data_dir: DataDir, database: Database, busy: Callable[[], bool]
    ) -> AsyncLibrary: ...
    def close(self) -> None:
        """Give back what the parts were made of."""


class RealParts:
    """The parts as they are served. Imports stand inside: they take seconds, and the port comes first."""

    def __init__(self) -> None:
        self._closing: list[Callable[[], None]] = []

    def prepare(self, settings: Settings) -> None:
        from engine import early

        early.begin(settings.engine_config())

    def engine(self, settings: Settings) -> EngineService:
        from engine.service import EngineService

        return EngineService(settings.engine_config())

    def database(self, path: Path) -> Database:
        from rag.database import Database

        return Database(path, MIGRATIONS)

    def library(
        self, settings: Settings, data_dir: DataDir, database: Database, busy: Callable[[], bool]
    ) -> AsyncLibrary:
        from rag.aio import AsyncLibrary
        from rag.embed import Courtesy, SentenceEmbedder
        from rag.library import Library
        from rag.rerank import CrossReranker
        from rag.types import LibraryLimits

        reranker = None
        if settings.reranker != "none":
            reranker = CrossReranker(settings.reranker)
            reranker.load().result()  # a model that can't be loaded is said now, not with the first question
        embedder = SentenceEmbedder(settings.embedder)
        embedder.load()  # goes on in its own thread while the library opens
        limits = LibraryLimits(upload_bytes=settings.max_upload_bytes)
        library = Library(
            data_dir, database, embedder, limits=limits, courtesy=Courtesy(busy), reranker=reranker
        )
        wrapped = AsyncLibrary(library)
        self._closing += [library.close, wrapped.close, embedder.close]
        return wrapped

    def close(self) -> None:
        while self._closing:
            self._closing.pop(0)()


async def _whole(make: Callable[..., T], *arguments: Any) -> T:
    """`make` in a thread, to its end: a thread goes on when whoever awaits it is cancelled, and what it then
    makes would be nobody's to give back. So a cancellation comes one step later, when the part is known."""
    making = asyncio.ensure_future(asyncio.to_thread(make, *arguments))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await asyncio.wait({making})
        if (task := asyncio.current_task()) is not None:
            task.cancel()
        return making.result()


async def _ended(task: asyncio.Task[None] | None) -> None:
    """Cancel a task and wait for its end."""
    if task is not None and not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class Runtime:
    """One server's (or one command's) parts. Cheap to make; `open` takes the data directory."""

    def __init__(self, settings: Settings, parts: Parts | None = None) -> None:
        self.settings = settings
        self._parts: Parts = parts if parts is not None else RealParts()
        self._data_dir: DataDir | None = None
        self._state: State = "new"
        self._detail = "Warming up: starting."
        self._engine: EngineService | None = None
        self._database: Database | None = None
        self._library: AsyncLibrary | None = None
        self._store: Store | None = None
        self._chat: Chat | None = None
        self._prompter: Prompter | None = None
        self._encoder: MessageEncoder | None = None
        self._knowledge: Knowledge | None = None
        self._collections: Collections | None = None
        self._shelf: Shelf | None = None
        self._warmer: Warmer | None = None
        self._signer: CookieSigner | None = None
        self._access: Access | None = None
        self._keys: ApiKeys | None = None
        self._accounts: Accounts | None = None
        self._limits: Limits | None = None
        self._token = ""
        self._loading: asyncio.Task[None] | None = None
        self._seeding: asyncio.Task[None] | None = None
        #: Scripted readers, where somebody asked for them.
        self.demo = Demo(self)
        #: What the pages and `/api/memory` tell of the memory.
        self.dashboard = DashboardFeed(self)

    # -- life --------------------------------------------------------------------------------------------

    def open(self) -> Path:
        """Take the data directory and its secrets; raises `DataDirUnusable` or `rag`'s `DataDirLocked`."""
        path = resolve_data_dir(self.settings.data_dir)
        self._data_dir = DataDir(path)
        kind: Literal["local", "anonymous"] = "local" if self.settings.loopback else "anonymous"
        self._signer = CookieSigner(read_or_create_secret(path, "cookie.key"), kind)
        self._token = admin_token(path)
        self._limits = Limits(self.settings, path)
        self._access = Access(self.settings, self._signer, self._token)
        return path

    def prepare(self) -> None:
        """Begin with what the language model will wait for. `start` does so too, which may be later."""
        self._parts.prepare(self.settings)

    def start(self, *, answering: bool = True) -> None:
        """Begin to load in the background (needs a running event loop); `wait_ready` tells the outcome.

        Without `answering` the language model stays where it is: `knowledge` and `store` are there, for a
        search, and nothing else is.
        """
        if self._loading is None:
            self._state = "warming_up"
            if answering:
                self.prepare()
            self._loading = asyncio.create_task(self._load(answering), name="coread-load")

    async def wait_ready(self) -> None:
        """Wait until questions can be answered; raises `LoadingFailed`, with the reason, where they never
        can be."""
        if self._loading is None:
            raise StillWarmingUp("Coread has not been started.")
        await asyncio.shield(self._loading)
        if self._state == "failed":
            raise LoadingFailed(self._detail)

    async def _load(self, answering: bool) -> None:
        try:
            data_dir = self._opened()
            self._database = await _whole(self._parts.database, data_dir.database)
            await self._open_people(self._database)
            self._detail = "Warming up: loading the language model."
            self._engine = await _whole(self._parts.engine, self.settings)
            if answering:
                # Not beside the embedder's: transformers' `from_pretrained` replaces a method of a class for
                # the whole process while it loads, and two that cross leave it replaced (no tied weights).
                self._engine.start()
                with contextlib.suppress(EngineError):  # said below, once what needs no model is there
                    await self._engine.wait_ready()
            self._store = Store(self._database)
            self._library = await _whole(
                self._parts.library, self.settings, data_dir, self._database, self._busy
            )
            self._knowledge = Knowledge(self.settings, self._library, self._store, self._engine, self.limits)
            suggested = await self._knowledge.seed_suggested() if self.settings.sample else []
            if answering:
                await self._open_answering(self._engine, self._knowledge, self._store, self._library)
                await self._load_search_model(self._library)
                await self._read_suggested(self._knowledge, suggested)
            queued = await self._knowledge.seed() if self.settings.sample else []
            self._state, self._detail = "ready", "Ready."
            log.info("ready: %s", self._engine.status().detail if answering else "for searches")
            self._seeding = asyncio.create_task(self._watch_seeding(queued), name="coread-seed")
            self.demo.begin_planned()
        except Exception as error:
            self._state, self._detail = "failed", sentence(error)
            if self._access is not None:
                self._access.failure = self._detail
            log.error("Coread cannot answer questions: %s", self._detail, exc_info=error)

    async def _open_answering(
        self, engine: EngineService, knowledge: Knowledge, store: Store, library: AsyncLibrary
    ) -> None:
        """What needs the language model."""
        await engine.wait_ready()
        self._prompter = await _whole(Prompter.create, self.settings, engine, knowledge)
        self._encoder = MessageEncoder(engine.tokenizer)
        self._chat = Chat(
            self.settings, engine, knowledge, store, self._prompter, self.limits, self._may_act
        )  # fmt: skip
        library.library.on_delete(self._forget)
        await self._open_shelf()

    async def _open_shelf(self) -> None:
        knowledge, library, engine = self._knowledge, self._library, self._engine
        store, prompter = self._store, self._prompter
        if knowledge is None or library is None or engine is None or store is None or prompter is None:
            raise StillWarmingUp(self._detail)
        self._collections = Collections(self.settings, library, store, lambda: self.accounts)
        self._shelf = Shelf(knowledge, self._collections, library, store, engine, self.limits)
        self._warmer = Warmer(self.settings, library, store, engine, prompter)
        await self._shelf.open()

    async def _open_people(self, database: Database) -> None:
        """Know who may enter before anything heavy is loaded: signing in works while the models warm up."""
        await _whole(database.migrate, PEOPLE)
        accounts = Accounts(database, self.signer.name + "_s")
        await accounts.open()
        keys = ApiKeys(database, accounts.role_of)
        await keys.open()
        accounts.on_lock(keys.forget)
        accounts.on_lock(self._end_turns_of)
        self._accounts = self.access.sessions = accounts
        self._keys = self.access.keys = keys
        if not self.settings.open_to_all and accounts.setup_token is not None:
            shown = "of COREAD_SETUP_TOKEN" if accounts.setup_token_chosen else accounts.setup_token
            log.warning("There is no administrator yet: open /set-up and give the token %s", shown)

    async def _load_search_model(self, library: AsyncLibrary) -> None:
        """Whoever comes when all is ready shares the machine with nothing that still loads. Without this
        model conversations go on, and a search says what is missing."""
        self._detail = "Warming up: loading the search model."
        try:
            await library.warm_up()
        except RagError as error:
            log.warning("searches do not work: %s", sentence(error))

    async def _read_suggested(self, knowledge: Knowledge, documents: list[str]) -> None:
        """Wait for what the page's suggested questions are answered from, so that a click on one at once is
        answered rightly. A document that fails is not waited for, and none holds the server back for long."""
        try:
            async with asyncio.timeout(SUGGESTED_WAIT_S):
                for done, id in enumerate(documents):
                    self._detail = (
                        "Warming up: indexing the documents behind the suggested questions "
                        f"({done:,} of {len(documents):,})."
                    )
                    await knowledge.wait_seeded(id)
        except TimeoutError:
            log.warning(
                "the documents behind the suggested questions were not read within %.0f s", SUGGESTED_WAIT_S
            )

    async def _watch_seeding(self, queued: list[str]) -> None:
        """On a first start the sample documents are read while people can already ask."""
        if self._knowledge is None:
            return
        for done, id in enumerate(queued):
            self._detail = f"Ready; {done:,} of {len(queued):,} new sample documents have been read."
            await self._knowledge.wait_seeded(id)
        self._detail = "Ready."

    async def wait_seeded(self) -> None:
        """Wait until the sample documents can be found as well."""
        await self.wait_ready()
        if self._seeding is not None:
            await asyncio.shield(self._seeding)

    async def stop(self) -> None:
        """Give everything back, whatever state loading has reached. Calling it again does nothing."""
        await _ended(self._loading)
        await _ended(self._seeding)  # which loading begins
        await self.demo.stop()
        if self._warmer is not None:
            await self._warmer.stop()
        self._state, self._detail = "stopped", "Coread is shutting down."
        if self._accounts is not None:
            self._accounts.close()
        if self._chat is not None:
            await self._chat.close()
        engine, database = self._engine, self._database
        self._engine = self._library = self._database = None
        if engine is not None:
            # A model that is being loaded cannot be stopped, and nobody waits for what it would answer.
            patience = _LOADING_STOP_S if engine.status().state == "starting" else _ENGINE_STOP_S
            try:
                await asyncio.to_thread(engine.stop, patience)
            except EngineError as error:
                log.warning("%s", error)
        for stop in (self._parts.close, database.close if database else None):
            if stop is not None:
                await asyncio.to_thread(stop)
        if self._data_dir is not None:
            self._data_dir.close()
            self._data_dir = None

    @property
    def engine_failed(self) -> bool:
        """True where the engine worked and then failed (not where it never did)."""
        engine = self._engine
        return self._state == "ready" and engine is not None and engine.status().state == "failed"

    async def revive(self) -> bool:
        """Give a failed engine a fresh memory around the model that is loaded already; False where it has not
        failed. Conversations and documents are not the engine's, so nothing of them is lost.

        Raises what the engine cannot start again for.
        """
        engine = self._engine
        if engine is None or not self.engine_failed:
            return False
        await asyncio.to_thread(engine.restart)
        await engine.wait_ready()
        if self._shelf is not None:
            await self._shelf.keep_again()
        return True

    def _busy(self) -> bool:
        """True while somebody's answer is computed: uploads then wait a little with their own work."""
        engine = self._engine
        return engine is not None and engine.status().running > 0

    def _may_act(self, principal: Principal) -> bool:
        return not self.accounts.locked(principal.id)

    def _end_turns_of(self, account: str) -> None:
        if self._chat is not None:
            self._chat.end_turns_of(account)

    def _forget(self, document: str) -> None:
        """A document's text is gone: so must be what the engine keeps of it."""
        engine = self._engine
        if engine is not None and engine.status().state == "ready":
            engine.unlink_document(document)

    # -- parts -------------------------------------------------------------------------------------------

    def _opened(self) -> DataDir:
        if self._data_dir is None:
            raise StillWarmingUp("The data directory is not open.")
        return self._data_dir

    def _ready(self, part: T | None) -> T:
        if self._state != "ready" or part is None:
            raise self._not_there()
        return part

    def _not_there(self) -> AppError:
        """Why a part is not there."""
        match self._state:
            case "stopped":
                return ShuttingDown(self._detail)
            case "failed":
                return LoadingFailed(self._detail)
        return StillWarmingUp(self.detail)

    @property
    def state(self) -> State:
        return self._state

    @property
    def detail(self) -> str:
        """One sentence on where loading stands, or on why it failed."""
        engine = self._engine
        if self._state == "ready" and engine is not None and engine.status().state != "ready":
            return engine.status().detail
        return self._detail

    @property
    def ready(self) -> bool:
        """True while questions can be answered."""
        engine = self._engine
        return self._state == "ready" and engine is not None and engine.status().state == "ready"

    @property
    def engine(self) -> EngineService:
        return self._ready(self._engine)

    @property
    def store(self) -> Store:
        return self._ready(self._store)

    @property
    def knowledge(self) -> Knowledge:
        return self._ready(self._knowledge)

    @property
    def collections(self) -> Collections:
        return self._ready(self._collections)

    @property
    def shelf(self) -> Shelf:
        return self._ready(self._shelf)

    @property
    def warmer(self) -> Warmer:
        return self._ready(self._warmer)

    @property
    def chat(self) -> Chat:
        return self._ready(self._chat)

    @property
    def prompter(self) -> Prompter:
        return self._ready(self._prompter)

    @property
    def message_encoder(self) -> MessageEncoder:
        return self._ready(self._encoder)

    @property
    def signer(self) -> CookieSigner:
        if self._signer is None:
            raise StillWarmingUp("The data directory is not open.")
        return self._signer

    @property
    def token(self) -> str:
        return self._token

    def announce(self, url: str) -> None:
        """Tell commands on this machine where the server is."""
        self._opened().announce(url)

    @property
    def upload_dir(self) -> Path:
        """Where Gradio puts what a browser sends, until a handler takes it."""
        return self._opened().tmp / "gradio"

    @property
    def access(self) -> Access:
        if self._access is None:
            raise StillWarmingUp("The data directory is not open.")
        return self._access

    @property
    def limits(self) -> Limits:
        if self._limits is None:
            raise StillWarmingUp("The data directory is not open.")
        return self._limits

    @property
    def accounts(self) -> Accounts:
        if self._accounts is None:
            raise self._not_there()
        return self._accounts

    @property
    def keys(self) -> ApiKeys:
        if self._keys is None:
            raise self._not_there()
        return self._keys

    def identify(self, door: Door, caller: Caller) -> Principal:
        """Who a request at a door acts for (see `Access.resolve`)."""
        return self.access.resolve(door, caller)

    def principal(self, headers: Mapping[str, str]) -> Principal:
        """Who a browser's request acts for."""
        return self.identify("page", _Browser(headers))

    # -- figures -----------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The engine's part of the feed and of `coread doctor`."""
        seeding = self._seeding is not None and not self._seeding.done()
        state = "ready" if self.ready else self._state
        out: dict[str, Any] = {"state": state, "detail": self.detail, "seeding": seeding}
        if self._engine is not None and self._state == "ready":
            status = self._engine.status()
            if status.state != "ready":
                out["state"] = status.state
            out |= engine_json(status) | {"running": status.running, "queued": status.queued}
        return out
