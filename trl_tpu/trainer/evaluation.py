"""Evaluation and prediction: rewards stay on the device until the end, every pair counts once."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import EvalPrediction
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize, has_length

from ..modeling.rewards import PairBatch
from ..training.metrics import on_host, sums_of
from .batching import PairBatching


class PairEvaluation(PairBatching):
    """The evaluation half of the reward trainer.

    Predictions are rewards of shape [pairs, 2], chosen first, in the dataset's order; labels are zeros, the index of
    the chosen one.
    """

    predicts_preferences = False  # the old API's predictions: a softmax over each pair's rewards

    def rewards_of(self, outputs: Any, inputs: dict[str, Any]) -> torch.Tensor:
        """The rewards [P, 2] in what `compute_loss` returned beside the loss."""
        if "rewards_chosen" in outputs:
            return torch.stack([outputs["rewards_chosen"].flatten(), outputs["rewards_rejected"].flatten()], dim=-1)
        batch = self.read_batch(inputs)
        assert isinstance(batch, PairBatch)  # packed rows give the two rewards
        return batch.by_pair(outputs["logits"])

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The loss, the rewards [P, 2] and labels [P] of one batch, on the device."""
        inputs = self._prepare_inputs(inputs)
        if "passes" in inputs:
            loss, rewards_P2 = self._evaluate_passes(model, inputs)
        else:
            loss, outputs = self._evaluate_pass(model, inputs)
            rewards_P2 = self.rewards_of(outputs, inputs).detach()
        if prediction_loss_only:
            return loss, None, None
        return loss, rewards_P2, torch.zeros(len(rewards_P2), dtype=torch.long, device=rewards_P2.device)

    def _evaluate_pass(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        with torch.no_grad(), self.compute_loss_context_manager():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        return loss.detach(), outputs

    def _evaluate_passes(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss and the rewards of a batch whose passes have some of the pairs each.

        Both are sums that begin with zeros on the device, so that every pass is the same program wherever it comes.
        """
        pairs = len(inputs["pair_mask"])
        to_device, device = self.runtime.to_device, self.args.device
        loss_1, rewards_P2 = to_device(torch.zeros(1), device), to_device(torch.zeros(pairs, 2), device)
        for index, rows in enumerate(inputs["passes"]):
            if index:
                self.runtime.step_boundary()
            loss, outputs = self._evaluate_pass(model, rows)
            loss_1 = loss_1 + loss
            rewards_P2 = rewards_P2 + torch.where(rows["pair_mask"][:, None], self.rewards_of(outputs, rows), 0.0)
        return loss_1.squeeze(), rewards_P2

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        model = self._model_for_evaluation()
        self.callback_handler.eval_dataloader = dataloader
        collected = _Collected()
        last = len(dataloader) - 1 if has_length(dataloader) else None
        metrics: dict[str, Any] = {}
        for step, inputs in enumerate(dataloader):
            loss, rewards_P2, labels_P = self.prediction_step(model, inputs, False, ignore_keys)
            self._collect(collected, inputs, loss, rewards_P2, labels_P)
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            if self.args.batch_eval_metrics and self.compute_metrics is not None:
                self.runtime.step_boundary()
                prediction = self._prediction(*collected.fetch_last(self.runtime))
                metrics = self.compute_metrics(prediction, compute_result=step == last)  # type: ignore[call-arg]
        self.runtime.step_boundary()
        losses_N, rewards_N2, predictions_N, pairs_of_batch = collected.fetch(self.runtime)
        if self.compute_metrics is not None and not self.args.batch_eval_metrics:
            metrics = self.compute_metrics(self._prediction(losses_N, predictions_N))
        open_sums, _ = self._over_processes(on_host(self.runtime.fetch(self.reward_metrics.device_sums)), 0.0)
        own = {"loss": float(losses_N.mean())} if len(losses_N) else {}
        own |= {"num_tokens": self.reward_metrics.num_tokens + open_sums.tokens, **sums_of(rewards_N2).metrics()}
        # what is stopped, saved or kept because of a metric has to be the same in every process
        metrics = self._all_gather_object(denumpify_detensorize(own | metrics))[0]
        prefix = f"{metric_key_prefix}_"
        named = {key if key.startswith(prefix) else prefix + key: value for key, value in metrics.items()}
        labels_N = np.zeros(len(rewards_N2), dtype=np.int64)
        return EvalLoopOutput(
            predictions=predictions_N, label_ids=labels_N, metrics=named, num_samples=sum(pairs_of_batch)
        )

    def _model_for_evaluation(self) -> nn.Module:
        model = self.model
        if not self.is_in_train and (self.args.fp16_full_eval or self.args.bf16_full_eval):
            dtype = torch.float16 if self.args.fp16_full_eval else torch.bfloat16
            model = model.to(dtype=dtype, device=self.args.device)  # type: ignore[call-arg]
        model.eval()
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()
        return model

    def _collect(
        self,
        collected: "_Collected",
        inputs: dict[str, Any],
        loss: torch.Tensor,
        rewards_P2: torch.Tensor | None,
        labels_P: torch.Tensor | None,
    ) -> None:
        assert rewards_P2 is not None and labels_P is not None
        mask_P = inputs.get("pair_mask")
        mask_P = (
            torch.ones_like(rewards_P2[:, 0], dtype=torch.bool) if mask_P is None else mask_P.to(rewards_P2.device)
        )
        predictions = rewards_P2.softmax(-1) if self.predicts_preferences else rewards_P2
        if self.preprocess_logits_for_metrics is not None:
            predictions = self.preprocess_logits_for_metrics(predictions, labels_P)
        losses_P = loss.expand(len(rewards_P2))
        batch = [losses_P, rewards_P2, predictions, mask_P.int()]
        if self.accelerator.num_processes > 1:  # accelerate's processes: on XLA there is one, for all devices
            batch = [self.accelerator.gather_for_metrics(tensor.contiguous()) for tensor in batch]
        collected.add([self.runtime.replicate(tensor) for tensor in batch])

    def _prediction(self, losses_N: torch.Tensor, predictions_N: np.ndarray) -> EvalPrediction:
        losses = losses_N.numpy() if "loss" in self.args.include_for_metrics else None
        return EvalPrediction(
            predictions=predictions_N, label_ids=np.zeros(len(predictions_N), dtype=np.int64), losses=losses
        )


class _Collected:
    """Device tensors of evaluated batches: losses [P], rewards [P, 2], predictions [P, ...], masks [P]."""

    def __init__(self) -> None:
        self._batches: list[list[torch.Tensor]] = []

    def add(self, batch: list[torch.Tensor]) -> None:
        self._batches.append(batch)

    def fetch_last(self, runtime: Any) -> tuple[torch.Tensor, np.ndarray]:
        losses_P, _, predictions_P, mask_P = runtime.fetch(self._batches[-1])
        mask_P = mask_P.bool()
        return losses_P[mask_P], predictions_P[mask_P].float().numpy()

    def fetch(self, runtime: Any) -> tuple[torch.Tensor, torch.Tensor, np.ndarray, list[int]]:
        """Of the real pairs: losses [N] in float64, rewards [N, 2], predictions [N, ...]; and each batch's pairs."""
        host = runtime.fetch([tensor for batch in self._batches for tensor in batch])
        batches = [host[start : start + 4] for start in range(0, len(host), 4)]
        if not batches:
            return torch.zeros(0), torch.zeros(0, 2), np.zeros((0, 2), dtype=np.float32), []
        losses, rewards, predictions = (
            torch.cat([batch[part][batch[3].bool()] for batch in batches]) for part in range(3)
        )
        return losses.double(), rewards, predictions.float().numpy(), [int(batch[3].sum()) for batch in batches]
