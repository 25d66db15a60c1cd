"""The engine as a service: one thread that loads the model and steps, an async API for everybody else.

Callers live on event loops and never wait for a step: `submit` only puts a request in line, and events
wait in the `Generation`'s own buffer.

    STARTING ──▶ READY ──▶ STOPPED
        │          │          ▲
        └──▶ FAILED ◀┘ ──restart──▶ STARTING
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from engine.block_events import BlockEvent
from engine.document_memory import DocumentMemory, document_memory
from engine.errors import EngineError, EngineStarting, EngineUnavailable, IntegrityError, ModelNotFound
from engine.generation import Bell, Generation
from engine.ledger import MemorySnapshot
from engine.scheduler import Limits
from engine.tree_picture import TreePicture, picture
from engine.types import EngineConfig, Event, GenerationRequest, ModelShape, Segment
from engine.views import BlockView, PageTableView, block_view, page_tables

if TYPE_CHECKING:  # it brings torch
    from engine.core import EngineCore

log = logging.getLogger("coread.engine")

ServiceState = Literal["starting", "ready", "failed", "stopped"]
#: A snapshot is shared by all viewers and rebuilt at most this often.
SNAPSHOT_INTERVAL_S = 0.25
TREE_INTERVAL_S = 1.0
#: The idle engine recomputes all accounts at most this often.
CHECK_INTERVAL_S = 10.0


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What was found and what is going on. `detail` is one sentence for people."""

    state: ServiceState
    detail: str
    model: str
    device: str = ""
    dtype: str = ""
    backend: str = ""
    shape: ModelShape | None = None
    block_size: int = 0
    total_blocks: int = 0
    running: int = 0
    queued: int = 0
    conformance: str = ""


