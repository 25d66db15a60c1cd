"""The way of a step's integers to the device: filled in pinned memory, copied without waiting."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Upload:
    """Host vectors in pinned memory, used in turn.

    A vector is filled again only once its last copy has ended, which turns later it has: the wait is a
    formality.
    """

    def __init__(self, device: torch.device, turns: int = 4) -> None:
        self.device = device
        self.pinned = device.type == "cuda"
        self.vectors: list[Tensor] = [torch.empty(0, dtype=torch.int32) for _ in range(turns)]
        self.copied: list[Any] = [None] * turns
        self.turn = 0

    def begin(self, size: int) -> Tensor:
        """A host vector of at least `size` elements."""
        self.turn = (self.turn + 1) % len(self.vectors)
        event = self.copied[self.turn]
        if event is not None:
            event.synchronize()
        if self.vectors[self.turn].numel() < size:
            capacity = 1 << max(12, size.bit_length())
            self.vectors[self.turn] = torch.empty(capacity, dtype=torch.int32, pin_memory=self.pinned)
        return self.vectors[self.turn][:size]

    def send(self, host: Tensor) -> Tensor:
        """Copy to a new device vector."""
        target = torch.empty(host.numel(), dtype=torch.int32, device=self.device)
        target.copy_(host, non_blocking=True)
        if self.pinned:
            self.copied[self.turn] = torch.cuda.current_stream(self.device).record_event()
        return target
