"""Feed-forward blocks whose backward is computed in parts, so that no chip holds large weights of them whole at once.

Such a block is products of its input with one or more weights, a function of single features of what they give, and a
product of that with a last weight. Where layers are computed again, the backward needs each of the first weights
twice, and each stays gathered from the one need to the other, beside the others and their gradients: in a model of
70B these are 448 MiB each. But features meet in the last product only. So this backward takes the last weight by
itself, and of the others some features at a time: what `tensor` does on several chips
(https://arxiv.org/abs/1909.08053), one after the other. It computes as much, and gathers nothing more often.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import gcd
from typing import Any

import torch
import torch_xla.core.xla_model as xm
from torch import nn
from torch.autograd.function import once_differentiable

from . import PartitionSpec
from .remat import autocast_now, weights_of
from .scan import LayOut

MOST_GATHERED = 128 * 2**20
"""Bytes of a weight in one part. The next part is gathered while the gradients of this one's weights are computed."""

_TILE_ROWS = 16
"""Of bfloat16, of which a TPU moves no less: as in `parallel.plan`, which knows no device."""

Gradients = list[torch.Tensor | None]


class FeedForward:
    """Takes the place of a block's ``forward``.

    Args:
        block: All of its parameters belong to the products: to the first ones [features] or [features, hidden], to
            the last one a weight [hidden, features].
        last: The name of the module that makes the last product.
        axes: Of each parameter, in the block's order, the mesh axes that its dimensions go over.
        shards: Into how many parts these cut the features of the first ones.
        constrain: `Runtime.constrain`.
        scatter: `Runtime.scatter`, for the gradients of each part.
    """

    def __init__(
        self,
        block: nn.Module,
        last: str,
        axes: Sequence[PartitionSpec],
        shards: int,
        constrain: LayOut,
        scatter: LayOut,
    ) -> None:
        own: Any = block.forward
        if isinstance(own, FeedForward):  # of an earlier training
            own = own.whole
        else:
            block.get_submodule(last).register_forward_pre_hook(_round_gradient)
        self.whole: Callable[[torch.Tensor], torch.Tensor] = own
        self._block, self._last, self._axes, self._shards = block, last, axes, shards
        self._constrain, self._scatter = constrain, scatter
        self._at = [name for name, _ in block.named_parameters()].index(f"{last}.weight")

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        weights = list(self._block.parameters())
        last = weights[self._at]
        parts = count_parts(last.shape[1], self._shards, last.numel() * _computed_in(last).itemsize)
        if parts == 1:
            return self.whole(hidden)
        result: torch.Tensor = _InParts.apply(self, parts, hidden, *weights)
        return result

    def gradients(
        self, parts: int, hidden: torch.Tensor, weights: Sequence[torch.Tensor], gradient: torch.Tensor
    ) -> Gradients:
        """Of ``hidden`` and of each of ``weights``, None of those that are not trained, where ``gradient`` comes back.

        Each barrier keeps the compiler from gathering or computing what comes next before it is done with the rest.
        """
        firsts = [at for at in range(len(weights)) if at != self._at]
        cut = {at: _cut(weights[at].detach(), 0, self._shards, parts) for at in firsts}
        of_inner = _cut(self._gradient_of_inner(weights, gradient), -1, self._shards, parts)
        xm.optimization_barrier_(of_inner)  # for the parts what `_round_gradient` is for the whole
        done, inner, found = of_inner[-1], [], []
        for part in range(parts):
            own = {at: cut[at][part] for at in firsts}
            xm.optimization_barrier_([*own.values(), done])
            inner_of_part, of_hidden, of_weights = self._part(hidden, weights, own, of_inner[part])
            done = done + of_hidden if part else of_hidden
            inner.append(inner_of_part)
            found.append(of_weights)
        settled: Gradients = [None] * len(weights)
        for at in found[0]:
            whole = _join([of_weights[at] for of_weights in found], 0, self._shards)
            settled[at] = self._constrain(whole, self._axes[at])
        wide = _join(inner, -1, self._shards)
        xm.optimization_barrier_([done, wide, *(each for each in settled if each is not None)])
        output, last = self._product(weights, wide)
        if last.requires_grad:
            of_last = self._settle(torch.autograd.grad(output, last, gradient)[0], self._at)
            xm.optimization_barrier_([done, of_last])
            settled[self._at] = of_last
        return [done, *settled]

    def _gradient_of_inner(self, weights: Sequence[torch.Tensor], gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of what the last product takes. It does not depend on that."""
        last = weights[self._at]
        anything = gradient.new_zeros(*gradient.shape[:-1], last.shape[1], dtype=_computed_in(last)).requires_grad_()
        output, _ = self._product(weights, anything)
        return torch.autograd.grad(output, anything, gradient)[0]

    def _product(self, weights: Sequence[torch.Tensor], inner: torch.Tensor) -> tuple[torch.Tensor, nn.Parameter]:
        """What the last product gives of ``inner``, and its weight in that."""
        parameters = _parameters(weights)
        with weights_of(self._block, parameters):
            return self._block.get_submodule(self._last)(inner), parameters[self._at]

    def _settle(self, gradient: torch.Tensor, at: int) -> torch.Tensor:
        return self._constrain(self._scatter(gradient, self._axes[at]), self._axes[at])

    def _part(
        self,
        hidden: torch.Tensor,
        weights: Sequence[torch.Tensor],
        own: dict[int, torch.Tensor],
        of_inner: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, dict[int, torch.Tensor]]:
        """Of some features, whose first weights are ``own``: what the last product takes, and the gradients.

        Returns:
            These features of every token; the gradient of ``hidden``; those of the weights that are trained.
        """
        hidden = hidden.detach().requires_grad_()
        parameters = _parameters(weights, own)
        with weights_of(self._block, parameters), _without(self._block, self._last):
            inner = self.whole(hidden)
        trained = [at for at in own if parameters[at].requires_grad]
        of_hidden, *others = torch.autograd.grad(inner, [hidden, *(parameters[at] for at in trained)], of_inner)
        of_weights = {at: self._settle(each, at) for at, each in zip(trained, others, strict=True)}
        return inner.detach(), of_hidden, of_weights


def count_parts(features: int, shards: int, gathered: int) -> int:
    """How few parts of whole tiles of every shard are at most `MOST_GATHERED` of ``gathered`` bytes."""
    rows = features // shards
    tiles = rows // gcd(rows, _TILE_ROWS)
    least = -(-gathered // MOST_GATHERED)
    return next((parts for parts in range(least, tiles) if tiles % parts == 0), tiles)


class _InParts(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, block: FeedForward, parts: int, hidden: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.block, ctx.parts, ctx.autocast = block, parts, autocast_now()
        ctx.save_for_backward(hidden, *weights)
        return block.whole(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        hidden, *weights = ctx.saved_tensors
        with torch.enable_grad(), ctx.autocast():
            return None, None, *ctx.block.gradients(ctx.parts, hidden, weights, gradient)


def _round_gradient(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
    """Let the gradient of what the last product takes be rounded to its own type as soon as it is made.

    What it is multiplied with next is in float32, so libtpu may hold it in that, and copy it, at twice the memory.
    """

    def round_now(gradient: torch.Tensor) -> torch.Tensor:
        rounded = gradient.clone()
        xm.optimization_barrier_([rounded])
        return rounded

    if inputs[0].requires_grad:
        inputs[0].register_hook(round_now)


def _computed_in(weight: torch.Tensor) -> torch.dtype:
    """The type in which products with ``weight`` are made now, and gathered for."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def _parameters(weights: Sequence[torch.Tensor], own: Mapping[int, torch.Tensor] | None = None) -> list[nn.Parameter]:
    """``weights`` by themselves, some of them replaced by those in ``own``."""
    own = own or {}
    return [nn.Parameter(own.get(at, weight).detach(), weight.requires_grad) for at, weight in enumerate(weights)]


@contextmanager
def _without(block: nn.Module, last: str) -> Iterator[None]:
    """Let ``block`` return what its last product takes."""
    product = block._modules[last]
    block._modules[last] = nn.Identity()
    try:
        yield
    finally:
        block._modules[last] = product


def _cut(tensor: torch.Tensor, dim: int, shards: int, parts: int) -> list[torch.Tensor]:
    """``tensor`` in parts along ``dim``, each of which has as much of every shard; each shard cuts its own."""
    dim %= tensor.dim()
    cut = tensor.unflatten(dim, (shards, parts, -1))
    return [each.flatten(dim, dim + 1).clone() for each in cut.unbind(dim + 1)]


def _join(parts: Sequence[torch.Tensor], dim: int, shards: int) -> torch.Tensor:
    """What `_cut` was given."""
    dim %= parts[0].dim()
    return torch.stack([part.unflatten(dim, (shards, -1)) for part in parts], dim + 1).flatten(dim, dim + 2)