class EngineService:
    """Owns the engine's thread. All methods may be called from any thread."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._core: EngineCore | None = None
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._changed = threading.Condition()
        self._stopping = False
        self._status = EngineStatus("stopped", "The engine has not been started.", config.model)
        #: What loading found: it stays true for every later start, which loads nothing.
        self._found: EngineStatus | None = None
        self._error: EngineError | None = None
        self._ids = count(1)
        self._snapshot: MemorySnapshot | None = None
        self._snapshot_at = float("-inf")
        self._tree: TreePicture | None = None
        self._tree_at = float("-inf")
        self._documents: dict[str, DocumentMemory] = {}
        self._documents_at = float("-inf")
        self._snapshot_lock = threading.Lock()
        self._make_core: Callable[[], EngineCore] | None = None
        self._bell = Bell()

    # -- life ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread and return at once. Does nothing where it runs already."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._stopping = False
        self._error = None
        if self._found is None:
            self._set(EngineStatus("starting", "The model is being loaded.", self.config.model))
        else:
            self._set(replace(self._found, state="starting"))
        self._thread = threading.Thread(target=self._run, name="coread-engine", daemon=True)
        self._thread.start()

    def restart(self) -> None:
        """After a failure: a fresh memory around the model that is loaded already."""
        self.stop()
        self.start()

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread; requests still open fail with `EngineUnavailable`."""
        self._stopping = True
        self._wake.set()
        with self._changed:
            self._changed.notify_all()  # who waits for the model waits no longer
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
            if thread.is_alive():
                raise EngineUnavailable(f"The engine's thread did not end within {timeout:g} s.")
        if self._status.state != "failed":
            self._set(replace(self._status, state="stopped", detail="The engine was stopped."))

    async def wait_ready(self, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Return when the model is ready.

        Raises `ModelNotFound` or `ModelRefused` where it cannot be, `EngineUnavailable` where it was stopped
        before, `EngineStarting` after `timeout` seconds.
        """
        ready = await asyncio.to_thread(self.wait_ready_sync, timeout)
        if not ready:
            raise EngineStarting(f"The model was not ready within {timeout:g} s.")

    def wait_ready_sync(self, timeout: float | None = None) -> bool:
        """As `wait_ready`, blocking; False after `timeout`."""
        with self._changed:
            done = self._changed.wait_for(lambda: self._status.state != "starting" or self._stopping, timeout)
            status = self._status
        if done and status.state == "starting":
            raise EngineUnavailable("The engine was stopped while its model was being loaded.")
        if done and status.state != "ready":
            raise self._error or EngineUnavailable(status.detail)
        return done

    def status(self) -> EngineStatus:
        """What was found, and how many sequences run and wait."""
        core = self._core
        if core is None or self._status.state != "ready":
            return self._status
        return replace(self._status, running=len(core.scheduler.running), queued=len(core.scheduler.waiting))

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer. Raises `EngineStarting` before the model is loaded."""
        return self._ready_core().tokenizer

    def _set(self, status: EngineStatus) -> None:
        with self._changed:
            self._status = status
            self._changed.notify_all()

    def _ready_core(self) -> EngineCore:
        core = self._core
        if self._status.state == "starting":
            raise EngineStarting("The model is still being loaded; try again in a moment.")
        if core is None or self._status.state != "ready":
            raise EngineUnavailable(f"The engine is not running: {self._status.detail}")
        return core

    # -- requests --------------------------------------------------------------------------------------

    async def submit(self, request: GenerationRequest) -> Generation:
        """Put a request in line and return its events.

        Raises `InvalidRequest`, `ContextTooLong`, `PoolTooSmall`, `LimitReached`, `EngineStarting`,
        `EngineUnavailable`.
        """
        core = self._ready_core()
        generation = Generation(f"gen-{next(self._ids)}", self._bell, self._abort)
        core.submit(generation.id, request, self._sink(generation))
        self._wake.set()
        if self._status.state != "ready":
            # The thread died in between: nobody would ever answer.
            core.fail_all(EngineUnavailable(f"The engine is not running: {self._status.detail}"))
        return generation

    def _sink(self, generation: Generation) -> Callable[[Event | None], None]:
        """Where the engine puts events. It does not keep the generation alive: one that nobody holds any
        more, because its reader was cancelled or forgot it, is aborted with its next event."""
        reference, id = weakref.ref(generation), generation.id

        def put(event: Event | None) -> None:
            reader = reference()
            if reader is not None:
                reader.put(event)
            elif event is not None:
                self._abort(id)

        return put

    def _abort(self, id: str) -> None:
        core = self._core
        if core is not None:
            core.abort(id)
            self._wake.set()

    # -- memory ----------------------------------------------------------------------------------------

    def memory(self) -> MemorySnapshot:
        """The state of the whole memory, at most a quarter of a second old, shared by all callers."""
        core = self._ready_core()
        with self._snapshot_lock:
            now = time.monotonic()
            if self._snapshot is None or now - self._snapshot_at >= SNAPSHOT_INTERVAL_S:
                with core.lock:
                    core.ledger.tick(now)
                    self._snapshot = core.ledger.snapshot()
                self._snapshot_at = now
            return self._snapshot

    def page_tables(self, conversation: str) -> list[PageTableView]:
        """The running page tables of a conversation, or the stored ones where it is idle."""
        core = self._ready_core()
        with core.lock:
            return page_tables(core, conversation)

    def tree(self) -> TreePicture:
        """The prefix tree as a picture, at most a second old (longer where the pool is very large, as it is
        walked whole), shared by all callers."""
        core = self._ready_core()
        with self._snapshot_lock:
            now = time.monotonic()
            every = max(TREE_INTERVAL_S, core.memory.pool.num_blocks / 20_000)
            if self._tree is None or now - self._tree_at >= every:
                with core.lock:
                    self._tree = picture(core.memory)
                self._tree_at = now
            return self._tree

    def documents(self, *, fresh: bool = False) -> dict[str, DocumentMemory]:
        """What the memory holds of each document, by id; as old as `tree` may be unless `fresh`."""
        core = self._ready_core()
        with self._snapshot_lock:
            now = time.monotonic()
            every = max(TREE_INTERVAL_S, core.memory.pool.num_blocks / 20_000)
            if fresh or now - self._documents_at >= every:
                with core.lock:
                    self._documents = document_memory(core.memory)
                self._documents_at = now
            return self._documents

    def block(self, block: int) -> BlockView | None:
        """What one block holds now; None where there is no such block."""
        core = self._ready_core()
        with core.lock:
            return block_view(core.memory, block)

    def resident_tokens(self, segments: Sequence[Segment]) -> int:
        """How many leading tokens of these segments are in memory now."""
        core = self._ready_core()
        with core.lock:
            return core.memory.resident_tokens(segments)

    def unlink_document(self, document: str) -> int:
        """Forget a document's KV: no new hits from now on. Returns the blocks taken out of the index."""
        core = self._ready_core()
        with core.lock:
            return core.memory.unlink_document(document)

    def pin_document(self, document: str) -> int:
        """Keep a document in memory; returns the blocks pinned now. Raises `LimitReached`."""
        core = self._ready_core()
        with core.lock:
            return core.memory.pin_document(document)

    def unpin_document(self, document: str) -> None:
        """Undo `pin_document`."""
        core = self._ready_core()
        with core.lock:
            core.memory.unpin_document(document)

    def close_conversation(self, conversation: str) -> None:
        """The conversation no longer counts as open."""
        core = self._ready_core()
        with core.lock:
            core.ledger.close(conversation)

    def touch_conversation(self, conversation: str) -> None:
        """Somebody looks at the conversation: it stays open for another while."""
        core = self._ready_core()
        with core.lock:
            core.ledger.touch(conversation)

    def events(self, after: int = 0) -> list[BlockEvent]:
        """Block events with a number above `after`, as far as they are still kept."""
        core = self._ready_core()
        with core.lock:
            return core.memory.events.after(after)

    def check_integrity(self) -> None:
        """Recompute all accounts; raises `IntegrityError`."""
        self._ready_core().check_integrity()

    # -- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._bell.hold()
        try:
            self._serve()
        finally:
            self._bell.release()

    def _serve(self) -> None:
        try:
            if self._make_core is None:
                self._make_core = self._load()
                self._found = self._status
            self._core = self._make_core()
            self._core.before_forward = self._bell.flush
            with self._snapshot_lock:  # a look at the memory of the core before is no longer true
                self._snapshot = self._tree = None
                self._documents_at = float("-inf")
            self._set(replace(self._status, state="ready"))
            self._loop(self._core)
            # First the state, then the requests: one that comes in between sees that nobody will answer.
            self._set(replace(self._status, state="stopped", detail="The engine was stopped."))
            self._close(EngineUnavailable("The engine was stopped; please ask again in a moment."))
        except EngineError as error:
            self._die(error)
        except BaseException as error:  # whatever ends the thread, nobody may wait for it any longer
            log.exception("the engine's thread ended")
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            self._die(
                EngineUnavailable(f"The engine stopped working ({what}); please ask again in a moment.")
            )

    def _die(self, error: EngineError) -> None:
        log.error("engine failed: %s", error)
        self._error = error
        self._set(replace(self._status, state="failed", detail=str(error)))
        self._close(
            error
            if isinstance(error, EngineUnavailable)
            else EngineUnavailable(f"The engine failed: {error}")
        )

    def _close(self, error: EngineError) -> None:
        if self._core is not None:
            try:
                self._core.fail_all(error)
            except IntegrityError:
                log.exception("the memory could not be given back in order")
                for request in list(self._core.requests.values()):
                    request.fail(error)

    def _loop(self, core: EngineCore) -> None:
        checked, checked_at = True, float("-inf")
        while not self._stopping:
            self._wake.clear()
            if core.busy:
                checked = False
                computed = core.step()
                self._bell.flush()
                if computed == 0:
                    # Nothing could run: somebody has to leave, arrive or be aborted first.
                    self._wake.wait(0.002)
                continue
            # Once after each stretch of work, but not so often that a large pool's check delays newcomers.
            if not checked and time.monotonic() - checked_at >= CHECK_INTERVAL_S:
                core.check_integrity()
                checked, checked_at = True, time.monotonic()
            self._wake.wait(1.0)
            with core.lock:
                core.ledger.tick(time.monotonic())

    def _load(self) -> Callable[[], EngineCore]:
        """Load and check the model, and set the status to what was found; returns what makes a core with an
        empty memory around it."""
        # Imported here: the thread pays for torch, the port is open long before.
        from engine.core import EngineCore
        from engine.loading import load

        loaded = load(self.config)
        config = self.config
        limits = Limits(
            max_batch_tokens=config.max_batch_tokens,
            max_running=config.max_running,
            max_queued=config.max_queued,
            max_running_per_principal=config.max_running_per_principal,
            max_queued_per_principal=config.max_queued_per_principal,
            pool_share_per_principal=config.pool_share_per_principal,
            max_draft_rows=config.draft_rows if config.speculation else 0,
        )
        self._status = EngineStatus(
            "starting",
            loaded.model.description,
            loaded.model.name,
            device=str(loaded.model.device),
            dtype=str(loaded.model.dtype).removeprefix("torch."),
            backend=loaded.backend_name,
            shape=loaded.model.shape,
            block_size=config.block_size,
            total_blocks=loaded.num_blocks,
            conformance=str(loaded.conformance),
        )

        def make() -> EngineCore:
            return EngineCore(
                loaded.runner,
                loaded.model.tokenizer,
                loaded.model.shape,
                num_blocks=loaded.num_blocks,
                block_size=config.block_size,
                limits=limits,
                clock=time.monotonic,
                eos_token_ids=loaded.model.eos_token_ids,
                vocab_size=loaded.model.vocab_size,
                sharing=config.sharing,
            )

        return make


__all__ = ["BlockView", "EngineService", "EngineStatus", "Generation", "ModelNotFound", "PageTableView"]
