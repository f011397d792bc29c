"""Evaluation: losses, rewards and predictions of all batches, metrics, the verdict and the model card."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from huggingface_hub import ModelCardData
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from transformers import EvalPrediction, PreTrainedTokenizerBase
from transformers.trainer_pt_utils import find_batch_size, nested_detach, nested_numpify
from transformers.trainer_utils import EvalLoopOutput, denumpify_detensorize, has_length
from transformers.utils import CONFIG_NAME

from ..data.collate import Labels
from ..data.length_stats import kind_of_dataset
from ..data.trl_dict import TABLE, batch_of_pairs
from ..evaluation.evaluate import RewardSums, evaluate_rewards, sums_of, sums_on_host
from ..modeling.adapters import complete_config
from ..modeling.forward import read_scores
from ..modeling.head_spec import BASE_CONFIG, HeadSpec, is_peft_model, may_be_on_the_hub, set_reward_normalization
from ..modeling.losses import StepResult
from ..packing.batch import Batch, micro_batches_of, tensors_in
from ..report.pages import CURVE_FILE, TRAINER_TAG, is_generated, make_model_card, write_training_curve, write_verdicts
from ..runtime import Runtime
from ..training.device_trainer import DeviceTrainer, precision_of
from ..training.progress import SubclassMetrics
from ..training.saving import write_card
from ..training.statistics import scale_of
from ..training.stopping import EvaluationInterrupted
from .utils import get_config_model_id

logger = logging.getLogger(__name__)

#: Methods that decide the order of evaluated rows.
ORDER_METHODS = ("get_eval_dataloader", "get_test_dataloader", "_get_eval_sampler")

#: Tensors of N rows of the data by name: losses [N], weight [N], rewards [N, K] or [N, A, K], grade [N, A, K],
#: is_real [N], predictions and labels, which may be nested.
Evaluated = dict[str, Any]


class EvaluatedRows:
    """Losses, rewards, predictions and labels of an evaluation's rows, collected on the device.

    Args:
        runtime: Runtime of the device.
        accelerator: Gathers the rows of all processes.
        most_on_device: Number of batches after which they are moved to the host. None keeps all on the device until
            `fetch`.
    """

    def __init__(self, runtime: Runtime, accelerator: Accelerator, most_on_device: int | None = None) -> None:
        self._runtime, self._accelerator, self._most_on_device = runtime, accelerator, most_on_device
        self._on_host: list[Evaluated] = []
        self._on_device: list[Evaluated] = []  # batches after those on the host

    def add(self, columns: Evaluated, is_planned: bool = False) -> None:
        """Add a batch. All processes take part.

        Args:
            columns: Tensors of this process. `is_real` marks its real (non-padding) rows.
            is_planned: Whether the batch has planned shapes. Each process then has an entry for every row of the
                batch, and `is_real` is true for rows in its own token rows.
        """
        columns = columns | {"is_real": columns["is_real"].int() * self._runtime.counts_rows()}
        gather, count = self._accelerator.gather_for_metrics, self._accelerator.num_processes
        if count == 1:  # also on XLA, with one process per host for all its devices
            columns = tree_map(lambda tensor: self._runtime.constrain(tensor, (None,) * tensor.dim()), columns)
        else:
            columns = tree_map(lambda tensor: gather(tensor.contiguous()), columns)
        if count > 1 and is_planned:  # the first value of each process, then the second of each, and so on
            columns = tree_map(lambda tensor: tensor.unflatten(0, (count, -1)).transpose(0, 1).flatten(0, 1), columns)
        self._on_device.append(columns)
        if len(self._on_device) == self._most_on_device:
            self._move_to_host()

    def _move_to_host(self) -> None:
        tensors, structure = tree_flatten(self._on_device)
        self._on_host += tree_unflatten(self._runtime.fetch(tensors), structure)
        self._on_device = []

    def fetch(self, first: int = 0) -> Evaluated:
        """Return the tensors of all real rows from batch ``first`` to the last one, in order, on the host."""
        if self._on_device:
            self._move_to_host()
        if not self._on_host:
            return {}
        columns = tree_map(lambda *parts: torch.cat(parts), *self._on_host[first:])
        is_real_N = columns.pop("is_real").bool()
        return tree_map(lambda column: column[is_real_N] if len(column) == len(is_real_N) else column, columns)


def losses_of(columns: Evaluated) -> torch.Tensor:
    """Return the weighted loss of each row divided by the mean weight, [N]. Their mean is the evaluation's loss."""
    weights = columns["weight"].double() if "weight" in columns else torch.ones(())
    return columns["losses"].double() / weights.mean()


