"""What a start waits for and needs no torch: begun while everything else is being imported."""

from __future__ import annotations

from pathlib import Path

from engine.types import EngineConfig
from kernels import amx_build

#: There where the driver of an Nvidia GPU is loaded.
_GPU_DRIVER = Path("/proc/driver/nvidia/version")


def begin(config: EngineConfig) -> None:
    """Have the library for the processor's matrix unit compiled in the background where steps will run on the
    processor. A second call does nothing. Where only torch could tell that there is no GPU after all, nothing
    begins, and whoever needs the library waits for all of it."""
    on_cpu = config.device == "cpu" or (config.device == "auto" and not _GPU_DRIVER.exists())
    if on_cpu and config.backend in ("auto", "torch_cpu"):
        amx_build.begin()
