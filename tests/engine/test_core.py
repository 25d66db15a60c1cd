"""The step loop over a real runner: cold equals warm, and every way a step can fail."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import Any

import pytest
import torch

from engine.core import _out_of_memory
from engine.errors import (
    ContextTooLong,
    DeadlineExceeded,
    EngineUnavailable,
    InvalidRequest,
    LimitReached,
    NonFiniteLogits,
    PoolTooSmall,
    StepFailed,
)
from engine.model import LoadedModel
from engine.scheduler import Step
from engine.types import Done, Failed, GenerationRequest, Priority, Reading, SamplingParams, Scope, Segment
from tests.engine.real import RealEngine, gap
from tests.engine.tiny import some_tokens, tiny_model

A, B, LIBRARY = Scope.account("a"), Scope.account("b"), Scope.collection("k")
TOLERANCE = 1e-5
Outcome = tuple[list[int], dict[int, torch.Tensor]]


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model("llama", num_hidden_layers=2)


def document(length: int = 30, seed: int = 1, name: str = "d") -> Segment:
    return Segment(some_tokens(length, seed), LIBRARY, "document", name)


def question(seed: int, length: int = 5, scope: Scope = A) -> Segment:
    return Segment(some_tokens(length, 100 + seed), scope, "question")


def cold(
    model: LoadedModel, segments: list[Segment], **options: Any
) -> tuple[list[int], dict[int, torch.Tensor]]:
    """The same request alone in an engine that shares nothing."""
    engine = RealEngine(model, sharing=False, block_size=options.pop("block_size", 4))
    id = engine.run(segments, **options)
    assert engine.done(id).receipt.reused_tokens == 0
    return engine.tokens(id), engine.logits(id)


def agree(engine: RealEngine, id: str, want: Outcome, tolerance: float = TOLERANCE) -> None:
    assert engine.tokens(id) == want[0]
    assert gap(engine.logits(id), want[1]) <= tolerance


# -- cold and warm -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4, 16, 32])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_whole_and_partial_hits_equal_a_cold_run(model: LoadedModel, size: int, chunk: int) -> None:
    engine = RealEngine(model, blocks=128, block_size=size, max_batch_tokens=chunk, max_running=1)
    engine.run([document(), question(0)])
    for segments in (
        [document(), question(1)],  # whole blocks, and a part of one
        [document(), question(0)],  # everything
        [document(), question(0, 3)],  # a prefix
        [Segment(document().tokens[:21], LIBRARY, "document", "d"), question(2)],  # ends inside the document
    ):
        id = engine.run(segments)
        assert engine.done(id).receipt.reused_tokens > 0
        agree(engine, id, cold(model, segments, block_size=size))
    assert engine.core.scheduler.counters.prompt_tokens_skipped > 60


@pytest.mark.parametrize("length", [16, 18])
def test_forks_equal_independent_runs(model: LoadedModel, length: int) -> None:
    """n = 3 with one seed: different samples, reproducible, each as if it had run alone."""
    segments = [question(7, length)]
    shared, apart = RealEngine(model), RealEngine(model, sharing=False)
    options: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 8}
    first, again, other = (
        shared.run(segments, **options),
        shared.run(segments, **options),
        apart.run(segments, **options),
    )
    answers = [shared.tokens(first, choice) for choice in range(3)]
    assert len({tuple(a) for a in answers}) == 3
    assert (
        answers == [shared.tokens(again, c) for c in range(3)] == [apart.tokens(other, c) for c in range(3)]
    )
    for choice in range(3):
        assert gap(shared.logits(first, choice), apart.logits(other, choice)) <= TOLERANCE
    copied = sum(shared.done(first, choice).receipt.blocks_copied for choice in range(3))
    assert copied == (0 if length % 4 == 0 else 2)


def test_takeover_of_an_open_tail_equals_a_cold_run(model: LoadedModel) -> None:
    engine, history = RealEngine(model), [question(3, 6)]
    for turn in range(5):
        id = engine.run(history, max_tokens=5)
        agree(engine, id, cold(model, history, max_tokens=5))
        history = [*history, Segment(engine.tokens(id), A), question(10 + turn, 3)]
    assert engine.core.memory.counters.takeovers == 4


def test_chained_hits_do_not_drift(model: LoadedModel) -> None:
    """Each turn hits what the turn before it computed on hits: after 12 turns the gap is as small."""
    engine, history, gaps = RealEngine(model, blocks=128), [document(12)], []
    for turn in range(12):
        history = [*history, question(turn, 3)]
        id = engine.run(history, max_tokens=6)
        want = cold(model, history, max_tokens=6)
        assert engine.tokens(id) == want[0]
        gaps.append(gap(engine.logits(id), want[1]))
        assert turn == 0 or engine.done(id).receipt.reused_tokens > 0
        history = [*history, Segment(engine.tokens(id), A)]
    assert max(gaps) <= TOLERANCE


def test_preempted_and_resumed_equals_a_cold_run(model: LoadedModel) -> None:
    """Too little memory for all of them: some are put back, all end with what they would have said alone."""
    engine = RealEngine(model, blocks=14, max_running=8)
    texts = [[question(n, 9 + n)] for n in range(4)]
    ids = [engine.submit(t, max_tokens=14, temperature=0.7, seed=n) for n, t in enumerate(texts)]
    engine.drain()
    assert engine.core.scheduler.counters.preemptions > 0
    assert (
        sum(engine.done(id).receipt.preemptions for id in ids) == engine.core.scheduler.counters.preemptions
    )
    for n, (id, segments) in enumerate(zip(ids, texts, strict=True)):
        agree(engine, id, cold(model, segments, max_tokens=14, temperature=0.7, seed=n))
        assert engine.done(id).receipt.reused_tokens == 0, "hits of a resumption are no savings"


def test_a_hit_and_a_miss_in_one_batch_equal_each_alone(model: LoadedModel) -> None:
    engine = RealEngine(model)
    engine.run([document(), question(0)])
    hit, miss = [document(), question(1)], [document(25, seed=9, name="e"), question(2)]
    ids = [engine.submit(hit), engine.submit(miss)]
    engine.drain()
    assert [engine.done(id).receipt.reused_tokens for id in ids] == [30, 0]
    for id, segments in zip(ids, (hit, miss), strict=True):
        agree(engine, id, cold(model, segments))


def test_bfloat16_hits_agree_within_its_own_rounding() -> None:
    """bfloat16 keeps 8 bits: one rounding is 2**-9 of a value. Cold and warm runs add up the same numbers in
    other orders (chunked against whole), so that logits may differ by some roundings of the residual
    stream: 4 layers' worth, 2**-9 * 8 ≈ 1.6 %, is allowed; texts are not compared."""
    from engine.model import adopt
    from tests.engine.tiny import tiny_hf

    def half() -> LoadedModel:
        return adopt(tiny_hf("llama", num_hidden_layers=2), None, dtype=torch.bfloat16)

    engine = RealEngine(half(), block_size=4)
    engine.run([document(), question(0)], max_tokens=1)
    segments = [document(), question(1)]
    id = engine.run(segments, max_tokens=1)
    assert engine.done(id).receipt.reused_tokens == 30
    alone = RealEngine(half(), sharing=False)
    other = alone.run(segments, max_tokens=1)
    assert gap(engine.logits(id), alone.logits(other)) <= 2**-9 * 8


