"""Finding, checking and loading a model.

Weights, tokenizer and modelling code are transformers'; what is decided here is where they come from, on
which device and in which precision they run, and what is refused before it can compute nonsense.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine import bridge
from engine.decoder import Decoder, TransformersDecoder
from engine.errors import ModelNotFound, ModelRefused
from engine.kv_pool import KVPool
from engine.packaged import default_cache_dir, load_gguf, packaged_gguf
from engine.types import EngineConfig, ModelShape
from kernels.fp8 import Scales

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: What "auto" loads from the hub where the packaged model is not installed, as on a Space: the packaged
#: model's own original on a CPU; on a GPU one that reads several pages and has few KV heads.
HUB_DEFAULTS = {"cpu": "HuggingFaceTB/SmolLM2-135M-Instruct", "cuda": "Qwen/Qwen2.5-1.5B-Instruct"}
#: Layer kinds whose state is keys and values of tokens, which is what pages hold.
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
#: Rotary embeddings that transformers rescales by the longest position *of the batch* once it passes the
#: original context: keys would then depend on who else is in the batch.
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


@dataclass(slots=True)
class LoadedModel:
    """A model ready for `engine.runner`.

    name           what the screens call it
    description    one sentence: name, precision, device, where it came from
    windows        sliding window of each layer (None: full attention); one entry a layer
    q_heads        query heads of each layer
    kv_dtype       of its KV pools; `kv_scales` belong to 8-bit floats (`engine.kv_fp8`)
    eos_token_ids  ids that end an answer
    decoder        computes a step; starts as the model's own code, may be replaced before service
    """

    tokenizer: Any
    model: Any
    shape: ModelShape
    device: torch.device
    dtype: torch.dtype
    name: str
    description: str
    vocab_size: int
    eos_token_ids: frozenset[int]
    windows: tuple[int | None, ...]
    q_heads: int
    decoder: Decoder
    kv_dtype: torch.dtype
    kv_scales: tuple[Scales, ...] | None = None

    def new_pool(self, num_blocks: int, block_size: int, *, fill_nan: bool = False) -> KVPool:
        """A KV pool for this model, on its device."""
        return KVPool(
            self.shape, num_blocks, block_size, self.kv_dtype, self.device, fill_nan, scales=self.kv_scales
        )


def load_model(config: EngineConfig) -> LoadedModel:
    """Load `config.model`: "packaged", a local folder, a GGUF file, a hub id, or "auto" (`default_model`).

    `config.extra["cache_dir"]` is where converted weights are kept (default: the user's cache directory;
    empty string: nowhere). Raises `ModelNotFound` with what to do about it, `ModelRefused` where the model
    uses something that paged attention does not compute exactly.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    with _quiet():
        chosen = default_model(device) if config.model == "auto" else config.model
        model, tokenizer, name, source = _read(chosen, config, dtype)
    return adopt(
        model, tokenizer, name=name, source=source, device=device, dtype=dtype, max_context=config.max_context
    )


def adopt(
    model: Any,
    tokenizer: Any,
    *,
    name: str = "model",
    source: str = "given",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    max_context: int | None = None,
) -> LoadedModel:
    """Make a transformers causal language model ready for the runner (moves it and sets its attention).

    Raises `ModelRefused` for architectures that pages cannot serve.
    """
    device = torch.device(device)
    text = model.config.get_text_config(decoder=True)
    _refuse_architecture(model, text)
    shape, note = _shape(text, tokenizer, dtype, max_context)
    model = model.to(device=device, dtype=dtype).eval()
    model.requires_grad_(False)
    bridge.register()
    model.set_attn_implementation(bridge.IMPLEMENTATION)
    if model.config._attn_implementation != bridge.IMPLEMENTATION:
        raise ModelRefused(f"{type(model).__name__} does not let its attention be replaced.")
    precision = str(dtype).removeprefix("torch.")
    return LoadedModel(
        tokenizer=tokenizer,
        model=model,
        shape=shape,
        device=device,
        dtype=dtype,
        name=name,
        description=(
            f"{name} ({source}) in {precision} on {device}, up to {shape.max_context:,} tokens{note}."
        ),
        vocab_size=int(model.get_input_embeddings().weight.shape[0]),
        eos_token_ids=_eos(model, tokenizer),
        windows=_windows(text, shape.layers),
        q_heads=int(text.num_attention_heads),
        decoder=TransformersDecoder(model),
        kv_dtype=dtype,
    )


def default_model(device: torch.device) -> str:
    """What "auto" means here: the packaged model if it is installed, else a hub id that fits the device."""
    try:
        packaged_gguf()
    except ModelNotFound:
        return HUB_DEFAULTS.get(device.type, HUB_DEFAULTS["cpu"])
    return "packaged"


def resolve_device(name: str) -> torch.device:
    """ "auto" is CUDA where there is one. Raises `ModelRefused` for CUDA where there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelRefused(
            "The device is set to cuda, and torch finds no CUDA device; set it to auto or cpu."
        )
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "auto" is the fastest precision that the device computes natively."""
    if name != "auto":
        if name not in _DTYPES:
            raise ModelRefused(f"The dtype is {name!r}; it must be auto, float32, bfloat16 or float16.")
        return _DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32


