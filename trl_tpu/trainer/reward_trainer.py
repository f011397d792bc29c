"""`RewardTrainer`: the API of `trl.RewardTrainer` on PyTorch/XLA or plain torch."""

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from accelerate.utils import set_seed
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from torch import nn
from transformers import DataCollator, EvalPrediction, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.utils import ModelOutput

from .. import runtime
from ..compat.arguments import SuggestsNewNames
from ..compat.old_trl import _tokenize, has_old_columns, has_old_order, upgrade_args, upgrade_processing_class
from ..config import checks
from ..config.launchers import without_fsdp
from ..config.reward_config import RewardConfig
from ..data.formats import date_written
from ..data.kinds import COLUMNS, Pairs, kind_of_columns
from ..data.loader import prompts_in_training
from ..data.trl_dict import DataCollatorForPreference, batches_in
from ..errors import UserTypeError
from ..evaluation.evaluate import check_best_metric, check_eval_by
from ..modeling import build as building
from ..modeling.head_spec import without_adapters
from ..modeling.losses import Loss, StepResult, batch_loss
from ..packing.batch import Batch
from ..packing.shapes import ShapePlan
from ..parallel.shard import connect
from ..training.batch_plan import BatchPlan
from .evaluating_trainer import ORDER_METHODS, EvaluatingTrainer

logger = logging.getLogger(__name__)

# Start the runtime on import: XLA's SPMD must be on before a plain `TrainingArguments` (old API) starts the devices.
runtime.current()

EvalDataset: TypeAlias = (
    Dataset | IterableDataset | DatasetDict | IterableDatasetDict | dict[str, Dataset | IterableDataset]
)


