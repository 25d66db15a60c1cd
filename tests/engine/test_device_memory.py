"""How much a GPU's pool may take, with a meter that says what it is told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.device_memory import RESERVE_SHARE, STEP_FACTOR, gpu_pool_bytes, largest_step, pool_budget
from kernels.api import get_backend
from tests.engine.tiny import tiny_model

GIB = 1 << 30


@given(
    total=st.integers(GIB, 200 * GIB),
    used=st.floats(0, 1),
    step=st.integers(0, 40 * GIB),
    more=st.integers(0, GIB),
)
def test_the_budget_leaves_room_for_the_step_and_a_reserve(
    total: int, used: float, step: int, more: int
) -> None:
    free = int(total * (1 - used))
    budget = pool_budget(free, total, step)
    assert 0 <= budget <= free
    if budget:
        assert budget + step * STEP_FACTOR + total * RESERVE_SHARE <= free + 2
    assert pool_budget(free, total, step + more) <= budget <= pool_budget(free + more, total, step)


@given(batch=st.integers(1, 600), running=st.integers(1, 80), context=st.integers(64, 4096))
def test_the_largest_step_is_as_large_as_the_settings_allow(batch: int, running: int, context: int) -> None:
    batch = max(batch, running)
    rows = largest_step(context, 16, batch, running)
    assert len(rows) == running
    assert all(row.sample and row.write_from == len(row.tokens) for row in rows)
    assert all(len(row.page_table) * 16 >= len(row.tokens) for row in rows)
    tokens = sum(len(row.tokens) for row in rows)
    assert tokens <= batch
    assert tokens == batch or max(len(row.tokens) for row in rows) == context


class Meter:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def reset(self) -> None:
        self.calls.append("reset")

    def peak_bytes(self) -> int:
        self.calls.append("peak")
        return 2 * GIB

    def free_and_total(self) -> tuple[int, int]:
        self.calls.append("free")
        return 20 * GIB, 24 * GIB


def test_the_step_is_measured_before_the_pool_is_sized() -> None:
    model, meter = tiny_model(), Meter()
    budget = gpu_pool_bytes(
        meter, model, get_backend("torch_cpu", "cpu"), block_size=16, max_batch_tokens=40, max_running=8
    )
    assert meter.calls == ["reset", "peak", "reset", "free"]
    assert budget == pool_budget(20 * GIB, 24 * GIB, 2 * GIB)
