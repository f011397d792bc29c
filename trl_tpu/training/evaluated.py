"""Results of evaluation steps, of all processes, on the device until they are fetched."""

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from transformers import EvalPrediction

from ..runtime import Runtime

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