class RewardTrainer(SuggestsNewNames, EvaluatingTrainer):
    """Trainer of reward models on preference pairs, rankings or single answers.

    The arguments have the names and the order of `trl.RewardTrainer`. `model_init` and deprecated names come last.

    Args:
        model: Name of a model (Hub id or folder), or a sequence classifier with one label, optionally with PEFT
            adapters.
        args: A `RewardConfig`. By default its `output_dir` is ``{model name}-Reward``.
        data_collator: Function that makes a padded batch from rows. By default this package makes its own batches.
        train_dataset: Preference pairs: `chosen` and `rejected` (text or messages), optionally with `prompt`, `margin`
            or `chosen_probability`; or token ids in `chosen_ids` and `rejected_ids`. Or rankings: `completions` with
            `scores` or `ranks`. Or single answers: a `completion` with its `label` or `score`. A stream must contain
            pairs, and requires `max_steps`.
        eval_dataset: Evaluation data in the form of `train_dataset`, or a dict of such datasets.
        processing_class: The tokenizer. By default the tokenizer saved with the model.
        compute_metrics: Function that computes metrics from an `EvalPrediction` with the predictions and labels of
            `prediction_step`: for pairs rewards [pairs, 2] and zeros.
        callbacks: Additional callbacks.
        optimizers: An optimizer and a learning rate scheduler that replace those from `args`.
        optimizer_cls_and_kwargs: An optimizer class and its keyword arguments that replace `args.optim`.
        preprocess_logits_for_metrics: Function of a batch's predictions and labels that returns the predictions for
            `compute_metrics`.
        quantization_config: Quantization of a model given by name (plain torch on CUDA only).
        peft_config: Configuration of the adapters to train instead of the full model: a peft config, or a dict of its
            fields.
        model_init: Function that makes a new model for each `train()`, instead of `model`. It may take a
            hyperparameter trial.
        tokenizer: Deprecated name of `processing_class`.
        max_length: Deprecated. Set `max_length` in `RewardConfig`.

    Attributes:
        verdicts: Verdict of the last evaluation for each prefix of metric names, such as "eval".

    Raises:
        TypeError, ValueError: If arguments or data are invalid. Checked before anything is compiled.
    """

    loss_is_scaled_for_ga = False  # compute_loss returns a mean over the batch
    use_reward_data_collator = False  # TRL's name up to 0.23: whether the data has its old columns
    fixed_shapes: ShapePlan | None = None  # of every packed batch; None plans shapes from the data
    _tag_names = ["trl", "reward-trainer"]
    _trl_tpu_config = RewardConfig
    # attributes that methods copied from TRL may read
    _total_train_tokens, _tp_size = 0, 1

    def __init__(
        self,
        model: "str | PreTrainedModel | None" = None,
        args: RewardConfig | None = None,
        data_collator: DataCollator | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: EvalDataset | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        compute_metrics: Callable[[EvalPrediction], dict] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        quantization_config: Any | None = None,
        peft_config: Any | None = None,
        model_init: Callable[..., PreTrainedModel] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_length: int | None = None,
    ) -> None:
        # arguments
        if has_old_order(compute_metrics, callbacks, optimizers, optimizer_cls_and_kwargs):  # `model_init` came first
            before = optimizers if isinstance(optimizers, list) else None
            model_init, compute_metrics, callbacks = compute_metrics, callbacks, before  # type: ignore[assignment]
            optimizers, optimizer_cls_and_kwargs = optimizer_cls_and_kwargs or (None, None), None  # type: ignore[assignment]
            max_length, quantization_config = quantization_config, None
        if tokenizer is not None:
            processing_class = upgrade_processing_class(processing_class, tokenizer)
        building.check_arguments(model, model_init, train_dataset)
        args = upgrade_args(args or self._trl_tpu_config(building.default_folder(model)), RewardConfig, max_length)
        optimizer, schedule = optimizers or (None, None)
        self._check_settings(args, model, optimizer, eval_dataset)
        if args.shards_over_processes:
            connect(args.mesh_shape)
        self.use_reward_data_collator = has_old_columns(train_dataset, data_collator)

        # model and tokenizer
        set_seed(args.seed)  # seeds XLA too; a new score head in the model is random
        given = {"processing_class": processing_class, "quantization_config": quantization_config}
        build: Any = partial(building.build_reward_model, args=args, peft_config=peft_config, **given)
        self.model_init = model_init  # type: ignore[assignment]  # may be None in transformers
        with without_fsdp():
            built, built_tokenizer = build(model if model_init is None else super().call_model_init())
        built.add_model_tags(self._tag_names)
        if optimizer is None and optimizer_cls_and_kwargs is None:
            checks.warn_of_high_learning_rate(args, built)
        # `_prepare_dataset` reads these attributes, also in subclasses
        self.args = args = building.with_attribute_order(built, args)
        self.model, self.processing_class = built, built_tokenizer

        # layout of batches
        plan = BatchPlan(
            args,
            built,
            built_tokenizer,
            train_dataset,
            runtime.current(),
            data_collator=data_collator,
            old_columns=self.use_reward_data_collator,
            reads_padded_rows=self.reads_padded_rows,
            fixed_shapes=self.fixed_shapes,
        )

        # data
        train_rows = self._prepared(train_dataset, "train")
        eval_rows = None if eval_dataset is None else self._prepared(eval_dataset, "eval")
        plan.prepare(train_rows, eval_rows)
        building.warn_of_unscored_eos(built_tokenizer, train_rows)
        if args.metric_for_best_model is not None and not self._adds_metrics(compute_metrics, callbacks):
            check_best_metric(args, eval_rows)

        # transformers' constructor
        with without_fsdp():
            super().__init__(
                model=built,
                args=args,
                data_collator=data_collator or plan.default_collator(),
                train_dataset=train_rows,
                eval_dataset=eval_rows,
                processing_class=built_tokenizer,
                compute_metrics=compute_metrics,
                callbacks=callbacks,
                optimizers=(optimizer, schedule),
                optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
                preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            )
        self.model_init = model_init  # type: ignore[assignment]
        if type(self)._set_signature_columns_if_needed is EvaluatingTrainer._set_signature_columns_if_needed:
            self._signature_columns = [*COLUMNS]  # type: ignore[assignment]  # else transformers keeps only the model's arguments

        # parts
        self._make_components(plan)
        self.trl_tpu.build = build
        self.trl_tpu.own_optimizer = optimizer is not None or optimizer_cls_and_kwargs is not None
        self.trl_tpu.date = date_written(built_tokenizer, building.first_chat(train_dataset))
        sets: Any = eval_rows if isinstance(eval_rows, Mapping) else {"": eval_rows} if eval_rows is not None else {}
        self.trl_tpu.seen = {id(rows): prompts_in_training(train_rows, rows, name) for name, rows in sets.items()}
        self.verdicts = self.trl_tpu.verdicts
        self.tokenizer = built_tokenizer  # TRL's name up to 0.23

    def _check_settings(self, args: RewardConfig, model: Any, optimizer: Any, eval_dataset: Any) -> None:
        """Reject settings that do not fit the other arguments, before anything is loaded."""
        if not isinstance(args, self._trl_tpu_config):
            raise UserTypeError(f"`args` must be a `{self._trl_tpu_config.__name__}`, got `{type(args).__name__}`.")
        is_split = hasattr(model, "hf_device_map") or "device_map" in (args.model_init_kwargs or {})
        if model is not None and not is_split:  # transformers supports layers on several GPUs in one process
            checks.check_one_gpu(args.n_gpu)
        if optimizer is not None:
            runtime.current().check_optimizer(optimizer)
        if args.eval_by is not None:
            check_eval_by(args.eval_by, eval_dataset)
        if args.label_smoothing_factor and self._is_original("compute_loss"):
            logger.warning("label_smoothing_factor has no effect: the loss compares rewards and has no class labels.")

    def _adds_metrics(self, compute_metrics: Any, callbacks: Any) -> bool:
        """Return whether user code may add metrics. The callbacks of transformers, as objects or classes, add none."""
        kinds = (each if isinstance(each, type) else type(each) for each in callbacks or ())
        has_callback = not all(kind.__module__.startswith("transformers.") for kind in kinds)
        methods = (*_BATCH_METHODS, *ORDER_METHODS, "evaluate", "_evaluate", "_determine_best_metric", "log")
        return compute_metrics is not None or has_callback or not all(map(self._is_original, methods))

    def call_model_init(self, trial: Any = None) -> PreTrainedModel:
        """Build a new reward model from the user's `model_init`. Called for each `train()`."""
        model, _ = self.trl_tpu.build(super().call_model_init(trial))
        model.add_model_tags(self._tag_names)
        self.trl_tpu.batch_plan.use_model(model)
        return model

    def reads_padded_rows(self) -> str | None:
        """Return the name of a user-defined method that reads batches, or None.

        Such methods override ours in a subclass, or replace them on the class or the instance. They get TRL's padded
        dict as a batch. A subclass can return None if its methods accept this package's batches.
        """
        return next((name for name in _BATCH_METHODS if not self._is_original(name)), None)

    def _is_original(self, name: str) -> bool:
        """Return whether a method of `RewardTrainer` is neither overridden nor replaced."""
        return name not in vars(self) and getattr(type(self), name) is _ORIGINAL_METHODS.get(name)

    def _get_dataloader(self, dataset: Any, description: str, *args: Any, **kwargs: Any) -> Any:
        self._set_signature_columns_if_needed()  # a subclass may add columns for its collator
        self._signature_columns = list({*(self._signature_columns or ()), *COLUMNS})  # type: ignore[assignment]
        sets = self.eval_dataset.values() if isinstance(self.eval_dataset, Mapping) else (self.eval_dataset,)
        if not any(dataset is prepared for prepared in (self.train_dataset, *sets)):
            dataset = self._prepared(dataset, "eval" if description == "Evaluation" else description)
        loader = super()._get_dataloader(dataset, description, *args, **kwargs)
        loader.evaluated_dataset = dataset  # includes columns that batches do not have
        return loader

    # ---- the loss

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute the loss of a batch, made by this package's collators or by TRL's, including TRL's up to 0.23.

        Returns:
            The loss; with ``return_outputs`` the loss and outputs. For TRL's dict the outputs are the model's; up to
            0.23 they are `rewards_chosen` and `rewards_rejected`, [P] each. For this package's batches they have
            these, `logits` [K P, A] (first all first answers, ...), and `rewards`, [P, K] or for several attributes
            [P, A, K].
        """
        result = self._loss_and_rewards(model, inputs)
        # keep the result only if it may be read: on XLA it becomes an output of the step's program
        if not self.model.training or not self._is_original("compute_loss"):
            self.trl_tpu.last_step = result.detach()
        if not return_outputs:
            return result.loss
        outputs = result.table.kind.outputs(result.rewards_by_row)
        if not isinstance(inputs, Batch):
            return result.loss, outputs if self.use_reward_data_collator else result.outputs
        # without padding, except in training: a step reads nothing from the device
        rows = slice(None) if torch.is_grad_enabled() else result.present_P
        logits = result.rewards_SA.unflatten(0, (-1, result.table.answers))[rows].transpose(0, 1).flatten(0, 1)
        return result.loss, ModelOutput({"logits": logits, "rewards": result.rewards_by_row} | outputs)

    def _loss_and_rewards(self, model: nn.Module, inputs: dict[str, Any]) -> StepResult:
        """Compute loss and rewards of a batch. In training, add the rewards to the step's metrics."""
        base: Any = type(without_adapters(self.model))
        extras = {"use_cache": False} if _accepts_use_cache(base) else {}
        result = batch_loss(model, self._batches_in(inputs), Loss.of(self.args), **extras)
        if self.model.training:
            self.trl_tpu.statistics.update(result.rewards_SA, result.tokens_S, result.table)
        return result

    def _batches_in(self, inputs: Any) -> Sequence[Batch[torch.Tensor]]:
        return batches_in(inputs, self.processing_class.pad_token_id, self.trl_tpu.batch_plan.padding_side)

    # ---- data

    def _prepare_dataset(self, dataset: Any, processing_class: Any, args: RewardConfig, dataset_name: str) -> Any:
        """Prepare a dataset of any accepted form. The name is TRL's, and subclasses override it."""
        return building.build_dataset(
            dataset, self.model, processing_class, args, dataset_name, self.use_reward_data_collator
        )

    def _prepared(self, dataset: Any, name: str) -> Any:
        if isinstance(dataset, Mapping):
            return {key: self._prepared(split, f"{name}_{key}") for key, split in dataset.items()}
        prepared = self._prepare_dataset(dataset, self.processing_class, self.args, name)
        if not self._is_original("_prepare_dataset") and kind_of_columns(prepared.column_names or ()) == Pairs():
            prepared = building.build_dataset(prepared, self.model, self.processing_class, self.args, name)
        return prepared


#: Methods that read batches.
_BATCH_METHODS = (
    *("compute_loss", "training_step", "prediction_step", "evaluation_loop", "floating_point_ops"),
    *("_prepare_inputs", "_prepare_input", "get_batch_samples", "_get_num_items_in_batch"),
    *("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader"),
    *("_track_num_input_tokens", "_prepare_context_parallel_inputs"),
)
_ORIGINAL_METHODS = {  # without methods that another library has replaced in transformers
    name: method
    for name, method in inspect.getmembers(RewardTrainer, inspect.isfunction)
    if method.__module__.startswith(("trl_tpu.", "transformers."))
}


@cache
def _accepts_use_cache(model_class: type[nn.Module]) -> bool:
    parameters = inspect.signature(model_class.forward).parameters.values()
    return any(item.name == "use_cache" or item.kind is item.VAR_KEYWORD for item in parameters)


__all__ = ["DataCollatorForPreference", "RewardTrainer", "_tokenize"]