def _read(wanted: str, config: EngineConfig, dtype: torch.dtype) -> tuple[Any, Any, str, str]:
    """`(model, tokenizer, name, source)` from wherever the setting points."""
    if wanted == "packaged":
        path, source = packaged_gguf(), "packaged"
    else:
        path, source = Path(wanted).expanduser(), "local"
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise ModelNotFound(
                f"The folder {path} holds neither a config.json nor exactly one .gguf file; point the model "
                "setting at a folder saved by transformers, at a .gguf file, or at a hub id."
            )
        path = files[0]
    try:
        if path.suffix == ".gguf" and path.is_file():
            model, tokenizer = load_gguf(path, dtype, cache_directory(config))
            return model, tokenizer, path.stem.rsplit(".", 1)[0], source
        from transformers import AutoModelForCausalLM, AutoTokenizer

        local = path.is_dir()
        where = str(path) if local else wanted
        model = AutoModelForCausalLM.from_pretrained(
            where, dtype=dtype, use_safetensors=True, trust_remote_code=False, local_files_only=local
        )
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False, local_files_only=local)
        return model, tokenizer, Path(where).name, source if local else "hub"
    except OSError as error:
        raise ModelNotFound(
            f"No model was found at {wanted!r} ({_first_line(error)}). Set the model to packaged, to a "
            "local folder or to a hub id that this machine can reach."
        ) from error
    except (ValueError, ImportError, KeyError) as error:
        raise ModelRefused(f"{wanted!r} cannot be loaded: {_first_line(error)}") from error


def cache_directory(config: EngineConfig) -> Path | None:
    """Where converted weights and measured choices are kept; None: nowhere. See `load_model`."""
    chosen = config.extra.get("cache_dir")
    if chosen is None:
        return default_cache_dir()
    return Path(chosen) if chosen else None


def _refuse_architecture(model: Any, text: Any) -> None:
    kind = type(model).__name__
    if getattr(text, "is_encoder_decoder", False) or not getattr(text, "is_causal", True):
        raise ModelRefused(f"{kind} is not a decoder-only causal model.")
    if not getattr(model, "_supports_attention_backend", False):
        raise ModelRefused(f"{kind} does not use transformers' attention interface.")
    other = sorted(set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES)
    if other:
        raise ModelRefused(f"{kind} has layers of kind {', '.join(other)}, whose state pages cannot hold.")
    if getattr(model.config, "quantization_config", None) is not None:
        raise ModelRefused(f"{kind} is stored in a quantised form that is not unpacked at load.")


def _shape(text: Any, tokenizer: Any, dtype: torch.dtype, max_context: int | None) -> tuple[ModelShape, str]:
    """The pool's view of the model, and a note for people where the context was cut."""
    layers, heads = getattr(text, "num_hidden_layers", None), getattr(text, "num_attention_heads", None)
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    if not isinstance(layers, int) or not isinstance(heads, int) or not isinstance(kv_heads, int):
        raise ModelRefused(
            f"{type(text).__name__} does not give one number each of layers, heads and KV heads."
        )
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    limit = getattr(text, "max_position_embeddings", None) or getattr(tokenizer, "model_max_length", None)
    if limit is None or limit > 100_000_000:  # transformers' stand-in for "unknown" is 1e30
        limit = max_context
    if limit is None:
        raise ModelRefused("The model does not say how long its context is; set max_context.")
    note = ""
    original = _stable_rope_limit(text)
    if original is not None and original < limit:
        limit, note = original, " (its rotary embedding is only stable up to there)"
    if max_context is not None and max_context > limit:
        raise ModelRefused(
            f"max_context is {max_context:,}; this model reads at most {limit:,} tokens{note}."
        )
    context = int(max_context or limit)
    return ModelShape(layers, kv_heads, int(head_dim), dtype.itemsize, context), note


def _stable_rope_limit(text: Any) -> int | None:
    """Positions up to which the rotary embedding does not depend on the batch; None: everywhere."""
    parameters = getattr(text, "rope_parameters", None) or {}
    # One set, or one for each kind of layer.
    sets = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    limits = [
        int(one.get("original_max_position_embeddings") or text.max_position_embeddings)
        for one in sets
        if one.get("rope_type") in _BATCH_DEPENDENT_ROPE
    ]
    return min(limits) if limits else None


def _windows(text: Any, layers: int) -> tuple[int | None, ...]:
    window = getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None)
    if types:
        return tuple(window if kind == "sliding_attention" else None for kind in types[:layers])
    return (window,) * layers


def _eos(model: Any, tokenizer: Any) -> frozenset[int]:
    ids: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        if isinstance(value, int):
            ids.add(value)
        elif isinstance(value, (list, tuple)):
            ids.update(int(one) for one in value)
    return frozenset(ids)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def _quiet() -> Iterator[None]:
    """Loading without progress bars and advice meant for notebooks; the settings are put back."""
    from transformers.utils import logging as untyped

    noise: Any = untyped
    bars, level = noise.is_progress_bar_enabled(), noise.get_verbosity()
    noise.disable_progress_bar()
    noise.set_verbosity_error()
    try:
        yield
    finally:
        noise.set_verbosity(level)
        if bars:
            noise.enable_progress_bar()
