"""8-bit KV through the whole engine on the CPU: scales, bytes, refusals, and what it changes."""

from __future__ import annotations

import pytest
import torch

from engine import conformance
from engine.conformance import FP8_TOLERANCE
from engine.errors import KVDtypeRefused, ModelRefused
from engine.kv_fp8 import calibrate, refuse_fp8, use_fp8
from engine.kv_pool import KVPool
from kernels.api import get_backend
from kernels.fp8 import HEADROOM, KV_FP8, MAXIMUM
from tests.engine.tiny import Paged, some_tokens, tiny_model

CUDA = torch.device("cuda")


@pytest.mark.parametrize("backend", ["reference", "torch_cpu"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_model_with_8_bit_kv_stays_close_to_itself(family: str, backend: str) -> None:
    model = tiny_model(family)
    exact = conformance.check(model, get_backend(backend, "cpu"))
    use_fp8(model, get_backend(backend, "cpu"), 16)
    report = conformance.check(model, get_backend(backend, "cpu"), 16, FP8_TOLERANCE)
    assert exact.rms_error < 1e-5 < 1e-3 < report.rms_error < FP8_TOLERANCE.rms
    assert model.shape.itemsize == 1
    assert model.shape.block_bytes(16) == 2 * 3 * 2 * 8 * 16
    assert "8-bit" in model.description


def test_scales_leave_room_and_are_powers_of_two() -> None:
    model = tiny_model()
    scales = calibrate(model, get_backend("torch_cpu", "cpu"), 16)
    assert len(scales) == model.shape.layers
    for one in scales:
        for scale in one:
            assert scale.shape == (model.shape.kv_heads,)
            assert torch.equal(torch.exp2(torch.log2(scale).round()), scale)
    # What calibration saw stays `HEADROOM` below the largest number.
    pool = Paged(tiny_model(), "torch_cpu", block_size=16)
    table = pool.take(64)
    pool.runner.step([pool.row(some_tokens(64), 0, table, sample=False)])
    slots = [b * 16 + i for b in table for i in range(16)]
    for layer, one in enumerate(scales):
        largest = pool.pool.key[layer][:, slots].abs().amax(dim=(1, 2))
        assert (largest / one.key <= MAXIMUM).all()
        assert (largest / one.key >= MAXIMUM / HEADROOM / 8).all()


def test_a_wrong_scale_is_noticed_at_load() -> None:
    model = tiny_model()
    backend = get_backend("torch_cpu", "cpu")
    use_fp8(model, backend, 16)
    assert model.kv_scales is not None
    # Written with one head's scale, read with another's: what a mixed-up index would do.
    attend = backend.attend
    backend.attend = lambda *args, scales, **kwargs: attend(  # type: ignore[method-assign]
        *args, scales=type(scales)(scales.key * 2, scales.value), **kwargs
    )
    with pytest.raises(ModelRefused, match="differ from the model's own"):
        conformance.check(model, backend, 16, FP8_TOLERANCE)


def test_forks_copy_bytes() -> None:
    model = tiny_model()
    use_fp8(model, get_backend("torch_cpu", "cpu"), 4)
    paged = Paged(tiny_model(), "torch_cpu")
    paged.model, paged.pool = model, model.new_pool(64, 4, fill_nan=True)
    paged.runner.model, paged.runner.pool = model, paged.pool
    prompt = some_tokens(18)
    table = paged.take(18)
    paged.runner.step([paged.row(prompt, 0, table, sample=False)])
    fork, copies = paged.fork(table, 18)
    rows = [paged.row([5], 18, paged.grow(t, 19)) for t in (table, fork)]
    out = paged.runner.step(rows, copies)
    assert out.tokens[0] == out.tokens[1]
    assert out.finite == [True, True]


def test_pools_and_scales_go_together() -> None:
    model = tiny_model()
    shape = model.shape
    with pytest.raises(ValueError, match="only 8-bit floats have them"):
        KVPool(shape, 4, 4, torch.float32, "cpu", scales=calibrate(model, get_backend("torch_cpu", "cpu"), 4))
    use_fp8(model, get_backend("torch_cpu", "cpu"), 4)
    with pytest.raises(ValueError, match="got no scales"):
        KVPool(model.shape, 4, 4, KV_FP8, "cpu")


@pytest.mark.parametrize(("capability", "refused"), [((8, 6), True), ((8, 9), False), ((9, 0), False)])
def test_gpus_without_8_bit_floats_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], refused: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A10G")
    backend = get_backend("reference", "cpu")
    if refused:
        with pytest.raises(KVDtypeRefused, match=r"A10G has compute capability 8\.6; .* needs 8\.9"):
            refuse_fp8(CUDA, backend)
    else:
        refuse_fp8(CUDA, backend)


def test_the_interpreter_is_no_place_to_serve_from() -> None:
    backend = get_backend("reference", "cpu")
    backend.name = "triton"
    with pytest.raises(KVDtypeRefused, match="triton on cpu keeps no 8-bit KV"):
        refuse_fp8(torch.device("cpu"), backend)
