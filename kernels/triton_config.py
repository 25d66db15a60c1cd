"""Which tile sizes the Triton kernels run with: a pure function of the model's shape and the chip.

Nothing here depends on the batch, except that a step chooses between two compiled wide tiles. So the
whole set of kernels that serving can need is known at load, and warm-up compiles it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.api import KernelError

#: Bytes of shared memory that one program may use (CUDA programming guide, table "Technical specifications
#: per compute capability": maximum per thread block).
SHARED_LIMIT = {
    (8, 0): 163 * 1024,
    (8, 6): 99 * 1024,
    (8, 7): 163 * 1024,
    (8, 9): 99 * 1024,
    (9, 0): 227 * 1024,
    (10, 0): 227 * 1024,
    (10, 3): 227 * 1024,
    (12, 0): 99 * 1024,
    (12, 1): 99 * 1024,
}
#: The smallest of them, for chips that are not listed.
SHARED_FALLBACK = 99 * 1024
HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32)
MAX_GROUP = 16


@dataclass(frozen=True, slots=True)
class TileConfig:
    """One compiled attention kernel.

    block_m   stacked query rows (tokens x heads of a group) of a tile; tensor cores want at least 16
    block_n   keys of one turn of the loop
    """

    block_m: int
    block_n: int
    warps: int
    stages: int

    def tokens(self, group: int) -> int:
        """Query tokens that fit one tile."""
        return self.block_m // group


@dataclass(frozen=True, slots=True)
class Launch:
    """The kernels of one model on one chip.

    narrow  own work of decodes: one token's group of heads
    wide    shared segments and prefill chunks
    tall    the same where a segment has rows enough for twice the tile
    """

    narrow: TileConfig
    wide: TileConfig
    tall: TileConfig


def head_parts(head_dim: int) -> tuple[int, int]:
    """A head's dimension as one or two powers of two (80 = 64 + 16), so that no lane computes padding."""
    if head_dim not in HEAD_DIMS:
        raise KernelError(f"head dimension {head_dim} has no Triton kernel; there are {HEAD_DIMS}")
    first = 1 << (head_dim.bit_length() - 1)
    return first, head_dim - first


def shared_bytes(
    config: TileConfig,
    head_dim: int,
    itemsize: int,
    capability: tuple[int, int],
    kv_itemsize: int | None = None,
) -> int:
    """Estimate of a program's shared memory, within a KiB of the truth or above it.

    It follows what `kernels.aot` reads from the compiled kernels: K and V tiles of the pipeline and the
    weights; the query tile, which Hopper and data-centre Blackwell keep while others only pass it through;
    or the float32 output on its way to memory.
    """
    stored = itemsize if kv_itemsize is None else kv_itemsize
    turn = 2 * config.block_n * head_dim * stored
    keeps = multiplies_from_shared(capability)
    pipeline = turn * max(2 if keeps else 1, config.stages - 1)
    query = config.block_m * head_dim * itemsize
    weights = config.block_m * config.block_n * itemsize
    held = pipeline + query if keeps else max(pipeline, turn + query)
    if stored < itemsize:  # K and V of one turn once more, widened on their way to the products
        held += 2 * config.block_n * head_dim * itemsize
    return max(held + weights, 4 * config.block_m * head_dim)


def multiplies_from_shared(capability: tuple[int, int]) -> bool:
    """Whether tensor cores take operands from shared memory (Hopper, data-centre Blackwell)."""
    return capability[0] in (9, 10)


def register_estimate(config: TileConfig, head_dim: int) -> float:
    """32-bit registers a thread needs for accumulator, query and scores: the first to spill."""
    accumulator = config.block_m * head_dim
    scores = config.block_m * config.block_n
    return (1.25 * accumulator + 1.5 * scores) / (32 * config.warps)


def register_budget(head_dim: int, capability: tuple[int, int], *, widens: bool) -> int:
    """What `register_estimate` may come to: found with `kernels.aot`, above it ptxas spills.

    Operands in registers leave less for the rest, and a head in two parts keeps the addresses of both.
    `widens`: K and V of a turn lie there as stored (8-bit) and once more as they are multiplied. Hopper
    multiplies them from shared memory and has room for that.
    """
    if head_parts(head_dim)[1] == 0:
        return 130 if multiplies_from_shared(capability) else 106
    if capability[0] == 9:
        return 100
    return 72 if widens else 80


def choose(
    *,
    head_dim: int,
    group: int,
    block_size: int,
    itemsize: int,
    capability: tuple[int, int],
    kv_itemsize: int | None = None,
) -> Launch:
    """The launcher's configuration.

    Decode reads each key once, so its tile only has to keep loads in flight: few rows, many keys, deep
    pipeline. Wide tiles take 64 rows: at up to 64 rows the products still take less time than the bytes on
    every chip listed (balance 100 to 300 operations a byte; a key used by 64 rows gives 64), so a half-empty
    wide tile costs nothing. The pipeline is as deep as shared memory allows for two programs a
    multiprocessor, at most four stages.

    `itemsize` is the query's; `kv_itemsize`, where it differs, the pool's.

    Raises `KernelError` for shapes that no kernel was written for.
    """
    if not 1 <= group <= MAX_GROUP:
        raise KernelError(f"a group of {group} query heads has no Triton kernel; at most {MAX_GROUP}")
    if block_size not in BLOCK_SIZES:
        raise KernelError(f"block size {block_size} has no Triton kernel; there are {BLOCK_SIZES}")
    if capability < (8, 0):
        raise KernelError(f"compute capability {capability[0]}.{capability[1]} is below 8.0")
    head_parts(head_dim)
    limit = SHARED_LIMIT.get(capability, SHARED_FALLBACK)
    registers = register_budget(head_dim, capability, widens=(kv_itemsize or itemsize) < itemsize)

    def fit(block_m: int, warps: tuple[int, ...], deepest: int) -> TileConfig | None:
        for programs in (2, 1):  # a second program hides the first one's waits
            for count in warps:
                for block_n in (64, 32):
                    for stages in range(deepest, 1, -1):
                        config = TileConfig(block_m, block_n, count, stages)
                        if register_estimate(config, head_dim) > registers:
                            continue
                        held = shared_bytes(config, head_dim, itemsize, capability, kv_itemsize)
                        if held * programs <= limit:
                            return config
        return None

    narrow = fit(16, (4,), 4)
    wide = fit(64, (4, 8), 3)
    if narrow is None or wide is None:
        raise KernelError(f"no tile of head dimension {head_dim} fits {limit} bytes of shared memory")
    return Launch(narrow=narrow, wide=wide, tall=fit(128, (8,), 3) or wide)
