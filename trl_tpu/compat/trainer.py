"""Conversion of the trainer's arguments in TRL up to 0.23 to today's, with deprecation warnings."""

import copy
import dataclasses
import inspect
import warnings
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainingArguments

from ..data.checks import OLD_KEYS
from ..errors import UserError
from .old_columns import RewardDataCollatorWithPadding


def upgrade_args(args: Any, config_class: Any, max_length: int | None) -> Any:
    """Return ``args`` as a ``config_class`` that includes the trainer argument ``max_length`` of TRL up to 0.13."""
    if not isinstance(args, config_class):
        _warn("a plain `TrainingArguments` as `args`", "`trl_tpu.RewardConfig`")
        args = _converted(args, config_class)
    if args.evaluation_strategy not in (None, args.eval_strategy):  # old scripts set it after construction
        args = copy.copy(args)  # do not change the caller's object
        args.__post_init__()
    if max_length is not None:
        _warn("`max_length` here", "`RewardConfig(max_length=...)`")
        args = copy.copy(args)
        args.max_length = max_length
    return args


def _warn(old: str, new: str) -> None:
    warnings.warn(f"TRL's old API, {old}, is deprecated: use {new}.", FutureWarning, stacklevel=4)


def _converted(args: TrainingArguments, config_class: Any) -> Any:
    """Return a config with the same settings, and `max_length=None`, the default of the old API.

    Fields that a subclass of TrainingArguments adds become attributes: callbacks and overridden methods may read them.
    """
    values = {item.name: getattr(args, item.name) for item in dataclasses.fields(args) if item.init}
    names = {item.name for item in dataclasses.fields(config_class)}
    config = config_class(**({"max_length": None} | {key: value for key, value in values.items() if key in names}))
    vars(config).update({name: value for name, value in values.items() if name not in names})
    return config


def upgrade_processing_class(
    processing_class: PreTrainedTokenizerBase | None, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedTokenizerBase:
    """Return the tokenizer that was passed by the old name ``tokenizer``.

    Raises:
        UserError: It was passed by today's name ``processing_class``, too.
    """
    if processing_class is not None:
        raise UserError("`tokenizer` is the old name of `processing_class`: give only `processing_class`.")
    _warn("`tokenizer`", "`processing_class`")
    return tokenizer


def has_old_order(compute_metrics: Any, callbacks: Any, optimizers: Any, optimizer_cls_and_kwargs: Any) -> bool:
    """Return whether these arguments were passed in the order of TRL up to 0.23.

    There `model_init`, `compute_metrics`, `callbacks` and `optimizers` had the positions that `compute_metrics`,
    `callbacks`, `optimizers` and `optimizer_cls_and_kwargs` have today.
    """
    makes_model = callable(compute_metrics) and {*inspect.signature(compute_metrics).parameters} <= {"trial"}
    is_list = isinstance(optimizers, list)
    are_callbacks = is_list and all(isinstance(each, TrainerCallback | type) for each in optimizers)
    are_optimizers = optimizer_cls_and_kwargs is not None and not isinstance(optimizer_cls_and_kwargs[0], type)
    return makes_model or callable(callbacks) or are_callbacks or are_optimizers


def has_old_columns(train_dataset: Any, data_collator: Any) -> bool:
    """Return whether the data or the collator have the form of TRL up to 0.23, and warn if so.

    Args:
        train_dataset: Dataset that may have the old columns.
        data_collator: Collator that may be a `RewardDataCollatorWithPadding`. Then raw rows are also converted to the
            old columns.
    """
    columns = getattr(train_dataset, "column_names", None) or []
    is_old = isinstance(data_collator, RewardDataCollatorWithPadding) or bool(set(OLD_KEYS) & set(columns))
    if is_old:
        new = "`DataCollatorForPreference` and the columns chosen_ids, rejected_ids (or raw chosen, rejected)"
        _warn(f"`RewardDataCollatorWithPadding` and the columns {', '.join(OLD_KEYS)}", new)
    return is_old
