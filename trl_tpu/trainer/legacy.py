"""The old API: spellings of TRL up to 0.23, turned into today's with a warning that names it."""

import copy
import dataclasses
import inspect
import warnings
from typing import Any

from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainingArguments

from ..config.reward_config import RewardConfig
from ..data.collators import RewardDataCollatorWithPadding
from ..data.length_stats import OLD_KEYS as LEGACY_KEYS
from ..errors import UserError


def upgrade_args(args: TrainingArguments, max_length: int | None) -> RewardConfig:
    """Make ``args`` a RewardConfig, with the trainer argument ``max_length`` of TRL up to 0.13 in it."""
    if not isinstance(args, RewardConfig):
        _warn("a plain `TrainingArguments` as `args`", "`trl_tpu.RewardConfig`")
        args = _as_reward_config(args)
    if args.evaluation_strategy not in (None, args.eval_strategy):  # set after it was made, as scripts of then did
        args = copy.copy(args)  # the caller's stays as it is
        args.__post_init__()
    if max_length is not None:
        _warn("`max_length` here", "`RewardConfig(max_length=...)`")
        args = copy.copy(args)
        args.max_length = max_length
    return args


def _warn(old: str, new: str) -> None:
    warnings.warn(f"TRL's old API, {old}, is deprecated: use {new}.", FutureWarning, stacklevel=4)


def _as_reward_config(args: TrainingArguments) -> RewardConfig:
    """Make a RewardConfig of the same settings; no `max_length`, which was TRL's default then.

    What a subclass of TrainingArguments adds comes along: callbacks and overridden methods may read it.
    """
    values = {item.name: getattr(args, item.name) for item in dataclasses.fields(args) if item.init}
    if args.optim == TrainingArguments.optim:
        del values["optim"]  # transformers' default is a fused kernel; nobody chose it
    known = {item.name for item in dataclasses.fields(RewardConfig)}
    config = RewardConfig(**({"max_length": None} | {key: value for key, value in values.items() if key in known}))
    vars(config).update({name: value for name, value in values.items() if name not in known})
    return config


def upgrade_processing_class(
    processing_class: PreTrainedTokenizerBase | None, tokenizer: PreTrainedTokenizerBase | None
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer, whichever of its two names it came by.

    Raises:
        UserError: If both are given.
    """
    if tokenizer is None:
        return processing_class
    if processing_class is not None:
        raise UserError("`tokenizer` is the old name of `processing_class`: give only `processing_class`.")
    _warn("`tokenizer`", "`processing_class`")
    return tokenizer


def has_old_order(compute_metrics: Any, callbacks: Any, optimizers: Any) -> bool:
    """Tell whether these stand where TRL up to 0.23 had `model_init`, `compute_metrics` and `callbacks`."""
    takes_nothing = callable(compute_metrics) and not inspect.signature(compute_metrics).parameters
    is_old = isinstance(optimizers, list) and all(isinstance(each, TrainerCallback | type) for each in optimizers)
    return takes_nothing or callable(callbacks) or is_old


def uses_old_columns(train_dataset: Any, data_collator: Any) -> bool:
    """Tell whether columns or collator are those of TRL up to 0.23; warn with today's spelling.

    Args:
        train_dataset: Has the columns of then, or not.
        data_collator: Is the collator of then, which makes raw rows such columns, or not.
    """
    columns = getattr(train_dataset, "column_names", None) or []
    is_old = isinstance(data_collator, RewardDataCollatorWithPadding) or bool(set(LEGACY_KEYS) & set(columns))
    if is_old:
        new = "`DataCollatorForPreference` and the columns chosen_ids, rejected_ids (or raw chosen, rejected)"
        _warn(f"`RewardDataCollatorWithPadding` and the columns {', '.join(LEGACY_KEYS)}", new)
    return is_old
