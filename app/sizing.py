"""How many people fit: the ledger's definitions, turned round. Used by `coread size` and by the page.

With N blocks in the pool, a document of D tokens and P tokens of each reader's own (question and answer),
block size B, and the last written token never stored:

    need        = ceil((D + P - 1) / B)          blocks of one reader's page table
    contiguous    floor(N / ceil(max_context / B))
    paged         floor(N / need)
    shared        S = floor(D / B) blocks once for each document, need - S for each reader:
                  the largest U with min(U, documents) · S + U · (need - S) <= N

All three are numbers of people whose answers can be finished at the same time without anybody waiting.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.errors import AppError
from app.render import counted, size
from app.settings import parse_size
from engine.types import ModelShape

if TYPE_CHECKING:
    from engine.ledger import MemorySnapshot, Totals

GIB = 1 << 30
#: Share of a device's memory that is planned for weights and KV together; the rest is for activations.
USABLE = 0.9


class SizingRefused(AppError):
    """The question cannot be computed; the message says which value is wrong."""

    code = "sizing_refused"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model's published shape. `parameters` in all; KV elements of 2 bytes."""

    name: str
    parameters: int
    layers: int
    kv_heads: int
    head_dim: int
    max_context: int

    def shape(self, itemsize: int = 2) -> ModelShape:
        return ModelShape(self.layers, self.kv_heads, self.head_dim, itemsize, self.max_context)


def known_models() -> list[KnownModel]:
    """Models that the calculator knows without a file, from their published configurations."""
    return [
        KnownModel("SmolLM2-135M", 134_515_008, 30, 3, 64, 8_192),
        KnownModel("SmolLM2-1.7B", 1_711_376_384, 24, 32, 64, 8_192),
        KnownModel("Qwen2.5-0.5B", 494_032_768, 24, 2, 64, 32_768),
        KnownModel("Qwen2.5-3B", 3_085_938_688, 36, 2, 128, 32_768),
        KnownModel("Qwen2.5-7B", 7_615_616_512, 28, 4, 128, 32_768),
        KnownModel("Qwen3-8B", 8_190_735_360, 36, 8, 128, 40_960),
        KnownModel("Llama-3.2-1B", 1_235_814_400, 16, 8, 64, 131_072),
        KnownModel("Llama-3.1-8B", 8_030_261_248, 32, 8, 128, 131_072),
        KnownModel("Llama-3.1-70B", 70_553_706_496, 80, 8, 128, 131_072),
        KnownModel("Mistral-7B-v0.3", 7_248_023_552, 32, 8, 128, 32_768),
    ]


def known_devices() -> dict[str, int]:
    """Devices and the bytes of memory they are sold with."""
    return {
        "T4 (16 GB)": 16 * GIB,
        "L4 (24 GB)": 24 * GIB,
        "A10G (24 GB)": 24 * GIB,
        "A100 (40 GB)": 40 * GIB,
        "A100 (80 GB)": 80 * GIB,
        "H100 (80 GB)": 80 * GIB,
        "H200 (141 GB)": 141 * GIB,
    }


@dataclass(frozen=True, slots=True)
class Workload:
    """Readers who each ask once: `document_tokens` in common (instructions included), `own_tokens` of their
    own (question and answer), spread over `documents` documents."""

    document_tokens: int
    own_tokens: int
    documents: int = 1


