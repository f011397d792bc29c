"""Evaluation and prediction: rewards stay on the device until the end, and every pair counts once."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from transformers import EvalPrediction, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize, has_length

from ..data.packed_batch import PackedBatch, micro_batches_of
from ..runtime import Runtime
from .agreement import HostAgreement
from .metrics import RewardMetrics, on_host, over_processes, sums_of

Evaluated = tuple[torch.Tensor, torch.Tensor]
"""The loss of a batch, and its rewards [P, 2], on the device."""


class PairEvaluator:
    """Evaluates pairs: predictions are rewards [pairs, 2] in the dataset's order, chosen first, and labels are zeros.

    Args:
        training_metrics: Of the run, for the tokens that it has seen.
    """

    def __init__(
        self,
        runtime: Runtime,
        accelerator: Accelerator,
        agreement: HostAgreement,
        training_metrics: RewardMetrics,
        args: TrainingArguments,
    ) -> None:
        self._runtime, self._accelerator, self._agreement = runtime, accelerator, agreement
        self._training_metrics, self._args = training_metrics, args

    def model(self, model: nn.Module, optimizer: Any, casts: bool) -> nn.Module:
        """Return ``model``, in evaluation mode; the optimizer may have a mode too.

        Args:
            casts: Whether `fp16_full_eval` and `bf16_full_eval` are obeyed.
        """
        wishes = {torch.float16: self._args.fp16_full_eval, torch.bfloat16: self._args.bf16_full_eval}
        if casts and (dtype := next((dtype for dtype, is_asked in wishes.items() if is_asked), None)) is not None:
            model = model.to(dtype=dtype, device=self._args.device)
        model.eval()
        if hasattr(optimizer, "eval"):
            optimizer.eval()
        return model

    def batch(self, inputs: dict[str, Any], evaluate: Callable[[dict[str, Any]], Evaluated]) -> Evaluated:
        """Return the loss and the rewards of a batch, whose micro-batches have some of its pairs each.

        Several add up from zeros on the device, so that every micro-batch is the same program wherever it comes.
        """
        packed = inputs.get("packed")
        micro_batches = micro_batches_of(inputs)
        if not isinstance(packed, PackedBatch) or len(micro_batches) == 1:
            return evaluate(micro_batches[0])
        zeros = torch.zeros(1), torch.zeros(len(packed.pair_mask_P), 2)
        loss_1, rewards_P2 = (self._runtime.to_device(each, self._args.device) for each in zeros)
        for index, rows in enumerate(micro_batches):
            if index:
                self._runtime.step_boundary()
            own_loss, own_rewards_P2 = evaluate(rows)
            loss_1 = loss_1 + own_loss
            rewards_P2 = rewards_P2 + torch.where(rows["packed"].pair_mask_P[:, None], own_rewards_P2, 0.0)
        return loss_1.squeeze(), rewards_P2

    def run(
        self,
        batches: Iterable[dict[str, Any]],
        evaluate: Callable[[dict[str, Any]], tuple[torch.Tensor, Any, Any]],
        after_batch: Callable[[int], None],
        predict: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        compute_metrics: Callable[..., dict[str, Any]] | None,
        prefix: str,
    ) -> EvalLoopOutput:
        """Evaluate all ``batches``.

        Args:
            evaluate: Returns the loss, the rewards [P, 2] and labels [P] of a batch: the trainer's `prediction_step`.
            after_batch: Called with the number of batches done.
            predict: Makes predictions of rewards and labels.
            compute_metrics: The user's, of an `EvalPrediction`.
            prefix: Of the metrics' names, such as ``eval``.
        """
        pairs, metrics = _EvaluatedPairs(self._runtime), dict[str, Any]()
        count = len(batches) if has_length(batches) else None  # type: ignore[arg-type]
        # a loader takes one of training's random numbers, which it must not where an evaluation is left out
        with torch.random.fork_rng(devices=[]):
            for done, inputs in enumerate(batches, start=1):
                loss, rewards_P2, labels_P = evaluate(inputs)
                mask_P = _mask(inputs, rewards_P2)
                of_pairs = [loss.expand(len(rewards_P2)), rewards_P2, predict(rewards_P2, labels_P), mask_P.int()]
                pairs.add(self._of_all_processes(of_pairs))
                after_batch(done)
                if self._args.batch_eval_metrics and compute_metrics is not None:
                    self._runtime.step_boundary()
                    metrics = compute_metrics(self._prediction(*pairs.fetch_last()), compute_result=done == count)
        self._runtime.step_boundary()
        losses_N, rewards_N2, predictions_N = pairs.fetch()
        if compute_metrics is not None and not self._args.batch_eval_metrics:
            metrics = compute_metrics(self._prediction(losses_N, predictions_N))
        own = {"loss": float(losses_N.mean())} if len(losses_N) else {}
        own |= {"num_tokens": self._tokens(), **sums_of(rewards_N2).metrics()}
        # what is stopped, saved or kept because of a metric has to be the same in every process
        metrics = self._agreement.all_gather_object(denumpify_detensorize(own | metrics))[0]
        named = {key if key.startswith(f"{prefix}_") else f"{prefix}_{key}": value for key, value in metrics.items()}
        labels_N = np.zeros(len(rewards_N2), dtype=np.int64)
        return EvalLoopOutput(
            predictions=predictions_N, label_ids=labels_N, metrics=named, num_samples=len(rewards_N2)
        )

    def _tokens(self) -> int:
        """Return how many tokens training has seen so far."""
        sums = on_host(self._runtime.fetch(self._training_metrics.device_sums))
        return self._training_metrics.num_tokens + over_processes(self._accelerator, sums, 0.0)[0].tokens

    def _of_all_processes(self, of_pairs: list[torch.Tensor]) -> list[torch.Tensor]:
        if self._accelerator.num_processes == 1:  # on XLA one process a host leads all its devices
            return of_pairs
        return [self._accelerator.gather_for_metrics(tensor.contiguous()) for tensor in of_pairs]

    def _prediction(self, losses_N: torch.Tensor, predictions_N: np.ndarray) -> EvalPrediction:
        losses = losses_N.numpy() if "loss" in self._args.include_for_metrics else None
        labels_N = np.zeros(len(predictions_N), dtype=np.int64)
        return EvalPrediction(predictions=predictions_N, label_ids=labels_N, losses=losses)


def _mask(inputs: dict[str, Any], rewards_P2: torch.Tensor) -> torch.Tensor:
    """Return which pairs of a batch are real, [P]."""
    mask_P = inputs["packed"].pair_mask_P if "packed" in inputs else inputs.get("pair_mask")
    if mask_P is None:
        return torch.ones_like(rewards_P2[:, 0], dtype=torch.bool)
    return mask_P.to(rewards_P2.device)


class _EvaluatedPairs:
    """Collects device tensors of batches: losses [P], rewards [P, 2], predictions [P, ...], masks [P]."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._batches: list[list[torch.Tensor]] = []

    def add(self, batch: Sequence[torch.Tensor]) -> None:
        self._batches.append([self._runtime.constrain(tensor, (None,) * tensor.dim()) for tensor in batch])

    def fetch_last(self) -> tuple[torch.Tensor, np.ndarray]:
        """Return the losses [N] and predictions [N, ...] of the last batch's real pairs."""
        losses_P, _, predictions_P, mask_P = self._runtime.fetch(self._batches[-1])
        mask_P = mask_P.bool()
        return losses_P[mask_P], predictions_P[mask_P].float().numpy()

    def fetch(self) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
        """Return losses [N] in float64, rewards [N, 2] and predictions [N, ...] of all real pairs, in order."""
        host = self._runtime.fetch([tensor for batch in self._batches for tensor in batch])
        batches = [host[start : start + 4] for start in range(0, len(host), 4)]
        if not batches:
            return torch.zeros(0), torch.zeros(0, 2), np.zeros((0, 2), dtype=np.float32)
        losses_N, rewards_N2, predictions_N = (
            torch.cat([batch[part][batch[3].bool()] for batch in batches]) for part in range(3)
        )
        return losses_N.double(), rewards_N2, predictions_N.float().numpy()
