"""Evaluation: losses, rewards and predictions of all batches, metrics, the verdict and the model card."""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import nn
from transformers import EvalPrediction, PreTrainedTokenizerBase
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize
from transformers.utils import CONFIG_NAME

from ..data.collate import Labels
from ..data.collators import NO_LABEL, TABLE, batch_of_pairs
from ..evaluation.evaluate import RewardSums, evaluate_rewards, sums_of, sums_on_host
from ..modeling.adapters import complete_config, is_peft_model
from ..modeling.forward import read_scores
from ..modeling.head_spec import BASE_CONFIG, HeadSpec, set_reward_normalization
from ..modeling.losses import StepResult
from ..packing.batch import Batch, micro_batches_of, tensors_in
from ..report.pages import is_generated, make_model_card, write_verdicts
from ..runtime import Runtime
from ..training.device_trainer import DeviceTrainer
from ..training.progress import AddedMetrics
from ..training.saving import write_card
from ..training.statistics import scale_of
from ..training.stopping import EvaluationCutShort
from .utils import get_config_model_id

logger = logging.getLogger(__name__)

ORDER_PAIRS = ("get_eval_dataloader", "get_test_dataloader", "_get_eval_sampler")
"""Methods that decide the order of evaluated pairs."""


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


class EvaluatingTrainer(DeviceTrainer):
    """Evaluates what `RewardTrainer` trains, and describes it; to be read after its `compute_loss`."""

    processing_class: PreTrainedTokenizerBase
    _tag_names: list[str]
    _metrics: dict[str, AddedMetrics]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the averages of what a subclass put into ``self._metrics[mode]``, as TRL's subclasses do."""
        mode = "train" if self.model.training else "eval"
        prefix = "" if mode == "train" else "eval_"
        logs |= {f"{prefix}{key}": sum(values) / len(values) for key, values in self._metrics[mode].items()}
        self._metrics[mode].clear()
        set_reward_normalization(self.model.config, self.trl_tpu.statistics.scale)
        super().log(logs, start_time)

    def _last_metrics(self) -> dict[str, float]:
        """Read from the device what the last step has computed, in this process: for a subclass that asks for it."""
        if (last := self.trl_tpu.last_step) is None:
            return {}
        statistics = self.trl_tpu.statistics
        sums = sums_of(last.rewards_SA, last.tokens_S > 0, last.table, statistics.attribute_weights)
        metrics = RewardSums.read(*self.trl_tpu.runtime.fetch(sums)).metrics()
        return metrics | {"num_tokens": statistics.num_tokens + statistics.read().tokens}

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the loss, the rewards [P, 2] and labels [P], zeros, of a batch; in the old API the rewards' softmax.

        Of rankings the rewards are [P, K], NaN where there is no answer, and the labels are the grades; of several
        attributes both are [P, A, K]. Of steps there are logits of both labels, [P, K, 2], that of 0 being 0, and
        labels, -100 where there is no step. There are no rewards if a `compute_loss` of the user's returns beside the
        loss something that `rewards_in` cannot read.
        """
        loss, result = self._evaluated_step(model, inputs)
        if prediction_loss_only or result is None:
            return loss, None, None
        return loss, *self._predictions(result)

    def _evaluated_step(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, StepResult | None]:
        """Return the loss of a batch, and what was computed of it; None where only the loss is known."""
        inputs = self._prepare_inputs(inputs)
        for part in micro_batches_of(inputs):
            self.trl_tpu.recompiles.see(tensors_in(part), evaluates=True)
        with torch.no_grad(), self.compute_loss_context_manager():
            if self._is_own("compute_loss"):
                result = self.trl_tpu.last_step = self._step(model, inputs).detach()
                return result.loss, result
            self.trl_tpu.last_step = None
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        loss, own, ours = loss.detach(), None, self.trl_tpu.last_step
        # not a batch of the user's own making
        if isinstance(inputs, Mapping) and {"input_ids", "input_ids_chosen"} & {*inputs}:
            (own,) = self._batches_in(inputs)
        rewards_SA = rewards_in(outputs, own)
        if rewards_SA is None:
            return loss, ours
        batch = own or batch_of_pairs(len(rewards_SA) // 2, rewards_SA.device)
        losses_P = loss.mean() * batch.table.row_weight_P
        if ours is not None:  # per row, as processes fill the last batch up; a subclass may return another loss
            losses_P = torch.where(loss == ours.loss, ours.losses_P, losses_P)
        result = StepResult(loss, losses_P, rewards_SA, batch.tokens_S, batch.table)
        self.trl_tpu.last_step = result
        return loss, result

    def _predictions(self, result: StepResult) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the predictions and the labels of a batch, see `prediction_step`."""
        rewards, table = result.rewards_by_row, result.table
        grade = table.grade_SA.unflatten(0, (-1, table.answers)).transpose(1, 2).reshape(rewards.shape)
        if table.kind == "steps":
            logits_PK2 = torch.stack([torch.zeros_like(rewards), rewards], dim=-1)
            return logits_PK2, torch.where(grade.isnan(), NO_LABEL, grade.nan_to_num()).long()
        if table.kind == "rankings":
            return torch.where(grade.isnan(), torch.nan, rewards), grade.nan_to_num()
        labels_P = torch.zeros(len(rewards), dtype=torch.long, device=rewards.device)
        return rewards.softmax(-1) if self.use_reward_data_collator else rewards, labels_P

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate all batches.

        Raises:
            EvaluationCutShort: At the end of a step, when a process has been told to end.
        """
        ours, args = self.trl_tpu, self.args
        compute_metrics: Any = self.compute_metrics
        self.callback_handler.eval_dataloader = dataloader
        model = self._model_to_evaluate()
        pairs = EvaluatedPairs(ours.runtime, self.accelerator, args.eval_accumulation_steps)
        with_losses = "loss" in args.include_for_metrics
        metrics: dict[str, Any] = {}

        def of_last_batch(is_last: bool) -> Any:
            ours.runtime.step_boundary()
            prediction = prediction_of(pairs.fetch(first=-1), with_losses)
            return {} if prediction is None else compute_metrics(prediction, compute_result=is_last)

        measures_batches = args.batch_eval_metrics and compute_metrics is not None
        gradients = torch.is_grad_enabled()
        # a loader takes one of training's random numbers, which it must not where an evaluation is left out; and what
        # XLA lays out over its devices can be no inference tensor
        with torch.inference_mode(False), torch.set_grad_enabled(gradients), torch.random.fork_rng(devices=[]):
            for inputs in dataloader:
                if measures_batches and len(pairs):  # a stream says only now that the batch before was not the last
                    of_last_batch(is_last=False)
                is_planned = ours.batch_plan.plans_shapes and isinstance(inputs, Batch)
                pairs.add(*self._evaluated_batch(model, inputs, ignore_keys), is_planned)
                self.control = self.callback_handler.on_prediction_step(args, self.state, self.control)
                may_stop, told = ours.preemption.cuts_evaluations_short, ours.preemption.told_to_stop
                if may_stop and ours.agreement.any_in_evaluation(len(pairs), told):
                    raise EvaluationCutShort
        ours.runtime.step_boundary()
        ours.recompiles.settle()
        found = pairs.fetch()
        prediction = prediction_of(found, with_losses)
        if compute_metrics is not None and prediction is None and found:
            logger.warning("compute_metrics is not called: evaluation gave no predictions, or no labels.")
        elif compute_metrics is not None and prediction is not None:
            metrics = of_last_batch(is_last=True) if measures_batches else compute_metrics(prediction)
        # what is stopped, saved or kept because of a metric has to be the same in every process
        own = self._measure(found, metric_key_prefix, getattr(dataloader, "evaluated_dataset", None))
        if description == "Evaluation" and args.max_eval_steps is not None:
            own["pairs"] = len(next(iter(found.values()), ()))
        metrics = ours.agreement.all_gather_object(denumpify_detensorize(own | metrics))[0]
        prefix = f"{metric_key_prefix}_"
        empty = np.zeros((0, 2), dtype=np.float32)
        predictions, labels = (prediction.predictions, prediction.label_ids) if prediction else (empty, empty[:, 0])
        return EvalLoopOutput(
            predictions=predictions,
            label_ids=labels,
            metrics={key if key.startswith(prefix) else prefix + key: value for key, value in metrics.items()},
            num_samples=len(next(iter(found.values()), ())),
        )

    def _model_to_evaluate(self) -> nn.Module:
        """Return the model, cast if that was asked for outside training; the optimizer may have a mode too."""
        args, optimizer = self.args, cast(Any, self.optimizer)
        model: nn.Module = self.model
        if not self.is_in_train and (args.fp16_full_eval or args.bf16_full_eval):
            model = model.to(dtype=torch.float16 if args.fp16_full_eval else torch.bfloat16, device=args.device)
        model.eval()
        if hasattr(optimizer, "eval"):
            optimizer.eval()
        return model

    def _evaluated_batch(
        self, model: nn.Module, inputs: dict[str, Any], ignore_keys: list[str] | None
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Evaluate a batch: return what is known of each row of the data, and which rows are real, [P]."""
        loss_only = self.args.prediction_loss_only
        if self._is_own("prediction_step"):
            loss, result = self._evaluated_step(model, inputs)
            predictions, labels = (None, None) if loss_only or result is None else self._predictions(result)
        else:
            self.trl_tpu.last_step = None  # which a prediction step of the user's may leave, calling our loss
            loss, predictions, labels = self.prediction_step(model, inputs, loss_only, ignore_keys)
            result = self.trl_tpu.last_step
        if predictions is not None and self.preprocess_logits_for_metrics is not None:
            predictions = self.preprocess_logits_for_metrics(predictions, labels)  # type: ignore[arg-type]
        found = named("predictions", predictions) | named("labels", labels)
        if result is None:
            rows = len(next(iter(found.values()))) if found else find_batch_size(inputs) or 1
            own: Any = inputs.get(TABLE) if isinstance(inputs, Mapping) else None
            is_real_P = torch.ones(rows, dtype=torch.bool, device=self.args.device)
            if isinstance(own, Batch):
                is_real_P = own.present_P()
            found |= {} if loss is None else {"losses": loss.mean().expand(rows)}
            return found, is_real_P
        table = result.table
        self.trl_tpu.labels = Labels(np.zeros(0), kind=table.kind)
        found |= {"rewards": result.rewards_by_row, "weight": table.row_weight_P}
        found["grade"] = table.grade_SA.unflatten(0, (-1, table.answers)).transpose(1, 2)
        if loss is not None:
            is_ours = loss.mean() == result.loss.mean()
            found["losses"] = torch.where(is_ours, result.losses_P, loss.mean() * table.row_weight_P)
        return found, result.present_P

    def _measure(self, found: dict[str, torch.Tensor], prefix: str, dataset: Any) -> dict[str, Any]:
        """Return the metrics of an evaluation of ``dataset``, and keep the verdict on it.

        Args:
            found: From `EvaluatedPairs.fetch`.
            prefix: Of the metrics' names.
            dataset: Prepared; None for a loader of the user's own.
        """
        ours, args = self.trl_tpu, self.args
        own: dict[str, Any] = {"loss": float(losses_of(found).mean())} if "losses" in found else {}
        if (tokens := ours.statistics.tokens_so_far()) or not self.state.global_step:
            own["num_tokens"] = tokens  # which a loss of the user's does not count
        if "rewards" not in found:
            return own
        labels = replace(ours.labels, grade_PAK=found["grade"].numpy())
        rewards_NAK = found["rewards"].reshape(labels.grade_PAK.shape)
        sums = sums_on_host(rewards_NAK, labels, ours.statistics.attribute_weights)
        own |= sums.metrics()
        if prefix.startswith("eval"):  # and not a prediction
            ours.statistics.evaluated = scale_of(sums, "the evaluation set")
        rows = self._rows_in_order(dataset, len(rewards_NAK))
        if (verdict := evaluate_rewards(rewards_NAK, labels, rows, args.eval_by, args.attributes or ())) is not None:
            verdict = replace(verdict, prompts_in_training=ours.seen.get(id(dataset), ()))
            ours.statistics.verdicts[prefix] = verdict
            own |= verdict.metrics()
        return own

    def _rows_in_order(self, dataset: Any, count: int) -> Any:
        """Return ``dataset`` if an evaluation was on its first ``count`` rows, in order; None if that is unknown."""
        in_order = all(map(self._is_own, ORDER_PAIRS)) and self.args.train_sampling_strategy != "group_by_length"
        if not in_order or not isinstance(dataset, Dataset) or count > len(dataset):
            return None
        is_part = self.args.dataloader_drop_last or self.args.max_eval_steps is not None
        return dataset if count == len(dataset) or is_part else None

    # ---- the card

    def create_model_card(  # type: ignore[override]  # TRL's signature
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write the model card, with TRL's tags, to ``output_dir/README.md``; one that you wrote stays."""
        path = Path(str(self.args.output_dir), "README.md")
        if not self.is_world_process_zero():
            return
        evaluation = write_verdicts(self.trl_tpu.statistics.verdicts, path.parent, draws=not self.is_in_train)
        if path.is_file() and not is_generated(path.read_text(errors="replace")):
            return
        base = get_config_model_id(self.model.config)
        own_tags = [tags] if isinstance(tags, str) else list(tags or [])
        folder = str(self.args.output_dir)
        card = make_model_card(
            model_name or Path(self.args.hub_model_id or folder).name,
            location=self.hub_model_id or folder,
            base_model=base if base and _may_be_on_the_hub(base) else None,
            dataset_name=dataset_name if dataset_name and _may_be_on_the_hub(dataset_name) else None,
            tags=[*own_tags, *self._tag_names],
            versions={library: version(library) for library in ("torch", "transformers", "datasets", "tokenizers")},
            tokenizer=self.processing_class,
            outputs=HeadSpec.of(self.model.config),
            scale=self.trl_tpu.statistics.scale,
            date=self.trl_tpu.date,
            args=self.args,
            columns=getattr(self.train_dataset, "column_names", None) or (),
            own_loss=not self._is_own("compute_loss"),
            evaluation=evaluation,
        )
        card.save(path)

    def save_description(self, dataset_name: str | None = None) -> None:
        """Write config and card anew beside the model in `output_dir`: an evaluation since has measured rewards."""
        if not self.args.should_save:
            return
        folder = Path(str(self.args.output_dir))
        if not is_peft_model(self.model):
            self.model.config.save_pretrained(folder)
        complete_config(self.model, folder)
        write_card(self.create_model_card, dataset_name=dataset_name)
        if (remote := self.trl_tpu.remote) is not None:
            verdict = [path.name for path in sorted(folder.glob("verdict*"))]  # which the card shows
            config = BASE_CONFIG if is_peft_model(self.model) else CONFIG_NAME
            remote.put(folder, [config, *verdict, *(["README.md"] if (folder / "README.md").is_file() else [])])


def _may_be_on_the_hub(name: str) -> bool:
    """Return whether a name has the form of a Hub id and is no local path, present or moved away."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name) is not None and not os.path.exists(name.partition("/")[0])


def rewards_in(outputs: Any, batch: Batch[torch.Tensor] | None) -> torch.Tensor | None:
    """Read rewards [S, A] from what a user's loss returns beside itself; None where there are none to be read.

    They are `rewards`, [P, K] or [P, A, K], or the model's `logits`; or two tensors of a reward per pair, chosen
    first, whatever their names.

    Args:
        batch: Of the loss; None for one of the user's own making.
    """
    if isinstance(outputs, Mapping) and getattr(outputs.get("rewards"), "ndim", 0) in (2, 3):
        rewards = outputs["rewards"]
        return (rewards.unsqueeze(1) if rewards.ndim == 2 else rewards).transpose(1, 2).flatten(0, 1)
    if isinstance(outputs, Mapping) and "logits" in outputs:
        return None if batch is None or batch.is_packed else read_scores(outputs["logits"], batch)
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    halves = [each.flatten() for each in values if isinstance(each, torch.Tensor)]
    if len(halves) != 2 or len(halves[0]) != len(halves[1]):
        return None
    return torch.stack(halves, dim=-1).reshape(-1, 1)