@dataclass(frozen=True, slots=True)
class Fit:
    """Users that fit a pool, three ways. `need` and `shared` are in blocks; bytes are of one reader."""

    pool_blocks: int
    block_bytes: int
    need_blocks: int
    shared_blocks: int
    reserved_blocks: int
    contiguous_users: int
    paged_users: int
    shared_users: int

    def json(self) -> dict[str, Any]:
        """Keys: the fields, and `pool_bytes`, `*_bytes` of one reader in each arrangement."""
        own = self.need_blocks - self.shared_blocks
        return {
            "pool_blocks": self.pool_blocks,
            "pool_bytes": self.pool_blocks * self.block_bytes,
            "block_bytes": self.block_bytes,
            "need_blocks": self.need_blocks,
            "shared_blocks": self.shared_blocks,
            "contiguous_users": self.contiguous_users,
            "paged_users": self.paged_users,
            "shared_users": self.shared_users,
            "contiguous_bytes": self.reserved_blocks * self.block_bytes,
            "paged_bytes": self.need_blocks * self.block_bytes,
            "own_bytes": own * self.block_bytes,
            "document_bytes": self.shared_blocks * self.block_bytes,
        }


def _in_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise SizingRefused(f"{name} is {value:,}; it must lie between {low:,} and {high:,}.")