def test_two_thousand_operations_equal_an_unshared_run(model: LoadedModel) -> None:
    """Random arrivals, forks, aborts, deletions, pins and preemptions over a small pool, then every answer
    again in an engine without sharing: the same tokens, and the same logits to rounding."""
    r = random.Random(3)
    engine = RealEngine(model, blocks=40, max_batch_tokens=24, max_running=6)
    documents = [document(r.randrange(6, 30), seed=n, name=f"d{n}") for n in range(3)]
    asked: dict[str, tuple[list[Segment], dict[str, Any]]] = {}
    operations: Counter[str] = Counter()
    while operations.total() < 2000:
        roll = r.random()
        if roll < 0.12 and len(engine.core.scheduler.waiting) < 6:
            ended = [id for id in asked if id not in engine.core.requests]
            if ended and r.random() < 0.4:
                before = r.choice(ended[-5:])
                said = [e for e in engine.events[before] if isinstance(e, Done) and e.choice == 0]
                answer = [Segment(e.tokens, A) for e in said if e.tokens]
                segments = [*asked[before][0], *answer, question(r.randrange(50), 2)]
                segments = segments if sum(len(s.tokens) for s in segments) < 90 else segments[:1]
            else:
                chosen = r.sample(documents, r.randrange(3))
                own = question(r.randrange(4), r.randrange(1, 9))
                segments = [Segment(some_tokens(6, 77), Scope.public()), *chosen, own]
            options: dict[str, Any] = {
                "max_tokens": r.randrange(1, 12),
                "temperature": r.choice([0.0, 1.0]),
                "seed": r.randrange(100),
                "n": r.choice([1, 1, 1, 2, 3]),
                "priority": r.choice(list(Priority)),
                "conversation": f"c{r.randrange(4)}",
            }
            id = engine.submit(segments, **options)
            asked[id] = (segments, options)
            operations["submit"] += 1
        elif roll < 0.90:
            if not engine.core.busy:
                continue
            engine.step()
            operations["step"] += 1
        elif roll < 0.93 and engine.core.requests:
            engine.core.abort(r.choice(list(engine.core.requests)))
            operations["abort"] += 1
        elif roll < 0.95:
            engine.core.memory.unlink_document(f"d{r.randrange(3)}")
            operations["unlink"] += 1
        elif roll < 0.96:
            name = f"d{r.randrange(3)}"
            if r.random() < 0.5:
                engine.core.memory.unpin_document(name)
            else:
                with contextlib.suppress(LimitReached):
                    engine.core.memory.pin_document(name)
            operations["pin"] += 1
        elif roll < 0.98 and len(engine.core.scheduler.running) > 1:
            engine.core.scheduler._preempt(r.choice(engine.core.scheduler.running), Step())
            operations["preempt"] += 1
        elif roll >= 0.98:
            engine.core.ledger.close(f"c{r.randrange(4)}")
            operations["close"] += 1
    engine.drain()
    engine.check_order()
    counters = engine.core.memory.counters
    assert min(counters.takeovers, counters.blocks_copied, counters.evictions, counters.unlinked) > 0
    assert engine.core.scheduler.counters.prompt_tokens_skipped > 500
    assert min(operations.values()) > 5

    plain = RealEngine(model, blocks=400, sharing=False, max_batch_tokens=400, max_running=48)
    for id, (segments, options) in asked.items():
        plain.submit(segments, id=id, **options)
        if len(plain.core.requests) >= 16:
            plain.drain()
    plain.drain()
    compared = 0
    for id in asked:
        for choice in range(len(engine.requests[id].choices)):
            got, want = engine.done(id, choice).tokens, plain.done(id, choice).tokens
            assert got == want[: len(got)], id
            if engine.logits(id, choice):
                assert gap(engine.logits(id, choice), plain.logits(id, choice)) <= TOLERANCE
                compared += 1
    assert compared > 150


