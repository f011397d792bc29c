"""Evaluation and prediction: rewards stay on the device until the end, and every pair counts once.

Predictions are rewards [pairs, 2] in the dataset's order, chosen first, and labels are zeros; or what a
`prediction_step` of the user's returns.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import EvalPrediction
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize, has_length

from ..data.packed_batch import PackedBatch, micro_batches_of, tensors_of
from ..evaluation import judge
from ..evaluation.reward_sums import sums_of
from ..modeling.readers import set_scale
from .metrics import on_host, over_processes, scale_of
from .preemption import EvaluationCutShort

if TYPE_CHECKING:
    from .device_trainer import DeviceTrainer

logger = logging.getLogger(__name__)

# losses [N], rewards [N, 2], the predictions' and the labels' tensors [N, ...], by name: what there is of them
Evaluated = dict[str, torch.Tensor]


def evaluate_batch(
    trainer: "DeviceTrainer", model: nn.Module, inputs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the loss and the rewards [P, 2] of a batch, whose micro-batches have some of its pairs each.

    No rewards, if a `compute_loss` of the user's returns beside the loss something that `rewards_of` cannot read.

    Several add up from zeros on the device, so that every micro-batch is the same program wherever it comes.
    """

    def evaluate(rows: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        trainer.recompiles.see_evaluated(tensors_of(rows))
        with torch.no_grad(), trainer.compute_loss_context_manager():
            loss, outputs = trainer.compute_loss(model, rows, return_outputs=True)
            return loss.detach(), trainer.rewards_of(outputs, rows)

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
        assert own_rewards_P2 is not None  # packed rows are for our own loss
        loss_1 = loss_1 + own_loss
        rewards_P2 = rewards_P2 + torch.where(rows["rows"].pair_mask_P[:, None], own_rewards_P2, 0.0)
    return loss_1.squeeze(), rewards_P2


def run_evaluation(
    trainer: "DeviceTrainer", batches: DataLoader, ignore_keys: list[str] | None, prefix: str
) -> EvalLoopOutput:
    """Evaluate all ``batches``.

    Args:
        prefix: Of the metrics' names, such as ``eval``.

    Raises:
        EvaluationCutShort: At the end of a step, when a process has been told to end.
    """
    args, runtime, compute_metrics = trainer.args, trainer.runtime, trainer.compute_metrics
    agreement, preemption = trainer.agreement, trainer.preemption
    model = _model_in_evaluation_mode(trainer)
    done: list[Evaluated] = []
    metrics: dict[str, Any] = {}
    count = len(batches) if has_length(batches) else None
    # a loader takes one of training's random numbers, which it must not where an evaluation is left out
    with torch.random.fork_rng(devices=[]):
        for inputs in batches:
            done.append(_of_all_processes(trainer, _evaluated(trainer, model, inputs, ignore_keys)))
            trainer.control = trainer.callback_handler.on_prediction_step(args, trainer.state, trainer.control)
            if preemption.cuts_evaluations_short and agreement.any_in_evaluation(len(done), preemption.told_to_stop):
                raise EvaluationCutShort
            if args.batch_eval_metrics and compute_metrics is not None:
                runtime.step_boundary()
                prediction = _prediction(trainer, _fetch(trainer, done[-1:]))
                if prediction is not None:
                    is_last = len(done) == count
                    metrics = compute_metrics(prediction, compute_result=is_last)  # type: ignore[call-arg]
    runtime.step_boundary()
    trainer.recompiles.settle()
    found = _fetch(trainer, done)
    prediction = _prediction(trainer, found)
    if compute_metrics is not None and prediction is None and found:
        logger.warning("compute_metrics is not called: evaluation gave no predictions, or no labels.")
    elif compute_metrics is not None and prediction is not None and not args.batch_eval_metrics:
        metrics = compute_metrics(prediction)
    own: dict[str, Any] = {"loss": float(found["losses"].double().mean())} if "losses" in found else {}
    own |= {"num_tokens": _tokens_of_training(trainer)}
    trainer.evaluated_rewards = (prefix, found["rewards"]) if "rewards" in found else None
    if "rewards" in found or not found:
        sums = sums_of(found["rewards"].numpy() if found else np.zeros((0, 2)))
        own |= sums.metrics()
        if prefix.startswith("eval"):  # and not a prediction
            trainer.reward_metrics.evaluated = scale_of(sums, "the evaluation set")
            set_scale(trainer.model.config, trainer.reward_metrics.scale)
    if "rewards" in found:
        rewards_N2 = found["rewards"].double().numpy()
        verdict = judge.judge(rewards_N2, trainer.evaluated_pairs(len(rewards_N2)), args.eval_by)
        if verdict is not None:
            trainer.verdicts[prefix] = verdict
            own |= verdict.metrics()
    # what is stopped, saved or kept because of a metric has to be the same in every process
    metrics = trainer.agreement.all_gather_object(denumpify_detensorize(own | metrics))[0]
    named = {key if key.startswith(f"{prefix}_") else f"{prefix}_{key}": value for key, value in metrics.items()}
    count_of_pairs = len(next(iter(found.values()), ()))
    empty = np.zeros((0, 2), dtype=np.float32)
    predictions, labels = (prediction.predictions, prediction.label_ids) if prediction else (empty, empty[:, 0])
    return EvalLoopOutput(predictions=predictions, label_ids=labels, metrics=named, num_samples=count_of_pairs)


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


def _evaluated(
    trainer: "DeviceTrainer", model: nn.Module, inputs: dict[str, Any], ignore_keys: list[str] | None
) -> Evaluated:
    """Evaluate a batch: what is known of each pair, and 1 for each that is real, where the batch is filled up."""
    loss, logits, labels = trainer.prediction_step(model, inputs, False, ignore_keys)
    rewards_P2 = logits if isinstance(logits, torch.Tensor) and logits.shape[1:] == (2,) else None
    predictions: Any = logits if rewards_P2 is None else trainer.predictions_of(rewards_P2)
    if predictions is not None and trainer.preprocess_logits_for_metrics is not None:
        predictions = trainer.preprocess_logits_for_metrics(predictions, labels)  # type: ignore[arg-type]
    found = _named("predictions", predictions) | _named("labels", labels)
    if rewards_P2 is not None:
        found["rewards"] = rewards_P2
    rows = len(next(iter(found.values()))) if found else find_batch_size(inputs) or 1
    if loss is not None:
        found["losses"] = loss.mean().expand(rows)
    mask_P = inputs["packed"].pair_mask_P if "packed" in inputs else inputs.get("pair_mask")
    if mask_P is None or len(mask_P) != rows:
        mask_P = torch.ones(rows, dtype=torch.bool)
    return found | {"is_real": mask_P.to(trainer.args.device).int()}


def _named(name: str, value: Any) -> Evaluated:
    """Name a tensor, or each of several."""
    tensors = value if isinstance(value, tuple | list) else [] if value is None else [value]
    return {f"{name} {number}": tensor.detach() for number, tensor in enumerate(tensors)}


def _of_all_processes(trainer: "DeviceTrainer", found: Evaluated) -> Evaluated:
    if trainer.accelerator.num_processes == 1:  # on XLA one process a host leads all its devices
        constrain = trainer.runtime.constrain
        return {name: constrain(tensor, (None,) * tensor.dim()) for name, tensor in found.items()}
    return {name: trainer.accelerator.gather_for_metrics(tensor.contiguous()) for name, tensor in found.items()}


def _fetch(trainer: "DeviceTrainer", batches: Sequence[Evaluated]) -> Evaluated:
    """Return on the host what is known of all real pairs, in order."""
    if not batches:
        return {}
    names = list(batches[0])
    host = trainer.runtime.fetch([batch[name] for batch in batches for name in names])
    found = {name: torch.cat(host[number :: len(names)]) for number, name in enumerate(names)}
    is_real_N = found.pop("is_real").bool()
    return {name: column[is_real_N] if len(column) == len(is_real_N) else column for name, column in found.items()}


def _prediction(trainer: "DeviceTrainer", found: Evaluated) -> EvalPrediction | None:
    """Return what the user's metrics are computed from; None where there are no predictions, or no labels."""
    predictions, labels = _arrays(found, "predictions"), _arrays(found, "labels")
    if predictions is None or labels is None:
        return None
    losses = found["losses"].double().numpy() if "loss" in trainer.args.include_for_metrics else None
    return EvalPrediction(predictions=predictions, label_ids=labels, losses=losses)


def _arrays(found: Evaluated, name: str) -> Any:
    tensors = [tensor for key, tensor in found.items() if key.startswith(f"{name} ")]
    arrays = tuple((each.float() if each.is_floating_point() else each).numpy() for each in tensors)
    return arrays if len(arrays) > 1 else arrays[0] if arrays else None


def _tokens_of_training(trainer: "DeviceTrainer") -> int:
    """Return how many tokens training has seen so far."""
    sums = on_host(trainer.runtime.fetch(trainer.reward_metrics.device_sums))
    return trainer.reward_metrics.num_tokens + over_processes(trainer.accelerator, sums, 0.0)[0].tokens