def fit(shape: ModelShape, block_size: int, pool_blocks: int, work: Workload) -> Fit:
    """How many readers fit `pool_blocks` blocks. Raises `SizingRefused` for values out of range."""
    _in_range("pool_blocks", pool_blocks, 1, 1 << 40)
    _in_range("block_size", block_size, 1, 4_096)
    _in_range("document_tokens", work.document_tokens, 0, shape.max_context)
    _in_range("own_tokens", work.own_tokens, 1, shape.max_context)
    _in_range("documents", work.documents, 1, 1 << 20)
    _in_range("document_tokens + own_tokens", work.document_tokens + work.own_tokens, 1, shape.max_context)
    need = -(-(work.document_tokens + work.own_tokens - 1) // block_size) or 1
    reserved = -(-shape.max_context // block_size)
    shared = min(work.document_tokens // block_size, need)
    own = need - shared
    return Fit(
        pool_blocks, shape.block_bytes(block_size), need, shared, reserved,
        pool_blocks // reserved, pool_blocks // need,
        _most_sharing(pool_blocks, shared, own, work.documents),
    )  # fmt: skip


def _most_sharing(pool: int, shared: int, own: int, documents: int) -> int:
    alone = pool // (shared + own)  # each with a document of its own
    if alone < documents:
        return alone
    left = pool - documents * shared
    # A reader who needs nothing beyond the document's own blocks takes none: only whole numbers of tokens
    # below one block do that, and then memory is not what limits.
    return left // own if own else max(alone, pool)


def pool_blocks_on(model: KnownModel, device_bytes: int, block_size: int, itemsize: int = 2) -> int:
    """Blocks beside the weights (2 bytes a parameter) on a device. Raises `SizingRefused` where none fit."""
    left = int(device_bytes * USABLE) - model.parameters * 2
    blocks = left // model.shape(itemsize).block_bytes(block_size)
    if blocks < 1:
        raise SizingRefused(
            f"{model.name} needs {model.parameters * 2 / GIB:.1f} GiB for its weights alone; of "
            f"{device_bytes / GIB:.1f} GiB, {device_bytes * USABLE / GIB:.1f} GiB can be used."
        )
    return blocks


def model_named(name: str, files: bool = False) -> KnownModel:
    """A model of the list by its name; with `files`, also one from the `config.json` in a local folder."""
    for model in known_models():
        if model.name.lower() == name.lower():
            return model
    path = Path(name) / "config.json"
    if files and path.is_file():
        return _from_config(path)
    names = ", ".join(model.name for model in known_models())
    where = "a folder with a config.json, or one of" if files else "one of"
    raise SizingRefused(f"The model {name[:80]!r} is not known; give {where} {names}.")


def _from_config(path: Path) -> KnownModel:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        heads = int(config["num_attention_heads"])
        layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
        head_dim = int(config.get("head_dim") or hidden // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        inner = int(config["intermediate_size"])
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        tied = 1 if config.get("tie_word_embeddings") else 2
        parameters = layers * (attention + 3 * hidden * inner) + tied * int(config["vocab_size"]) * hidden
        return KnownModel(
            path.parent.name, parameters, layers, kv_heads, head_dim, int(config["max_position_embeddings"])
        )
    except (OSError, ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        raise SizingRefused(f"{path} does not describe a model that can be sized ({error}).") from None


def estimate(
    model: str, device_bytes: int, work: Workload, block_size: int = 16, *, files: bool = False
) -> dict[str, Any]:
    """The calculator: `Fit.json` of a model on a device, with `model`, `device_bytes`, `weights_bytes`.

    `files`: the model may be named by a local folder; never where somebody else chooses the name.
    """
    _in_range("device_bytes", device_bytes, 1, 1 << 50)
    found = model_named(model, files)
    blocks = pool_blocks_on(found, device_bytes, block_size)
    return {
        "model": found.name,
        "device_bytes": device_bytes,
        "weights_bytes": found.parameters * 2,
        "block_size": block_size,
        "max_context": found.max_context,
        "document_tokens": work.document_tokens,
        "own_tokens": work.own_tokens,
        "documents": work.documents,
        **fit(found.shape(), block_size, blocks, work).json(),
    }


def what_if(snapshot: MemorySnapshot) -> dict[str, Any] | None:
    """What the open conversations would need otherwise, and how many of their kind fit the pool.

    An estimate: it takes the mean conversation of this moment. None while there is none. Keys:
    `unshared_bytes` and `reserved_bytes` needed by all now, `paged_users`, `shared_users`,
    `contiguous_users`, `pool_bytes`.
    """
    totals: Totals = snapshot.totals_open
    people = totals.conversations
    if not people or not totals.unshared_bytes:
        return None
    unit, pool = snapshot.block_bytes, snapshot.total_blocks
    entries = totals.unshared_bytes // unit
    own = sum(row.blocks - row.shared_blocks for row in snapshot.open.values())
    common = totals.physical_bytes // unit - own
    return {
        "conversations": people,
        "unshared_bytes": totals.unshared_bytes,
        "reserved_bytes": totals.reserved_bytes,
        "pool_bytes": pool * unit,
        "contiguous_users": pool * unit * people // totals.reserved_bytes,
        "paged_users": pool * people // entries,
        # The blocks in common are there once, whoever joins; without any of their own, the pool is the limit.
        "shared_users": (pool - common) * people // own if own else pool,
    }


def run_size(model: str, memory: str, common: int, own: int, documents: int) -> dict[str, Any]:
    """`coread size`: see `estimate`. `memory` is written as in 24GB."""
    try:
        device = parse_size(memory)
    except ValueError as error:
        raise SizingRefused(f"{memory!r} is no size: {error}.") from None
    return estimate(model, int(device), Workload(common, own, documents), files=True)


def report(found: dict[str, Any]) -> list[str]:
    """An estimate in lines for a terminal."""
    rows = (("contiguous", "contiguous_bytes"), ("paged", "paged_bytes"), ("shared", "own_bytes"))
    lines = [
        f"{found['model']} on {found['device_bytes'] / GIB:.1f} GiB, {USABLE:.0%} of it used: "
        f"{found['weights_bytes'] / GIB:.1f} GiB of weights leave {found['pool_bytes'] / GIB:.2f} GiB "
        f"for KV, {found['pool_blocks']:,} blocks of {found['block_size']} tokens, "
        f"{size(found['block_bytes'])} each.",
        f"{found['document_tokens']:,} tokens in common in {counted(found['documents'], 'document')}, "
        f"{found['own_tokens']:,} of each reader's own:",
    ]
    notes = {
        "contiguous": f", for a whole context of {found['max_context']:,} tokens",
        "shared": f" beside {size(found['document_bytes'])} a document, once",
    }
    for name, key in rows:
        note = notes.get(name, "")
        lines.append(f"  {name:<11}{found[f'{name}_users']:>8,} readers, {size(found[key])} each{note}")
    return lines