# -- scopes ------------------------------------------------------------------------------------------------


def test_two_scopes_never_meet_and_the_right_chain_does_hit(model: LoadedModel) -> None:
    """B guesses A's private text word for word and hits nothing; A's repetition hits (counters only)."""
    engine = RealEngine(model)
    secret = question(1, 20)
    engine.run([document(), secret], output_scope=A)
    guess = engine.run([document(), Segment(secret.tokens, B)], output_scope=B, principal="b")
    own = engine.run([document(), secret], output_scope=A)
    assert engine.done(guess).receipt.reused_tokens == 30  # the shared document, and not one token more
    assert engine.done(own).receipt.reused_tokens == 49
    for scope in (B, Scope.public(), Scope.collection("a"), Scope.collection("k")):
        other = engine.run([Segment([*document().tokens, *secret.tokens], scope)], output_scope=scope)
        receipt = engine.done(other).receipt
        assert receipt.reused_tokens == (30 if scope == LIBRARY else 0)


def test_generated_tokens_carry_the_account_of_the_request(model: LoadedModel) -> None:
    engine = RealEngine(model)
    id = engine.run([document(), question(1)], max_tokens=8)
    answer = engine.tokens(id)
    for scope, reuse in ((A, 30 + 5 + 7), (B, 30 + 5)):
        turn = [document(), question(1), Segment(answer, scope), question(2, 2, scope)]
        again = engine.run(turn, output_scope=scope)
        assert engine.done(again).receipt.reused_tokens == reuse


# -- faults ------------------------------------------------------------------------------------------------


