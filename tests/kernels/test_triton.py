"""The Triton kernels under the interpreter against the float32 oracle (tests/conftest.py switches it on)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kernels.triton_plan
from kernels.plan import ALWAYS
from kernels.triton_backend import TritonBackend
from tests.kernels.cases import Case, batches, case_of

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def backend() -> TritonBackend:
    return TritonBackend(torch.device("cpu"), capability=(8, 0), processors=4, cost=ALWAYS)


def check(case: Case) -> None:
    expected = case.expected()
    tolerance = TOLERANCE[case.query.dtype]
    for shared_pass in (True, False):
        out, plan = case.run(backend(), shared_pass=shared_pass)
        torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=tolerance)


@st.composite
def triton_cases(draw: st.DrawFn) -> Case:
    batch = draw(batches(block_sizes=(16, 32), max_sequences=5, max_query=24))
    return case_of(
        batch,
        kv_heads=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 16)),
        head_dim=draw(st.sampled_from([64, 80])),
        dtype=draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        window=draw(st.none() | st.integers(1, max(batch.context_lens) + 1)),
        soft_cap=draw(st.sampled_from([None, None, 4.0])),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
    )


@given(case=triton_cases(), shortest=st.sampled_from([16, 64, 256]))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_equals_the_oracle_on_random_trees(case: Case, shortest: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels.triton_plan, "SHORTEST_SPLIT", shortest)
        check(case)