class EvaluatingTrainer(DeviceTrainer):
    """Evaluation and model card of `RewardTrainer`. Read `RewardTrainer.compute_loss` first."""

    processing_class: PreTrainedTokenizerBase

    @cached_property
    def _metrics(self) -> dict[str, SubclassMetrics]:
        """Values that a subclass adds to the logs, by mode, as in TRL."""
        return {mode: SubclassMetrics(self._last_metrics) for mode in ("train", "eval")}

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, and include averages of the values that a subclass has added to ``self._metrics[mode]``, as in TRL."""
        mode, prefix = ("train", "") if self.model.training else ("eval", "eval_")
        logs |= {f"{prefix}{key}": sum(values) / len(values) for key, values in self._metrics[mode].items()}
        self._metrics[mode].clear()
        set_reward_normalization(self.model.config, self.trl_tpu.statistics.scale)
        super().log(logs, start_time)

    def _last_metrics(self) -> dict[str, float]:
        """Return the metrics of this process's last step, for subclasses. This reads from the device."""
        if (last := self.trl_tpu.last_step) is None:
            return {}
        statistics = self.trl_tpu.statistics
        sums = sums_of(last.rewards_SA, last.table.graded_S(last.tokens_S), last.table, statistics.attribute_weights)
        metrics = RewardSums.read(*self.trl_tpu.runtime.fetch(sums)).metrics()
        return metrics | {"num_tokens": statistics.num_tokens + statistics.read().tokens}

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the loss, predictions and labels of a batch.

        - Pairs: rewards [P, 2], chosen first, and labels [P], all 0. The old API returns the softmax of the rewards.
        - Rankings: rewards (NaN for missing answers) and grades, [P, K] or with several attributes [P, A, K].
        - Single answers: rewards and labels or scores, [P, 1].
        - Steps: logits of both labels [P, K, 2], always 0 for label 0, and labels [P, K], -100 for missing steps.

        Predictions and labels are None if ``prediction_loss_only``, or if `rewards_in` cannot read the outputs of a
        user-defined `compute_loss`.
        """
        loss, result = self._evaluation_step(model, inputs)
        if prediction_loss_only or result is None:
            return loss, None, None
        rewards, table = result.rewards_by_row, result.table
        grade = table.grade_SA.unflatten(0, (-1, table.answers)).transpose(1, 2).reshape(rewards.shape)
        predictions, labels = table.kind.predictions(rewards, grade)
        return loss, predictions.softmax(-1) if self.use_reward_data_collator else predictions, labels

    def _evaluation_step(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, StepResult | None]:
        """Return the loss and the result of a batch. The result is None if only the loss is known."""
        inputs = self._prepare_inputs(inputs)
        for part in micro_batches_of(inputs):
            self.trl_tpu.recompiles.see(tensors_in(part), evaluates=True)
        with torch.no_grad(), self.compute_loss_context_manager():
            if self._is_original("compute_loss"):
                result = self.trl_tpu.last_step = self._loss_and_rewards(model, inputs).detach()
                return result.loss, result
            self.trl_tpu.last_step = None
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
        loss, batch, default_result = loss.detach(), None, self.trl_tpu.last_step
        # batches of a user-defined collator may have other keys
        if isinstance(inputs, Mapping) and {"input_ids", "input_ids_chosen"} & {*inputs}:
            (batch,) = self._batches_in(inputs)
        rewards_SA = rewards_in(outputs, batch)
        if rewards_SA is None:
            return loss, default_result
        if default_result is None:
            batch = batch or batch_of_pairs(len(rewards_SA) // 2, rewards_SA.device)
            losses_P = loss.mean() * batch.table.row_weight_P
            default_result = StepResult(loss, losses_P, rewards_SA, batch.tokens_S, batch.table)
        # `_evaluate_batch` uses our losses of the rows if a subclass has returned our loss unchanged
        result = self.trl_tpu.last_step = replace(default_result, rewards_SA=rewards_SA)
        return loss, result

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate all batches, and compute metrics and the verdict.

        Raises:
            EvaluationInterrupted: If a process was preempted during an evaluation at the end of a training step.
        """
        components, args = self.trl_tpu, self.args
        compute_metrics: Any = self.compute_metrics
        self.callback_handler.eval_dataloader = dataloader
        model = self._model_to_evaluate()
        evaluated = EvaluatedRows(components.runtime, self.accelerator, args.eval_accumulation_steps)

        def metrics_of_last_batch(is_last: bool) -> Any:
            components.runtime.step_boundary()
            prediction = self._prediction_of(evaluated.fetch(first=-1))
            return {} if prediction is None else compute_metrics(prediction, compute_result=is_last)

        has_batch_metrics = args.batch_eval_metrics and compute_metrics is not None
        gradients = torch.is_grad_enabled()
        # Fork the generator: a loader draws a random number, and training must not depend on whether an evaluation is
        # skipped. Turn inference mode off: XLA cannot shard inference tensors.
        with torch.inference_mode(False), torch.set_grad_enabled(gradients), torch.random.fork_rng(devices=[]):
            for number, inputs in enumerate(dataloader, start=1):
                # in a stream, the batch before is known not to be the last one only now
                if has_batch_metrics and number > 1:
                    metrics_of_last_batch(is_last=False)
                is_planned = components.runtime.plans_shapes and isinstance(inputs, Batch)
                evaluated.add(self._evaluate_batch(model, inputs, ignore_keys), is_planned)
                self.control = self.callback_handler.on_prediction_step(args, self.state, self.control)
                may_stop, request = components.preemption.interrupts_evaluations, components.preemption.is_preempted
                if may_stop and components.agreement.any_in_evaluation(number, request):
                    raise EvaluationInterrupted
        components.runtime.step_boundary()
        components.recompiles.settle()
        columns = evaluated.fetch()
        prediction = self._prediction_of(columns)
        metrics = self._default_metrics(columns, metric_key_prefix, getattr(dataloader, "evaluated_dataset", None))
        if description == "Evaluation" and args.max_eval_steps is not None:
            metrics["pairs"] = find_batch_size(columns) or 0
        if compute_metrics is not None and prediction is not None:
            metrics |= metrics_of_last_batch(is_last=True) if has_batch_metrics else compute_metrics(prediction)
        elif compute_metrics is not None and columns:
            logger.warning("compute_metrics is not called: the evaluation returned no predictions or no labels.")
        # processes must stop, save and keep checkpoints by the same metrics
        metrics = components.agreement.all_gather_object(denumpify_detensorize(metrics))[0]
        prefix = f"{metric_key_prefix}_"
        empty = np.zeros((0, 2), dtype=np.float32)
        predictions, labels = (prediction.predictions, prediction.label_ids) if prediction else (empty, empty[:, 0])
        return EvalLoopOutput(
            predictions=predictions,
            label_ids=labels,
            metrics={key if key.startswith(prefix) else prefix + key: value for key, value in metrics.items()},
            num_samples=find_batch_size(columns) or 0,
        )

    def _prediction_of(self, columns: Evaluated) -> EvalPrediction | None:
        """Return the argument of `compute_metrics`; None if predictions or labels are missing."""
        if not columns.keys() >= {"predictions", "labels"}:
            return None
        predictions, labels = (nested_numpify(columns[name]) for name in ("predictions", "labels"))
        if isinstance(labels, np.ndarray) and self.trl_tpu.last_step is not None:
            labels = self.trl_tpu.last_step.table.kind.label_ids(labels)
        losses = losses_of(columns).numpy() if "loss" in self.args.include_for_metrics else None
        return EvalPrediction(predictions=predictions, label_ids=labels, losses=losses)

    def _model_to_evaluate(self) -> nn.Module:
        """Return the model in evaluation mode, cast by `fp16_full_eval` or `bf16_full_eval` outside training.

        Optimizers that have an evaluation mode switch to it.
        """
        args, optimizer = self.args, cast(Any, self.optimizer)
        model: nn.Module = self.model
        if not self.is_in_train and (args.fp16_full_eval or args.bf16_full_eval):
            model.to(dtype=torch.float16 if args.fp16_full_eval else torch.bfloat16, device=args.device)
        model.eval()
        if hasattr(optimizer, "eval"):
            optimizer.eval()
        return model

    def _evaluate_batch(self, model: nn.Module, inputs: dict[str, Any], ignore_keys: list[str] | None) -> Evaluated:
        """Evaluate a batch. Return tensors of its rows, see `Evaluated`."""
        self.trl_tpu.last_step = None  # our prediction step sets it, and a user-defined one that calls our loss
        loss, predictions, labels = self.prediction_step(model, inputs, self.args.prediction_loss_only, ignore_keys)
        result = self.trl_tpu.last_step
        if predictions is not None and self.preprocess_logits_for_metrics is not None:
            predictions = self.preprocess_logits_for_metrics(predictions, labels)  # type: ignore[arg-type]
        outputs: Any = {"predictions": predictions, "labels": labels}
        columns: Evaluated = {name: nested_detach(each) for name, each in outputs.items() if each is not None}
        if result is None:
            rows = find_batch_size([columns, inputs]) or 1
            batch: Any = inputs.get(TABLE) if isinstance(inputs, Mapping) else None
            columns |= {} if loss is None else {"losses": loss.mean().expand(rows)}
            every = torch.ones(rows, dtype=torch.bool, device=self.args.device)
            return columns | {"is_real": batch.present_P if isinstance(batch, Batch) else every}
        table = result.table
        columns |= {"is_real": result.present_P, "rewards": result.rewards_by_row, "weight": table.row_weight_P}
        columns["grade"] = table.grade_SA.unflatten(0, (-1, table.answers)).transpose(1, 2)
        if loss is not None:
            is_default = loss.mean() == result.loss.mean()
            columns["losses"] = torch.where(is_default, result.losses_P, loss.mean() * table.row_weight_P)
        return columns

    def _default_metrics(self, columns: dict[str, torch.Tensor], prefix: str, dataset: Any) -> dict[str, Any]:
        """Return all metrics of an evaluation except the user's `compute_metrics`, and store its verdict.

        Args:
            columns: Tensors from `EvaluatedRows.fetch`.
            prefix: Prefix of the metrics' names.
            dataset: The prepared dataset; None if a user-defined loader was evaluated.
        """
        components, args = self.trl_tpu, self.args
        metrics: dict[str, Any] = {"loss": float(losses_of(columns).mean())} if "losses" in columns else {}
        # a user-defined loss does not count tokens
        if (tokens := components.statistics.tokens_so_far()) or not self.state.global_step:
            metrics["num_tokens"] = tokens
        if "rewards" not in columns or components.last_step is None:
            return metrics
        labels = Labels(columns["grade"].numpy(), kind=components.last_step.table.kind)
        rewards_NAK = columns["rewards"].reshape(labels.grade_PAK.shape)
        sums = sums_on_host(rewards_NAK, labels, components.statistics.attribute_weights)
        metrics |= sums.metrics()
        if prefix.startswith("eval"):  # not `predict`
            components.statistics.evaluated = scale_of(sums, "the evaluation set")
        rows = self._rows_in_order(dataset, len(rewards_NAK))
        if (verdict := evaluate_rewards(rewards_NAK, labels, rows, args)) is not None:
            verdict = replace(verdict, prompts_in_training=components.seen.get(id(dataset), ()))
            components.verdicts[prefix] = verdict
            metrics |= verdict.metrics()
        return metrics

    def _rows_in_order(self, dataset: Any, count: int) -> Any:
        """Return ``dataset`` if its first ``count`` rows were evaluated in order, else None."""
        keeps = all(map(self._is_original, ORDER_METHODS)) and self.args.train_sampling_strategy != "group_by_length"
        if not keeps or not isinstance(dataset, Dataset) or count > len(dataset):
            return None
        is_part = self.args.dataloader_drop_last or self.args.max_eval_steps is not None
        return dataset if count == len(dataset) or is_part else None

    # ---- the card

    def create_model_card(  # type: ignore[override]  # TRL's signature
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write the model card, with TRL's tags, to ``output_dir/README.md``. A file that a user wrote is kept."""
        path = Path(str(self.args.output_dir), "README.md")
        if not self.is_world_process_zero():
            return
        evaluation = write_verdicts(self.trl_tpu.verdicts, path.parent, draws=not self.is_in_train)
        if path.is_file() and not is_generated(path.read_text(errors="replace")):
            return
        base, outputs = get_config_model_id(self.model.config), HeadSpec.of(self.model.config)
        make_model_card(
            ModelCardData(
                base_model=base if base and may_be_on_the_hub(base) else None,
                datasets=[dataset_name] if dataset_name and may_be_on_the_hub(dataset_name) else None,
                model_name=model_name or Path(self.args.hub_model_id or path.parent).name,
                tags=sorted({TRAINER_TAG, *([tags] if isinstance(tags, str) else tags or []), *self._tag_names}),
                library_name="transformers",
                pipeline_tag="text-classification" if outputs.step_separator is None else "token-classification",
            ),
            location=self.hub_model_id or path.parent,
            tokenizer=self.processing_class,
            outputs=outputs,
            components=self.trl_tpu,
            args=self.args,
            kind=kind_of_dataset(self.train_dataset).of(self.args),
            columns=getattr(self.train_dataset, "column_names", None) or (),
            own_loss=not self._is_original("compute_loss"),
            head_class=next(iter(getattr(self.model, "auto_map", {}).values()), None),
            is_adapters=is_peft_model(self.model),
            evaluation=evaluation,
            curve="" if self.is_in_train else write_training_curve(self.state, path.parent),
            data=Path(dataset_name).name if dataset_name else None,
            rows=len(self.train_dataset) if has_length(self.train_dataset) else None,
            batch=self.args.train_batch_size * self._batch_parts * self.args.gradient_accumulation_steps,
            state=self.state,
            adapters=getattr(self.model, "peft_config", {}).values(),
            precision=precision_of(self.args, self.model),
            first_step=getattr(self, "_initial_global_step", 0) + 1,
        ).save(path)

    def save_description(self, dataset_name: str | None = None) -> None:
        """Rewrite config and model card in `output_dir`, after an evaluation has measured rewards."""
        if not self.args.should_save:
            return
        folder = Path(str(self.args.output_dir))
        if not is_peft_model(self.model):
            self.model.config.save_pretrained(folder)
        complete_config(self.model, folder)
        write_card(self.create_model_card, dataset_name=dataset_name)
        if (remote := self.trl_tpu.remote) is not None:
            shown = [path.name for path in (*sorted(folder.glob("verdict*")), *folder.glob(CURVE_FILE))]
            config = BASE_CONFIG if is_peft_model(self.model) else CONFIG_NAME
            remote.put(folder, [config, *shown, *(["README.md"] if (folder / "README.md").is_file() else [])])


def rewards_in(outputs: Any, batch: Batch[torch.Tensor] | None) -> torch.Tensor | None:
    """Read rewards [S, A] from the outputs of a user-defined `compute_loss`; None if they hold no rewards.

    Args:
        outputs: A mapping with `rewards`, [P, K] or [P, A, K]; or with the model's `logits`; or a mapping or sequence
            with exactly two tensors of one reward per pair, the chosen ones first.
        batch: The batch of the loss; None if a user-defined collator made it.
    """
    if isinstance(outputs, Mapping) and getattr(outputs.get("rewards"), "ndim", 0) in (2, 3):
        rewards = outputs["rewards"]
        return (rewards.unsqueeze(1) if rewards.ndim == 2 else rewards).transpose(1, 2).flatten(0, 1)
    if isinstance(outputs, Mapping) and "logits" in outputs:
        return None if batch is None or batch.is_packed else read_scores(outputs["logits"], batch)
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    halves = [value.flatten() for value in values if isinstance(value, torch.Tensor)]
    is_pairs = len(halves) == 2 and len(halves[0]) == len(halves[1])
    return torch.stack(halves, dim=-1).reshape(-1, 1) if is_pairs else None
