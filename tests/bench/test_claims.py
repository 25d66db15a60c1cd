"""The claims' machinery on a small scale: shape of the result, directions, and that it counts rightly."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench import claims, memory_claims, policies
from bench.meter import Meter, Moment
from bench.play import NoText, Player, VirtualClock, VirtualRunner
from bench.trace import Chat, Trace, Turn
from engine.core import EngineCore
from engine.errors import IntegrityError
from engine.scheduler import Limits

KEYS = (
    "utilisation_paged",
    "utilisation_shared",
    "waste_tokens_per_sequence",
    "sequences_contiguous",
    "sequences_paged",
    "sequences_shared",
    "throughput_contiguous",
    "throughput_paged",
    "throughput_shared",
    "two_users_10k_blocks",
    "two_users_10k_unshared_blocks",
    "saved_gib_70b",
)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("claims") / "results" / "claims.json"
    assert claims.main(["--quick", "--out", str(out)]) == 0
    result: dict[str, Any] = json.loads(out.read_text())
    return result


@pytest.mark.slow
def test_every_figure_is_there(quick: dict[str, Any]) -> None:
    assert all(isinstance(quick[key], int | float) for key in KEYS)
    text = claims.tables(quick)
    assert "(a) contiguous reservation" in text
    assert "Two readers of one document" in text


@pytest.mark.slow
def test_directions(quick: dict[str, Any]) -> None:
    memory = quick["memory"]
    assert quick["sequences_contiguous"] < quick["sequences_paged"] < quick["sequences_shared"]
    assert quick["utilisation_contiguous"] < 0.5
    assert quick["utilisation_paged"] >= 0.99
    assert quick["utilisation_shared"] >= 0.96
    assert quick["waste_tokens_per_sequence"] <= 8.5
    assert memory["ideal"]["utilisation"] == memory["ideal_shared"]["utilisation"] == 1.0
    assert memory["ideal"]["waste_tokens"] == 0.0
    assert memory["paged"]["prompt_tokens_skipped"] == 0 < memory["shared"]["prompt_tokens_skipped"]
    assert quick["saved_gib_70b"] > 0
    for result in memory.values():
        assert result["requests"] == quick["conditions"]["answers"]
        assert result["refused"] == result["failed"] == 0
        assert result["snapshots_checked"] > 0


@pytest.mark.slow
def test_two_readers_hold_one_copy(quick: dict[str, Any]) -> None:
    pair = quick["two_users"]["mechanics_10k"]
    assert quick["two_users_10k_blocks"] == pair["blocks"] <= pair["bound_blocks"]
    assert pair["unshared_blocks"] > 1.9 * pair["blocks"]
    assert pair["blocks_copied"] == 1
    assert pair["same_answers"]
    assert pair["computed_prompt_tokens"] < 0.51 * pair["unshared_computed_prompt_tokens"]


@pytest.mark.slow
def test_the_model_computes_less_when_it_shares(quick: dict[str, Any]) -> None:
    speed = quick["throughput"]
    assert speed["paged"]["prompt_tokens_computed"] == speed["contiguous"]["prompt_tokens_computed"]
    assert speed["shared"]["prompt_tokens_computed"] < 0.5 * speed["paged"]["prompt_tokens_computed"]
    assert speed["contiguous"]["peak_sequences"] == 2 < speed["paged"]["peak_sequences"]
    assert {r["output_tokens"] for r in speed.values()} == {speed["shared"]["output_tokens"]}


def test_a_reservation_takes_its_whole_budget_and_no_more() -> None:
    limits = Limits(max_running=1_000)
    for reservations in (1, 2, 15, 16, 64, 100):
        slots = reservations * policies.RESERVATION
        blocks, own = policies.CONTIGUOUS.pool(slots, limits)
        headroom = min(reservations, blocks // 16)
        assert blocks - headroom >= reservations - 1 + (reservations < 16)
        assert own.max_running == reservations
    assert policies.PAGED.pool(1_600, limits) == (100, limits)


def test_contiguous_reservations_fill_their_budget() -> None:
    result = memory_claims.play(
        small(Turn(0, 10, 3), chats=25), policies.CONTIGUOUS, slots=20 * policies.RESERVATION
    )
    assert result.peak_sequences == 20
    assert result.requests == 25


def core_of(policy: policies.Policy, slots: int, **limits: int) -> tuple[EngineCore, Meter, VirtualClock]:
    clock = VirtualClock()
    meter = Meter(VirtualRunner(clock))
    blocks, own = policy.pool(slots, Limits(**limits))
    core = EngineCore(
        meter,
        NoText(),
        memory_claims.SHAPE_70B,
        num_blocks=blocks,
        block_size=policy.block_size,
        limits=own,
        clock=clock,
        sharing=policy.sharing,
    )
    return core, meter, clock


def small(*turns: Turn, chats: int = 1) -> Trace:
    return Trace(1, 20, (100, 60), tuple(Chat(n, float(n), 0, turns) for n in range(chats)))


def test_answers_do_not_depend_on_the_policy() -> None:
    trace = small(Turn(0, 10, 12), Turn(3, 9, 20, again=8), Turn(1, 7, 5, document=1), chats=5)
    answers = []
    for policy, slots in ((policies.PAGED, 1_000), (policies.SHARED, 400), (policies.IDEAL_SHARED, 5_000)):
        core, meter, clock = core_of(policy, slots)
        player = Player(core, meter, trace, clock)
        player.keep_answers = True
        played = player.run()
        assert played.completed == 5 * 4
        assert played.chats == 5
        assert not played.failed
        answers.append(played.answers)
    assert answers[0] == answers[1] == answers[2]
    lengths = {
        attempt: len(ids) for (chat, turn, attempt), ids in answers[0].items() if (chat, turn) == (0, 1)
    }
    assert lengths == {0: 20, 1: 8}


def test_arrivals_and_pauses_are_kept_at_pace_one() -> None:
    core, meter, clock = core_of(policies.SHARED, 1_000)
    played = Player(core, meter, small(Turn(0, 10, 2), Turn(50, 10, 2), chats=3), clock, pace=1.0).run()
    assert 52.0 < played.seconds < 53.0
    assert meter.peak.sequences == 1


def test_who_is_refused_goes_away() -> None:
    core, meter, clock = core_of(policies.PAGED, 1_000, max_queued=2)
    played = Player(core, meter, small(Turn(0, 10, 2), Turn(0, 10, 2), chats=5), clock).run()
    assert played.refused == {"rate_limit_exceeded": 3}
    assert played.completed == 4
    core, meter, clock = core_of(policies.PAGED, 64)
    played = Player(core, meter, small(Turn(0, 10, 2)), clock).run()
    assert played.refused == {"kv_pool_too_small": 1}


def test_moments_are_weighted_with_time() -> None:
    moment = Moment()
    moment.add(1.0, held=160, filled=80, sequences=1)
    moment.add(3.0, held=160, filled=160, sequences=2)
    assert moment.utilisation == pytest.approx((80 + 3 * 160) / (4 * 160))
    assert moment.waste == pytest.approx(80 / 7)


def test_a_meter_that_disagrees_with_the_ledger_is_an_error() -> None:
    core, meter, clock = core_of(policies.SHARED, 1_000)
    Player(core, meter, small(Turn(0, 10, 30), chats=2), clock)
    with pytest.raises(IntegrityError, match="watches"):
        Meter(VirtualRunner(clock)).check()
    meter.check()
    core.memory.pool.entries += 1
    with pytest.raises(IntegrityError, match="ledger"):
        meter.check()