def test_an_exception_in_a_step_fails_its_requests_and_leaves_the_pool_as_it_was(
    model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    engine = RealEngine(model)
    first = engine.run([document(), question(0)], max_tokens=3)
    pool = engine.core.memory.pool
    before = (pool.free, pool.retained, sorted(n.block for n in engine.core.memory.tree.walk()))
    engine.runner.fail.append(RuntimeError("cuda: something broke"))
    history = [document(), question(0), Segment(engine.tokens(first), A), question(1)]
    id = engine.submit(history)  # continues the open tail of the first
    engine.step()
    error = engine.error(id)
    assert isinstance(error, StepFailed)
    assert "RuntimeError" in str(error)
    assert isinstance(error.__cause__, RuntimeError)
    assert "cuda: something broke" in caplog.text, "whoever operates the server sees where it came from"
    assert (pool.free, pool.retained, sorted(n.block for n in engine.core.memory.tree.walk())) == before
    again = engine.run(history)
    assert engine.core.memory.counters.takeovers == 2, "the tail was put back and continued again"
    agree(engine, again, cold(model, history))
    engine.check_order()


def test_a_copy_that_was_perhaps_not_carried_out_is_not_kept(model: LoadedModel) -> None:
    engine = RealEngine(model)
    engine.run([document(30), question(0)])
    engine.runner.fail.append(RuntimeError("before the copies"))
    engine.run([document(30), question(1)])
    segments = [document(30), question(1)]
    id = engine.run(segments)
    agree(engine, id, cold(model, segments))
    assert engine.core.memory.counters.blocks_copied == 1


def test_nan_fails_only_its_own_request(model: LoadedModel) -> None:
    engine = RealEngine(model)
    good, bad = (
        engine.submit([document(), question(0)], max_tokens=6),
        engine.submit([question(1, 9)], max_tokens=6),
    )
    engine.step()
    engine.runner.broken.add(engine.requests[bad].choices[0].sequence.id)
    engine.drain()
    assert isinstance(engine.error(bad), NonFiniteLogits)
    agree(engine, good, cold(model, [document(), question(0)], max_tokens=6))
    again = engine.run([question(1, 9)])
    agree(engine, again, cold(model, [question(1, 9)]))
    engine.check_order()


def test_out_of_memory_tries_smaller_before_it_fails(model: LoadedModel) -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    engine = RealEngine(model)
    texts = [[question(n, 7 + n)] for n in range(4)]
    ids = [engine.submit(t, max_tokens=4) for t in texts]
    engine.step()
    engine.runner.fail.extend([OutOfMemoryError(), OutOfMemoryError()])  # all four, then the first two
    engine.drain()
    for id, segments in zip(ids, texts, strict=True):
        agree(engine, id, cold(model, segments))
    single = engine.submit(texts[0])
    engine.runner.fail.append(MemoryError())
    engine.drain()
    assert isinstance(engine.error(single), StepFailed)


def test_torchs_own_word_for_no_memory_is_understood() -> None:
    """On the CPU it is a plain `RuntimeError`, and any other one is no reason to try again."""
    with pytest.raises(RuntimeError) as short:
        torch.empty(1 << 50, dtype=torch.uint8)
    assert _out_of_memory(short.value)
    with pytest.raises(RuntimeError) as other:
        torch.zeros(2) @ torch.zeros(3)
    assert not _out_of_memory(other.value)


def test_out_of_memory_with_copies_in_the_step(model: LoadedModel) -> None:
    """The halves of a step carry out its copies once or twice: the answers are the same."""

    class OutOfMemoryError(RuntimeError):
        pass

    options: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 4, "max_tokens": 6}
    plain, tight = RealEngine(model), RealEngine(model)
    want, id = plain.run([question(1, 18)], **options), tight.submit([question(1, 18)], **options)
    tight.step()
    for _ in range(3):
        tight.runner.fail.append(OutOfMemoryError())
        tight.step()
    tight.drain()
    assert [tight.tokens(id, c) for c in range(3)] == [plain.tokens(want, c) for c in range(3)]
    assert tight.core.memory.counters.blocks_copied == 2


def test_one_failing_half_fails_alone(model: LoadedModel) -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    engine = RealEngine(model)
    ids = [engine.submit([question(n, 7)], max_tokens=3) for n in range(2)]
    engine.step()
    engine.runner.fail.extend([OutOfMemoryError(), OutOfMemoryError()])
    engine.step()
    assert isinstance(engine.error(ids[0]), StepFailed)
    engine.drain()
    agree(engine, ids[1], cold(model, [question(1, 7)], max_tokens=3))


