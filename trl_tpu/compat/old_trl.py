"""The API of TRL up to 0.23: its trainer's arguments, its columns and collator, and `setup_chat_format`."""

import copy
import dataclasses
import inspect
import logging
import warnings
from collections.abc import Collection, Sequence
from typing import Any, Self

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainingArguments
from transformers.data.data_collator import DataCollatorWithPadding

from ..data.checks import OLD_KEYS, RAW_COLUMNS, Row
from ..data.formats import maybe_apply_chat_template
from ..data.kinds import Pairs
from ..data.trl_dict import TABLE, needs_table
from ..errors import UserError

logger = logging.getLogger(__name__)

# ---- arguments of the trainer


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
    text = f"TRL's old API, {old}, is deprecated and will not be supported in v1 of TRL: use {new}."
    warnings.warn(text, FutureWarning, stacklevel=4)


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


# ---- columns and their collator

OLD_NAMES = {"chosen_input_ids": "chosen_ids", "rejected_input_ids": "rejected_ids"}


def with_current_names(dataset: Any) -> Any:
    """Rename the deprecated token columns `OLD_NAMES`."""
    _warn("the columns `chosen_input_ids` and `rejected_input_ids`", "`chosen_ids` and `rejected_ids`")
    return dataset.rename_columns(OLD_NAMES)


@dataclasses.dataclass(frozen=True)
class OldPairs(Pairs):
    """Pairs for TRL up to 0.23: texts or messages, or token ids and attention masks (`OLD_KEYS`).

    Raw pairs are tokenized without the prompt and without an added end-of-sequence token.
    """

    tokenizer: PreTrainedTokenizerBase
    raw_columns, has_traps = OLD_KEYS, False

    def check_dataset(self, columns: Collection[str], name: str) -> Self:
        if {*OLD_KEYS} & set(columns):
            return self
        if "prompt" in columns and not {*self.columns} & set(columns):
            logger.warning(
                f"{name} dataset: as in TRL up to 0.23, the column `prompt` is left out of the tokens, so rewards do "
                "not depend on it. Put it at the beginning of both answers, or use TRL's current columns and collator."
            )
        return super().check_dataset(columns, name)

    def tokenize(
        self, rows_N: Sequence[Row], places: Sequence[str], tokenizer: PreTrainedTokenizerBase
    ) -> list[tuple[dict[str, Any], list[str]]]:
        if not {*OLD_KEYS} & rows_N[0].keys():
            return super().tokenize(rows_N, places, tokenizer)
        return [(_read_tokens(row, where), []) for row, where in zip(rows_N, places, strict=True)]

    def raw_answers(self, row: Row, where: str) -> dict[str, Any]:
        super().raw_answers(row, where)
        rendered = maybe_apply_chat_template(dict(row), self.tokenizer)
        return {column: rendered[column] for column in RAW_COLUMNS}

    def with_prompt(self, row: Row, answer: Any, tokenizer: Any) -> Any:
        return answer

    def tokenized(self, row: Row, ids_K: list[list[int]]) -> dict[str, Any]:
        return super().tokenized(row, ids_K) | _margin_of(row)


def _read_tokens(row: Row, where: str) -> dict[str, Any]:
    """Return the prepared columns of a tokenized pair. Tokens that the attention mask excludes are dropped.

    Raises:
        UserError: An attention mask has a gap or the wrong length.
    """
    answers = dict[str, Any]()
    for column, half in zip(Pairs.columns, RAW_COLUMNS, strict=True):
        ids, mask = row[f"input_ids_{half}"], row[f"attention_mask_{half}"]
        attended = np.flatnonzero(mask)
        if not len(attended) or len(mask) != len(ids) or len(attended) != np.ptp(attended) + 1:
            raise UserError(
                f"{where}: `attention_mask_{half}` must be as long as the token ids, and 0 only before or after all "
                f"tokens that count, got {mask!r:.80}."
            )
        answers[column] = list(ids[attended[0] : attended[-1] + 1])
    return answers | _margin_of(row)


def _margin_of(row: Row) -> dict[str, Any]:
    """Return the margin, if any, of a row in the form of TRL up to 0.23; it may be a list of one number."""
    margin = row.get("margin")
    if isinstance(margin, list):
        margin = margin[0] if len(margin) == 1 else None  # rejected as no number
    return {"margin": margin} if "margin" in row else {}


class RewardDataCollatorWithPadding(DataCollatorWithPadding):
    """Collator of TRL up to 0.23: pads the chosen and the rejected sequences separately, on the tokenizer's side.

    Each row has `input_ids_chosen`, `attention_mask_chosen`, `input_ids_rejected` and `attention_mask_rejected`,
    and may have a `margin`, a float or a list of one float. The batch has the same keys, [P, longest of that half],
    `margin`, [P], and ``return_loss=True``.

    Args:
        tokenizer: The tokenizer; it pads with its pad token and on its padding side.
        padding: As in the tokenizer's ``pad``: True or "longest", "max_length", or False.
        max_length: The padded length for ``padding="max_length"`` (TRL up to 0.11).
        pad_to_multiple_of: Round lengths up to a multiple of this number.
        return_tensors: Only ``"pt"``.
    """

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = {}
        for half in RAW_COLUMNS:
            rows = [{key: feature[f"{key}_{half}"] for key in ("input_ids", "attention_mask")} for feature in features]
            batch |= {f"{key}_{half}": padded for key, padded in super().__call__(rows).items()}
        batch["return_loss"] = True  # not first: accelerate reads the size of a batch from its first value
        if "margin" in features[0]:
            margins = torch.tensor([feature["margin"] for feature in features], dtype=torch.float)
            batch["margin"] = margins.view(len(features))  # [P, 1] would broadcast to [P, P] in the loss
        return batch | dict.fromkeys([TABLE] if needs_table(features[0]) else [])


def _tokenize(batch: Row, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    """Tokenize a batch of ``chosen`` and ``rejected`` texts as the function of this name in TRL up to 0.23 does."""
    halves = [tokenizer(list(batch[half])) for half in RAW_COLUMNS]
    return dict(zip(OLD_KEYS, [half[key] for half in halves for key in ("input_ids", "attention_mask")], strict=True))


# ---- chat format

# OpenAI's ChatML, as TRL up to 0.23 rendered it
_START, _END = "<|im_start|>", "<|im_end|>"
_CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def setup_chat_format(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    format: str = "chatml",
    resize_to_multiple_of: int | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Add the ChatML template and its two tokens to a model and its tokenizer, in place, as TRL up to 0.23 did.

    Args:
        model: A model with resizable input embeddings.
        tokenizer: The model's tokenizer. `<|im_start|>` becomes the bos token, `<|im_end|>` the eos and pad token.
        format: Must be ``"chatml"``.
        resize_to_multiple_of: Round the number of embedding rows up to a multiple of this. None does not round.

    Raises:
        UserError: ``format`` is not ``"chatml"``.
    """
    if format != "chatml":
        raise UserError(f"`format={format!r}` is not known: use 'chatml', or set `tokenizer.chat_template`.")
    tokenizer.add_special_tokens(
        {"bos_token": _START, "eos_token": _END, "pad_token": _END, "additional_special_tokens": [_START, _END]}
    )
    tokenizer.chat_template = _CHATML
    model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=resize_to_multiple_of)
    for config in (model.config, getattr(model, "generation_config", None)):
        if config is not None:
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                setattr(config, name, getattr(tokenizer, name))
    return model, tokenizer
