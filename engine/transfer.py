"""Bringing a step's small arrays to the device without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor's copy on `device`; the tensor itself where that is the CPU.

    For a GPU it goes through pinned memory and is only enqueued. Torch gives that memory back to itself once
    the copy has ended, so the caller may forget it at once.
    """
    if device.type != "cuda":
        return values if device.type == "cpu" else values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
