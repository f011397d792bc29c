"""The step over plain values, without a trainer: forward and loss, the optimizer's state, results of evaluation steps.

`RewardTrainer.compute_loss` calls `training_step`, and so can a loop of your own, which calls `backward` on its loss.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Adam, Adamax, NAdam, Optimizer, RAdam
from transformers import EvalPrediction

from ..data.batch import Batch
from ..data.comparisons import Comparisons
from ..modeling.layers import LayerStack
from ..modeling.losses import Loss
from ..modeling.rewards import rewards_of
from ..parallel.shard import zeros_laid_out_like
from ..parallel.sharding_plan import Placement
from ..runtime import PartitionSpec, Remat, Runtime, current

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """Loss and rewards of a batch, on the device."""

    loss: torch.Tensor
    """The loss of the batch; of a micro-batch its share, so that the shares add up to it."""
    losses_P: torch.Tensor
    """The weighted loss of each row of the data; 0 for padding."""
    rewards_SA: torch.Tensor
    """Rewards, float32 or wider; arbitrary for padding."""
    tokens_S: torch.Tensor
    """Tokens that each reward adds, as if no prompt were shared; 0 for padding."""
    table: Comparisons[torch.Tensor]
    outputs: Any = None
    """The model's own outputs, of padded rows."""

    @property
    def is_there_P(self) -> torch.Tensor:
        """Mask of the real rows of the data, [P]."""
        return self.tokens_S.unflatten(0, (-1, self.table.answers)).sum(-1) > 0

    @property
    def rewards_by_row(self) -> torch.Tensor:
        """The rewards by row of the data: [P, K], or [P, A, K] of several attributes."""
        rewards_PAK = self.rewards_SA.unflatten(0, (-1, self.table.answers)).transpose(1, 2)
        return rewards_PAK.squeeze(1) if rewards_PAK.shape[1] == 1 else rewards_PAK

    def detach(self) -> "StepResult":
        """Return a copy that keeps no graph alive."""
        loss, losses_P, rewards_SA = self.loss.detach(), self.losses_P.detach(), self.rewards_SA.detach()
        return StepResult(loss, losses_P, rewards_SA, self.tokens_S, self.table)


def training_step(model: nn.Module, batches: Sequence[Batch], loss: Loss, **extras: Any) -> StepResult:
    """Compute the loss of a batch, or of one of its micro-batches, for a backward.

    Without gradients each of several micro-batches is executed on its own: the same program wherever it comes.

    Args:
        model: Called as a whole, so whatever wraps it takes part.
        batches: The micro-batches, on the model's device.
        loss: The loss, with its settings.
        extras: Passed on to the model.
    """
    compute, parts = current().compiled(_compute), []
    for batch in batches:
        parts.append(compute(model, batch, loss, extras))
        if len(batches) > 1 and not torch.is_grad_enabled():
            current().step_boundary()
    return parts[0] if len(parts) == 1 else _joined(parts)


evaluation_step = torch.no_grad()(training_step)
"""Computes the same, without gradients."""


def _compute(model: nn.Module, batch: Batch, loss: Loss, extras: dict[str, Any]) -> StepResult:
    rewards_SA, outputs = rewards_of(model, batch, **extras)
    losses_P = loss.per_row(rewards_SA, batch.table)
    total = losses_P.sum() / batch.table.weight_sum_1.squeeze()
    return StepResult(total, losses_P, rewards_SA, batch.rows.tokens_S, batch.table, outputs)


def _joined(parts: Sequence[StepResult]) -> StepResult:
    """Join the results of micro-batches, which have some of the batch's rows each."""
    tables, weights = [part.table for part in parts], ("weight_C", "ranking_weight_G", "row_weight_P")
    whole: dict[str, Any] = {name: torch.stack([getattr(table, name) for table in tables]).sum(0) for name in weights}
    rewards = [torch.where(part.tokens_S[:, None] > 0, part.rewards_SA, 0.0) for part in parts]
    return StepResult(
        torch.stack([part.loss for part in parts]).sum(),
        torch.stack([part.losses_P for part in parts]).sum(0),
        torch.stack(rewards).sum(0),
        torch.stack([part.tokens_S for part in parts]).sum(0, dtype=torch.int32),
        replace(tables[0], **whole),
    )


