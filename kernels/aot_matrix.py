"""The Triton kernels that `kernels.aot` compiles: what the launcher can choose, chip by chip."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.fp8 import CAPABILITY as FP8_CAPABILITY
from kernels.triton_config import HEAD_DIMS, TileConfig, choose

CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel to compile. `options`: soft cap, sinks and a sliding window all on; `fp8`: the pool holds
    e4m3, `dtype` is the query's."""

    kernel: str  # "attention", "merge", "write", "copy"
    capability: tuple[int, int]
    head_dim: int
    dtype: str = "bf16"
    tile: str = ""
    group: int = 4
    block_size: int = 16
    options: bool = False
    fp8: bool = False

    @property
    def config(self) -> TileConfig:
        """The launcher's tile for this shape and chip."""
        launch = choose(
            head_dim=self.head_dim,
            group=self.group,
            block_size=self.block_size,
            itemsize=2,
            kv_itemsize=1 if self.fp8 else 2,
            capability=self.capability,
        )
        config: TileConfig = getattr(launch, self.tile)
        return config

    @property
    def configuration(self) -> str:
        """For people: shape, tile and options in one line."""
        parts = [f"head {self.head_dim}", self.dtype]
        if self.kernel == "attention":
            c = self.config
            parts += [self.tile, f"{c.block_m}x{c.block_n}", f"{c.warps} warps", f"{c.stages} stages"]
            parts += [f"group {self.group}", f"block {self.block_size}"]
            parts += ["cap+sinks+window"] if self.options else []
        if self.fp8:
            parts.append("fp8 KV")
        return ", ".join(parts)


def matrix(*, quick: bool) -> list[Variant]:
    """All tiles, head dimensions and chips, with and without options; 8-bit KV where the chip knows it;
    other groups and blocks on two."""
    found: list[Variant] = []
    chips = {(8, 0): (64,), (9, 0): (80,)} if quick else dict.fromkeys(CAPABILITIES, HEAD_DIMS)
    for capability, dims in chips.items():
        for head_dim in dims:
            for tile in ("narrow", "wide", "tall"):
                for options in (False,) if quick else (False, True):
                    found.append(Variant("attention", capability, head_dim, tile=tile, options=options))
            found.append(Variant("merge", capability, head_dim, options=True))
            found.append(Variant("write", capability, head_dim))
            found.append(Variant("copy", capability, head_dim))
            if not quick and capability >= FP8_CAPABILITY:
                for tile in ("narrow", "wide", "tall"):
                    for options in (False, True):
                        found.append(
                            Variant("attention", capability, head_dim, tile=tile, options=options, fp8=True)
                        )
                for kernel in ("write", "copy"):
                    found.append(Variant(kernel, capability, head_dim, fp8=True))
        if not quick and capability in ((8, 0), (9, 0)):
            for group, block_size, dtype in ((1, 16, "fp16"), (3, 32, "bf16"), (16, 32, "fp16")):
                for tile in ("narrow", "wide"):
                    found.append(
                        Variant("attention", capability, 128, dtype, tile, group=group, block_size=block_size)
                    )
    return found