# -- ends --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["waiting", "prefill", "decode", "during the forward pass"])
def test_abort_in_every_phase_ends_with_one_done_and_nothing_after(model: LoadedModel, phase: str) -> None:
    engine = RealEngine(model, max_batch_tokens=8)
    id = engine.submit([document(), question(0)], max_tokens=9, n=2)
    if phase != "waiting":
        engine.step()
    if phase in ("decode", "during the forward pass"):
        while not any(getattr(e, "tokens", ()) for e in engine.events[id]):
            engine.step()
    if phase == "during the forward pass":
        forward = engine.runner.step

        def aborting(rows: Any, copies: Any = ()) -> Any:
            out = forward(rows, copies)
            engine.core.abort(id)
            return out

        engine.runner.step = aborting  # type: ignore[method-assign]
        engine.step()
        engine.runner.step = forward  # type: ignore[method-assign]
    engine.core.abort(id)
    seen = len(engine.events[id])
    engine.step()
    assert engine.core.memory.pool.held == 0, "free within one step"
    rest = [e for e in engine.events[id][seen:] if e is not None]
    assert rest
    assert all(isinstance(e, Done) and e.reason == "aborted" for e in rest)
    engine.core.abort(id)
    engine.drain()
    engine.check_order()


def test_deadlines_fail_the_whole_request(model: LoadedModel) -> None:
    engine = RealEngine(model)
    id = engine.submit([question(0)], max_tokens=50, n=2, deadline_s=4.5)
    engine.drain()
    assert isinstance(engine.error(id), DeadlineExceeded)
    assert engine.core.memory.pool.held == 0
    engine.check_order()


def test_fail_all_ends_every_request(model: LoadedModel) -> None:
    engine = RealEngine(model, max_running=1)
    ids = [engine.submit([question(n)], max_tokens=9) for n in range(3)]
    engine.step()
    engine.core.fail_all(EngineUnavailable("gone"))
    assert all(isinstance(engine.error(id), EngineUnavailable) for id in ids)
    assert engine.core.memory.pool.held == 0
    assert not engine.core.busy
    engine.check_order()


# -- requests ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"n": 0}, InvalidRequest),
        ({"n": 17}, InvalidRequest),
        ({"segments": []}, InvalidRequest),
        ({"segments": [Segment([5000], A)]}, InvalidRequest),
        ({"segments": [Segment([-1], A)]}, InvalidRequest),
        ({"segments": [Segment([3] * 250, A)]}, ContextTooLong),
        ({"segments": [Segment([3] * 120, A)], "sampling": SamplingParams(max_tokens=100)}, PoolTooSmall),
        ({"sampling": SamplingParams(temperature=float("nan"))}, InvalidRequest),
        ({"sampling": SamplingParams(max_tokens=0)}, InvalidRequest),
    ],
)
def test_bad_requests_are_refused_and_leave_nothing(
    model: LoadedModel, changes: dict[str, Any], error: type[Exception]
) -> None:
    engine = RealEngine(model, blocks=40)
    settings: dict[str, Any] = {
        "segments": [question(0)],
        "sampling": SamplingParams(max_tokens=20),
        "principal": "p",
        "conversation": "c",
        "output_scope": A,
        **changes,
    }
    with pytest.raises(error):
        engine.core.submit("x", GenerationRequest(**settings), lambda event: None)
    assert not engine.core.busy
    assert not engine.core.memory.live


def test_a_receipt_counts_what_happened(model: LoadedModel) -> None:
    engine = RealEngine(model)
    engine.run([document(), question(0)])
    id = engine.submit([document(), question(1)], max_tokens=5)
    other = engine.submit([document(), question(2)], max_tokens=5)
    engine.drain()
    receipt = engine.done(id).receipt
    assert (receipt.prompt_tokens, receipt.reused_tokens, receipt.computed_tokens) == (35, 30, 5)
    assert receipt.output_tokens == 5
    assert (receipt.blocks_copied, receipt.bytes_copied) == (1, engine.core.ledger.block_bytes // 4 * 2)
    assert receipt.saved_bytes == pytest.approx(receipt.unshared_bytes - receipt.fair_share_bytes)
    assert receipt.saved_bytes > 0
    assert receipt.kv_bytes_logical >= receipt.kv_bytes_read > 0
    assert receipt.ttft_s == 1.0
    assert receipt.reserved_bytes == -(-engine.core.shape.max_context // 4) * engine.core.ledger.block_bytes
    assert engine.done(other).receipt.reused_tokens >= 30
    reading = [e for e in engine.events[id] if isinstance(e, Reading)]
    assert reading[0].reused == 30


def test_events_of_a_failed_request_end_with_the_failure(model: LoadedModel) -> None:
    engine = RealEngine(model)
    id = engine.submit([question(0)], max_tokens=5)
    engine.runner.fail.append(ValueError("x"))
    engine.drain()
    assert isinstance(engine.events[id][-2], Failed)
    assert engine.events[id][-1] is None