# ---- the optimizer


class StepState:
    """The optimizer's state, gradient buffers, and the layers as a loop where that is configured.

    Args:
        scanned: What the loop over layers recomputes; None for layers one by one.
    """

    def __init__(self, runtime: Runtime, *, scanned: Remat | None) -> None:
        self._runtime, self._scanned = runtime, scanned
        self._optimizer: Optimizer | None = None
        self._stack: LayerStack | None = None
        self.gradient_buffers: dict[nn.Parameter, torch.Tensor] = {}
        self._reached: set[nn.Parameter] = set()  # by gradients of this step

    def prepare(
        self, model: nn.Module, placements: Mapping[str, Placement], optimizer: Optimizer, accumulates: bool
    ) -> bool:
        """Hold the layers as one if they are scanned, and create the state of ``optimizer``; return whether it is new.

        Args:
            placements: Of the model's parameters by name.
            accumulates: Whether gradients of several micro-batches add up.
        """
        if self._scanned is not None:
            if self._stack is None or self._stack.model is not model:
                axes = {name: placement.axes for name, placement in placements.items()}
                self._stack = LayerStack(model, axes, self._scanned, self._runtime)
            self._stack.stack(optimizer)
        if optimizer is self._optimizer:
            if self.gradient_buffers:  # of micro-batches of a training that was interrupted between them
                self._zero()
                self._runtime.step_boundary()
            return False
        self._optimizer, self.gradient_buffers = optimizer, {}
        optimizer.register_step_pre_hook(self._detach_unused)
        specs = {parameter: placements[name].axes for name, parameter in model.named_parameters()}
        prepare_optimizer(optimizer, self._runtime, specs if self._stack is None else specs | self._stack.axes)
        if accumulates:
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self.gradient_buffers = {parameter: zeros_laid_out_like(parameter) for parameter in parameters}
            for parameter in filter(lambda each: each.requires_grad, parameters):
                parameter.register_hook(partial(self._note_gradient, parameter))
            self._runtime.step_boundary()
            optimizer.register_step_post_hook(self._zero)
        return True

    def attach_gradients(self) -> None:
        """Put a zeroed buffer where a gradient is missing, so that the first micro-batch is no program of its own."""
        for parameter, buffer in self.gradient_buffers.items():
            if parameter.grad is None:
                parameter.grad = buffer

    def unstack(self) -> None:
        """Give the layers back one by one."""
        if self._stack is not None:
            self._stack.unstack()

    def one_by_one(self) -> AbstractContextManager[None]:
        """Give the layers back for as long as the context is open."""
        return nullcontext() if self._stack is None else self._stack.one_by_one()

    def _note_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
        if gradient is not None:  # as recomputed layers give to weights that they do not use
            self._reached.add(parameter)

    def _detach_unused(self, *_: object) -> None:
        """Leave parameters to the optimizer without a gradient if no backward reached them: they must not decay."""
        for parameter in self.gradient_buffers.keys() - self._reached:
            parameter.grad = None

    def _zero(self, *_: object) -> None:
        self._reached.clear()
        for buffer in self.gradient_buffers.values():
            buffer.zero_()


# torch's capturable Adam divides by the learning rate, so that 0 makes NaN of a parameter whose gradient was always 0.
# This rate moves nothing: its product with any update is far below what float32 resolves beside a weight.
_SMALLEST_RATE = 1.1e-30
_ALMOST_1 = 1 - 2**-24  # the float32 before 1

# These compute with a learning rate that is a tensor; others of torch would read it from the device.
_RATE_IS_DATA = (Adam, Adamax, NAdam, RAdam)


