"""Evaluation and prediction: rewards stay on the device until the end, and every pair counts once.

Predictions are rewards [pairs, 2] in the dataset's order, chosen first, and labels are zeros.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import EvalPrediction
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize, has_length

from ..data.packed_batch import PackedBatch, micro_batches_of
from .metrics import on_host, over_processes, sums_of
from .preemption import EvaluationCutShort

if TYPE_CHECKING:
    from .device_trainer import DeviceTrainer


def evaluate_batch(
    trainer: "DeviceTrainer", model: nn.Module, inputs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the rewards [P, 2] of a batch, whose micro-batches have some of its pairs each.

    Several add up from zeros on the device, so that every micro-batch is the same program wherever it comes.
    """

    def evaluate(rows: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad(), trainer.compute_loss_context_manager():
            loss, outputs = trainer.compute_loss(model, rows, return_outputs=True)
        return loss.detach(), trainer.rewards_of(outputs, rows).detach()

    packed = inputs.get("packed")
    micro_batches = micro_batches_of(inputs)
    if not isinstance(packed, PackedBatch) or len(micro_batches) == 1:
        return evaluate(micro_batches[0])
    zeros = torch.zeros(1), torch.zeros(len(packed.pair_mask_P), 2)
    loss_1, rewards_P2 = (trainer.runtime.to_device(each, trainer.args.device) for each in zeros)
    for index, rows in enumerate(micro_batches):
        if index:
            trainer.runtime.step_boundary()
        own_loss, own_rewards_P2 = evaluate(rows)
        loss_1 = loss_1 + own_loss
        rewards_P2 = rewards_P2 + torch.where(rows["packed"].pair_mask_P[:, None], own_rewards_P2, 0.0)
    return loss_1.squeeze(), rewards_P2


def run_evaluation(
    trainer: "DeviceTrainer", batches: DataLoader, ignore_keys: list[str] | None, prefix: str
) -> EvalLoopOutput:
    """Evaluate all ``batches``.

    Args:
        prefix: Of the metrics' names, such as ``eval``.

    Raises:
        EvaluationCutShort: Within training, when a process has been told to end.
    """
    args, runtime, compute_metrics = trainer.args, trainer.runtime, trainer.compute_metrics
    model = _model_in_evaluation_mode(trainer)
    done: list[list[torch.Tensor]] = []
    metrics: dict[str, Any] = {}
    count = len(batches) if has_length(batches) else None
    # a loader takes one of training's random numbers, which it must not where an evaluation is left out
    with torch.random.fork_rng(devices=[]):
        for inputs in batches:
            done.append(_of_all_processes(trainer, _evaluated_pairs(trainer, model, inputs, ignore_keys)))
            trainer.control = trainer.callback_handler.on_prediction_step(args, trainer.state, trainer.control)
            told_to_stop = trainer.preemption.told_to_stop
            if trainer.is_in_train and trainer.agreement.any_in_evaluation(len(done), told_to_stop):
                raise EvaluationCutShort
            if args.batch_eval_metrics and compute_metrics is not None:
                runtime.step_boundary()
                prediction = _prediction(trainer, *_fetch(trainer, done[-1:]))
                metrics = compute_metrics(prediction, compute_result=len(done) == count)  # type: ignore[call-arg]
    runtime.step_boundary()
    losses_N, rewards_N2, predictions_N = _fetch(trainer, done)
    if compute_metrics is not None and not args.batch_eval_metrics:
        metrics = compute_metrics(_prediction(trainer, losses_N, rewards_N2, predictions_N))
    own = {"loss": float(losses_N.mean())} if len(losses_N) else {}
    own |= {"num_tokens": _tokens_of_training(trainer), **sums_of(rewards_N2).metrics()}
    # what is stopped, saved or kept because of a metric has to be the same in every process
    metrics = trainer.agreement.all_gather_object(denumpify_detensorize(own | metrics))[0]
    named = {key if key.startswith(f"{prefix}_") else f"{prefix}_{key}": value for key, value in metrics.items()}
    labels_N = np.zeros(len(rewards_N2), dtype=np.int64)
    return EvalLoopOutput(predictions=predictions_N, label_ids=labels_N, metrics=named, num_samples=len(rewards_N2))


def _model_in_evaluation_mode(trainer: "DeviceTrainer") -> nn.Module:
    """Return the model, cast if that was asked for outside training; the optimizer may have a mode too."""
    args, optimizer = trainer.args, cast(Any, trainer.optimizer)
    model: nn.Module = trainer.model
    if not trainer.is_in_train and (args.fp16_full_eval or args.bf16_full_eval):
        model = model.to(dtype=torch.float16 if args.fp16_full_eval else torch.bfloat16, device=args.device)
    model.eval()
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    return model


def _evaluated_pairs(
    trainer: "DeviceTrainer", model: nn.Module, inputs: dict[str, Any], ignore_keys: list[str] | None
) -> list[torch.Tensor]:
    """Return losses [P], rewards [P, 2], predictions [P, ...] of a batch, and 1 for each of its pairs that is real."""
    loss, rewards_P2, labels_P = trainer.prediction_step(model, inputs, False, ignore_keys)
    assert rewards_P2 is not None and labels_P is not None  # they were asked for
    predictions = trainer.predictions_of(rewards_P2)
    if trainer.preprocess_logits_for_metrics is not None:
        predictions = trainer.preprocess_logits_for_metrics(predictions, labels_P)
    mask_P = inputs["packed"].pair_mask_P if "packed" in inputs else inputs.get("pair_mask")
    if mask_P is None:
        mask_P = torch.ones_like(rewards_P2[:, 0], dtype=torch.bool)
    return [loss.expand(len(rewards_P2)), rewards_P2, predictions, mask_P.to(rewards_P2.device).int()]


def _of_all_processes(trainer: "DeviceTrainer", of_pairs: list[torch.Tensor]) -> list[torch.Tensor]:
    if trainer.accelerator.num_processes == 1:  # on XLA one process a host leads all its devices
        return [trainer.runtime.constrain(tensor, (None,) * tensor.dim()) for tensor in of_pairs]
    return [trainer.accelerator.gather_for_metrics(tensor.contiguous()) for tensor in of_pairs]


def _fetch(
    trainer: "DeviceTrainer", batches: Sequence[Sequence[torch.Tensor]]
) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Return losses [N] in float64, rewards [N, 2] and predictions [N, ...] of all real pairs, in order."""
    if not batches:
        return torch.zeros(0), torch.zeros(0, 2), np.zeros((0, 2), dtype=np.float32)
    host = trainer.runtime.fetch([tensor for batch in batches for tensor in batch])
    losses_N, rewards_N2, predictions_N, is_real_N = (torch.cat(host[part::4]) for part in range(4))
    is_real_N = is_real_N.bool()
    return losses_N[is_real_N].double(), rewards_N2[is_real_N], predictions_N[is_real_N].float().numpy()


def _prediction(
    trainer: "DeviceTrainer", losses_N: torch.Tensor, rewards_N2: torch.Tensor, predictions_N: np.ndarray
) -> EvalPrediction:
    """Return what the user's metrics are computed from."""
    losses = losses_N.numpy() if "loss" in trainer.args.include_for_metrics else None
    labels_N = np.zeros(len(rewards_N2), dtype=np.int64)
    return EvalPrediction(predictions=predictions_N, label_ids=labels_N, losses=losses)


def _tokens_of_training(trainer: "DeviceTrainer") -> int:
    """Return how many tokens training has seen so far."""
    sums = on_host(trainer.runtime.fetch(trainer.reward_metrics.device_sums))
    return trainer.reward_metrics.num_tokens + over_processes(trainer.accelerator, sums, 0.0)[0].tokens
