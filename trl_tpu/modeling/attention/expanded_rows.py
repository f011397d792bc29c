"""Moves the tokens of packed rows to rows of whole dialogues and back, on the device.

Every move gathers, in its backward too wherever a token has one place only: accelerators gather fast and scatter
slowly.

Letters: R rows, L length of a row, 2 chosen and rejected, H heads, D size of a head, N and M places in a row.
"""

from typing import Any

import torch

from ...packing.rows import Expansion


class ExpandedRows(Expansion[torch.Tensor]):
    """An expansion on the device, and the moves by it."""

    def queries(self, x_RHLD: torch.Tensor) -> torch.Tensor:
        """Return a query for each place, [2R, H, L, D]; only those count whose output is taken back."""
        # so no other copy has a gradient, and none need be summed
        return self._as_rows(_Gather.apply(x_RHLD.transpose(1, 2), self.gather_R2L.flatten(1), self.inverse_RL))

    def copies(self, x_RHLD: torch.Tensor) -> torch.Tensor:
        """Return a copy for each place, [2R, H, L, D]."""
        return self._as_rows(_Gather.apply(x_RHLD.transpose(1, 2), self.gather_R2L.flatten(1), None))

    def outputs(self, x_2RHLD: torch.Tensor) -> torch.Tensor:
        """Return each token's output, in the order that transformers wants: [R, L, H, D]."""
        x_RNHD = x_2RHLD.transpose(1, 2).unflatten(0, (-1, 2)).flatten(1, 2)
        return _Gather.apply(x_RNHD, self.inverse_RL, self.scatter_R2L.flatten(1))

    @staticmethod
    def _as_rows(x_RNHD: torch.Tensor) -> torch.Tensor:
        return x_RNHD.unflatten(1, (2, -1)).flatten(0, 1).transpose(1, 2)


class _Gather(torch.autograd.Function):
    """Gathers ``x[r, index[r, m]]``, and zeros where the index is -1.

    Args:
        x_RN: Any number of dimensions may follow.
        index_RM: Where to take from.
        inverse_RN: For each n, the one m whose gradient it gets, or -1. None to sum over all m that took it.
    """

    @staticmethod
    def forward(ctx: Any, x_RN: torch.Tensor, index_RM: torch.Tensor, inverse_RN: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(index_RM, inverse_RN)
        ctx.columns = x_RN.shape[1]
        return _take(x_RN, index_RM)

    @staticmethod
    def backward(ctx: Any, gradient_RM: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        index_RM, inverse_RN = ctx.saved_tensors
        if inverse_RN is not None:
            return _take(gradient_RM, inverse_RN), None, None
        # sums of many copies need more than bfloat16's 8 bits
        wide = _blank(gradient_RM, index_RM).to(torch.promote_types(gradient_RM.dtype, torch.float32))
        total = wide.new_zeros((len(wide) * ctx.columns, *wide.shape[2:]))
        total = total.index_add(0, _places(index_RM, ctx.columns), wide.flatten(0, 1))
        return total.unflatten(0, (len(wide), ctx.columns)).to(gradient_RM.dtype), None, None


def _take(x_RN: torch.Tensor, index_RM: torch.Tensor) -> torch.Tensor:
    taken = x_RN.flatten(0, 1).index_select(0, _places(index_RM, x_RN.shape[1]))
    return _blank(taken.unflatten(0, index_RM.shape), index_RM)


def _places(index_RM: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the places of ``index_RM``, where -1 is as good as 0, in rows of ``columns`` put end to end.

    Numbers other than 0 and 1 would reach XLA as arguments, which no loop takes where each device computes for itself.
    """
    begin_R = torch.arange(0, len(index_RM) * columns, columns, dtype=index_RM.dtype, device=index_RM.device)
    return (torch.relu(index_RM) + begin_R[:, None]).flatten()


def _blank(x_RM: torch.Tensor, index_RM: torch.Tensor) -> torch.Tensor:
    return x_RM.masked_fill((index_RM < 0)[(...,) + (None,) * (x_RM.dim() - 2)], 0)
