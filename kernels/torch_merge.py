"""Partial results of attention, merged by their log-sum-exp (see `kernels.torch_cpu`)."""

from __future__ import annotations

import torch
from torch import Tensor

#: Log-sum-exp of a row that saw no key: finite, so that a merge never meets `-inf - -inf`.
NOTHING = -1e30


class Merge:
    """Log-sum-exp `[kv_heads, T, group]` and output `[kv_heads, T, group, head_dim]` so far; float32."""

    def __init__(
        self, shape: tuple[int, int, int, int], device: torch.device, sinks: Tensor | None, mixed: bool
    ) -> None:
        kv_heads, rows, group, _ = shape
        self.lse = torch.empty((kv_heads, rows, group), dtype=torch.float32, device=device)
        self.out = torch.empty(shape, dtype=torch.float32, device=device)
        self.empty = sinks is None
        if sinks is not None:
            # A sink is a key with a logit and no value.
            self.lse.copy_(sinks.float().view(kv_heads, 1, group).expand_as(self.lse))
            self.out.zero_()
        elif mixed:
            self.lse.fill_(NOTHING)
            self.out.zero_()

    def add(self, rows: slice | Tensor, first: bool, lse: Tensor, out: Tensor) -> None:
        """Merge a partial result of the given rows; `first`: these rows hold nothing yet."""
        if isinstance(rows, slice):
            old_lse, old_out = self.lse[:, rows], self.out[:, rows]
            if first and self.empty:
                old_lse.copy_(lse)
                old_out.copy_(out)
                return
            old_out.lerp_(out.float(), torch.sigmoid(lse - old_lse).unsqueeze(-1))
            torch.logaddexp(old_lse, lse, out=old_lse)
            return
        out = out.float()
        if not (first and self.empty):
            old_lse = self.lse.index_select(1, rows)
            old_out = self.out.index_select(1, rows)
            out = old_out.lerp_(out, torch.sigmoid(lse - old_lse).unsqueeze(-1))
            lse = torch.logaddexp(old_lse, lse)
        self.lse.index_copy_(1, rows, lse)
        self.out.index_copy_(1, rows, out)

    def result(self, dtype: torch.dtype) -> Tensor:
        """`[T, kv_heads * group, head_dim]`, converted and laid out in one pass."""
        kv_heads, rows, group, head_dim = self.out.shape
        result = torch.empty((rows, kv_heads, group, head_dim), dtype=dtype, device=self.out.device)
        return result.copy_(self.out.permute(1, 0, 2, 3)).view(rows, kv_heads * group, head_dim)