def prepare_optimizer(optimizer: Optimizer, runtime: Runtime, specs: Mapping[Any, PartitionSpec]) -> None:
    """Create the optimizer's state before the first step, laid out like its parameters, and its learning rate as data.

    An optimizer other than Adam creates its state in step 1, where it is laid out too: one more program.

    Args:
        optimizer: Over parameters on the device.
        runtime: Of the parameters.
        specs: Mesh axes of the parameters' dimensions; a parameter that is not in it is whole on every device.
    """
    parameters = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    device = parameters[0][0].device
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    if isinstance(optimizer, _RATE_IS_DATA):
        _replace_rates(optimizer, lambda rate: runtime.to_device(torch.tensor([max(rate, _SMALLEST_RATE)]), device)[0])
    else:  # torch_xla bakes 0 and 1 into the program; Adafactor's rate may be None, as it makes its own
        _replace_rates(optimizer, lambda rate: {0: _SMALLEST_RATE, 1: _ALMOST_1}.get(rate, rate))
    _let_state_wait(optimizer, runtime)
    if isinstance(optimizer, Adam):  # AdamW is one
        steps = runtime.to_device(torch.zeros(len(parameters)), device).unbind()
        for (parameter, group), step in zip(parameters, steps, strict=True):
            names = ["exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * group["amsgrad"]]
            zeros = {name: zeros_laid_out_like(parameter) for name in names}
            optimizer.state[parameter] = {"step": step.clone(), **zeros}
    else:
        _lay_out_new_state(optimizer, runtime, specs)
    runtime.step_boundary()


def _let_state_wait(optimizer: Optimizer, runtime: Runtime) -> None:
    """Let each step touch a parameter's state only when its gradient is computed.

    libtpu copies state whose layout is not that of the gradient, as of an embedding table. Left alone, it does so when
    a step begins, and holds the copies until it ends.
    """

    def wait(*_: object) -> None:
        for parameter in optimizer.state:
            if parameter.grad is not None:
                state = [each for each in state_on_device(optimizer, parameter) if each.shape == parameter.shape]
                runtime.optimization_barrier([parameter.grad, *state])

    optimizer.register_step_pre_hook(wait)


def state_on_device(optimizer: Optimizer, parameter: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors in the state of ``parameter`` on its device; a count of steps may be on the host."""
    for value in optimizer.state.get(parameter, {}).values():
        if isinstance(value, torch.Tensor) and value.device == parameter.device:
            yield value


def _lay_out_new_state(optimizer: Optimizer, runtime: Runtime, specs: Mapping[Any, PartitionSpec]) -> None:
    """Lay out the state that the first step creates, before that step is executed."""
    logger.warning(
        f"{type(optimizer).__name__} makes its state in its first step, so steps 1 and 2 are compiled separately. "
        "Adam and AdamW compile once."
    )

    is_new = [True]  # a hook cannot remove itself while hooks are called

    def lay_out(*_: object) -> None:
        if not is_new:
            return
        is_new.clear()
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and parameter in specs:
                    state[name] = runtime.constrain(value, specs[parameter])

    optimizer.register_step_post_hook(lay_out)


def _replace_rates(optimizer: Optimizer, replacement: Callable[[Any], Any]) -> None:
    """Replace the groups' learning rates during each step, so that no value of the rate changes the program.

    Schedulers, logs and checkpoints see plain floats.
    """
    rates: list[Any] = []

    def replace(*_: object) -> None:
        rates[:] = [group["lr"] for group in optimizer.param_groups]
        replaced = {rate: replacement(rate) for rate in set(rates)}
        for group in optimizer.param_groups:
            group["lr"] = replaced[group["lr"]]

    def restore(*_: object) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    optimizer.register_step_pre_hook(replace)
    optimizer.register_step_post_hook(restore)


def bare(optimizer: Any) -> Optimizer:
    """Return torch's optimizer out of accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


# ---- evaluation


#: Tensors of N rows of the data by name: losses, weight [N], rewards and grade [N, A, K], predictions and labels.
Evaluated = dict[str, torch.Tensor]


class EvaluatedPairs:
    """Losses, rewards, predictions and labels of an evaluation's pairs, on the device until they are fetched.

    Args:
        most_on_device: Number of batches on the device that are moved to the host together; None for all.
    """

    def __init__(self, runtime: Runtime, accelerator: Accelerator, most_on_device: int | None = None) -> None:
        self._runtime, self._accelerator, self._most_on_device = runtime, accelerator, most_on_device
        self._batches: list[Evaluated] = []
        self._on_host = 0  # the number of batches moved, the first ones

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._batches)

    def add(self, found: Evaluated, mask_P: torch.Tensor, is_planned: bool = False) -> None:
        """Add a batch of all processes; ``mask_P`` marks this process's real (non-padding) pairs.

        Where ``is_planned``, a process has the pairs of the batch that are in its rows.
        """
        found = found | {"is_real": mask_P.int() * self._runtime.counts_pairs()}
        if self._accelerator.num_processes == 1:  # on XLA one process a host leads all its devices
            constrain = self._runtime.constrain
            found = {name: constrain(tensor, (None,) * tensor.dim()) for name, tensor in found.items()}
        else:
            gather = self._accelerator.gather_for_metrics
            found = {name: gather(tensor.contiguous()) for name, tensor in found.items()}
            if is_planned:
                found = {name: _in_turn(tensor, self._accelerator.num_processes) for name, tensor in found.items()}
        self._batches.append(found)
        if len(self) - self._on_host == self._most_on_device:
            self._move_to_host()

    def _move_to_host(self) -> None:
        if not (batches := self._batches[self._on_host :]):
            return
        host = iter(self._runtime.fetch([tensor for batch in batches for tensor in batch.values()]))
        self._batches[self._on_host :] = [{name: next(host) for name in batch} for batch in batches]
        self._on_host = len(self)

    def fetch(self, first: int = 0) -> Evaluated:
        """Return the tensors of all real pairs from batch ``first`` on, in order, on the host."""
        if not self._batches:
            return {}
        self._move_to_host()
        batches = self._batches[first:]
        found = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        is_real_N = found.pop("is_real").bool()
        return {name: column[is_real_N] if len(column) == len(is_real_N) else column for name, column in found.items()}


def _in_turn(values_N: torch.Tensor, processes: int) -> torch.Tensor:
    """Interleave the values of the processes: the first of each, then the second of each, and so on."""
    return values_N.unflatten(0, (processes, -1)).transpose(0, 1).flatten(0, 1)


def named(name: str, value: Any) -> Evaluated:
    """Name a tensor, or each of several."""
    tensors = value if isinstance(value, tuple | list) else [] if value is None else [value]
    return {f"{name} {number}": tensor.detach() for number, tensor in enumerate(tensors)}


def prediction_of(found: Evaluated, with_losses: bool) -> EvalPrediction | None:
    """Return the argument of `compute_metrics`; None where there are no predictions, or no labels."""
    predictions, labels = _arrays(found, "predictions"), _arrays(found, "labels")
    if predictions is None or labels is None:
        return None
    losses = losses_of(found).numpy() if with_losses else None
    return EvalPrediction(predictions=predictions, label_ids=labels, losses=losses)


def losses_of(found: Evaluated) -> torch.Tensor:
    """Return the loss of each row, [N], so that their mean is the evaluation's loss: rows may have weights in it."""
    weights = found["weight"].double() if "weight" in found else torch.ones(())
    return found["losses"].double() / weights.mean()


def _arrays(found: Mapping[str, torch.Tensor], name: str) -> Any:
    tensors = [tensor for key, tensor in found.items() if key.startswith(f"{name} ")]
    arrays = tuple((each.float() if each.is_floating_point() else each).numpy() for each in tensors)
    return arrays if len(arrays) > 1 else arrays[0] if arrays else None
