"""Solutions with labeled steps, the rows of process reward models."""

import logging
from typing import Any

import numpy as np
from datasets import Dataset, Features, Sequence, Value
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from . import checks
from .checks import Row
from .length_stats import NO_LABEL, SOLUTION, STEP_ENDS, labels_of, rows_of
from .prompts import RAW_BY_PREPARED
from .tokenize import keep_fitting, map_rows
from .traps import TRAPS, find_traps

logger = logging.getLogger(__name__)


NEUTRAL = -1
"""Label of a step that is neither right nor wrong."""


def is_label_list(labels: Any, steps: int) -> bool:
    """Check for a list with one label per step: the probability that the step is right (0 to 1), or -1 for neutral."""
    if not isinstance(labels, list) or len(labels) != steps:
        return False
    return all(isinstance(label, bool | int | float) and (0 <= label <= 1 or label == NEUTRAL) for label in labels)


def check_solution(row: Row, where: str) -> None:
    """Raise UserError unless the prompt and the steps of a raw row are texts."""
    prompt, steps = row.get("prompt"), row.get("completions")
    if not isinstance(steps, list) or not all(isinstance(text, str) for text in (prompt, *steps)):
        raise UserError(f"{where}: `prompt` must be text, and `completions` a list of texts, the steps.")
    for text in (prompt, *steps):
        checks.check_text(text, where)


def tokenize_solution(
    features: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    step_separator: str,
    max_length: int | None,
    max_completion_length: int | None,
    train_on_last_step_only: bool,
    is_eval: bool,
) -> dict[str, list[int]]:
    """Tokenize a solution into `input_ids` and `labels`; labels are -100 except at the last token of each step.

    Args:
        features: The row's `prompt`, `completions` and `labels`.
        tokenizer: The tokenizer. Its BOS token, if any, is put before the prompt; other special tokens are not added.
        step_separator: Text that is put after each step.
        max_length: Maximum number of tokens; later tokens are truncated. None sets no limit.
        max_completion_length: Maximum number of tokens of all steps; later tokens are truncated. None sets no limit.
        train_on_last_step_only: Whether all labels except the last become -100. No effect with ``is_eval``.
        is_eval: Whether the row is for evaluation.
    """
    texts, bos = (step_separator, features["prompt"], *features["completions"]), tokenizer.bos_token_id
    separator_ids, prompt_ids, *steps = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    prompt_ids = [bos] * (bos is not None) + prompt_ids
    input_ids, labels = list[int](), list[int]()
    for place, (ids, label) in enumerate(zip(steps, features["labels"], strict=True), start=1):
        if not ids and not separator_ids:
            raise UserError(
                f"`completions[{place - 1}]` has no tokens, and step_separator={step_separator!r} adds none, so no "
                "token can hold its label. Remove such steps, or set another step_separator."
            )
        input_ids += ids + separator_ids
        is_ignored = train_on_last_step_only and not is_eval and place < len(steps)
        label = NO_LABEL if is_ignored else int(label) if label % 1 == 0 else label
        labels += [NO_LABEL] * (len(input_ids) - len(labels) - 1) + [label]
    input_ids = prompt_ids + input_ids[:max_completion_length]
    labels = [NO_LABEL] * len(prompt_ids) + labels[:max_completion_length]
    return {"input_ids": input_ids[:max_length], "labels": labels[:max_length]}


def prepare_solutions(
    dataset: Any,
    tokenize: Any,
    settings: dict[str, Any],
    *,
    neutral: str | None = None,
    num_embeddings: int,
    num_proc: int | None,
    name: str,
) -> Dataset:
    """Check solutions, and tokenize solutions in text form; see `prepare_preference_dataset`.

    The log counts the labels that truncation removed.

    Args:
        tokenize: `tokenize_solution`, or a replacement for it.
        settings: Arguments of ``tokenize`` after the first.
        neutral: How to treat steps with the label -1: "ignore" or "wrong". By default they are rejected.

    Raises:
        UserError: A row is bad, or training data has no label left.
    """
    if not isinstance(dataset, Dataset):
        raise UserError(f"The {name} dataset is not a `Dataset` with a length: load it without streaming.")
    raw, columns, first, counts_N = dataset, checks.column_names(dataset, name), dataset[0], np.zeros(1, np.int64)
    is_labeled = "completions" in columns and is_label_list(first.get("labels"), len(first["completions"] or ()))
    if is_labeled or "input_ids" not in columns:  # otherwise `completions` is an extra column
        labels_N = [labels or [] for labels in (dataset["labels"] if "labels" in columns else ())]
        is_soft = any(isinstance(label, float) and label % 1 for labels in labels_N for label in labels)
        counts_N = np.array([len(labels) - labels.count(NEUTRAL) * (neutral == "ignore") for labels in labels_N])
        # without explicit features, labels would stay bools
        features = {"input_ids": Sequence(Value("int64")), TRAPS: Value("string")}
        features["labels"] = Sequence(Value("float64" if is_soft else "int64"))
        arguments = {"name": name, "tokenize": tokenize, "settings": settings, "neutral": neutral}
        options: dict[str, Any] = {"fn_kwargs": arguments, "with_indices": True, "remove_columns": columns}
        options["features"] = Features(features)
        dataset = map_rows(dataset, _tokenize_raw_solution, num_proc, name, **options)
    else:
        dataset = dataset.select_columns([*SOLUTION])
        for index, row in enumerate(dataset):
            ids, labels = row["input_ids"] or [], row["labels"] or []
            if len(labels) != len(ids) or not all(label == NO_LABEL or 0 <= label <= 1 for label in labels):
                where = checks.row_of(index, name, "labels")
                raise UserError(f"{where} must be as long as `input_ids`, each from 0 to 1, or {NO_LABEL}.")
    fitting: Any = keep_fitting(dataset, num_embeddings=num_embeddings, max_length=None, name=name)
    RAW_BY_PREPARED[fitting] = raw  # without a maximum length, all rows fit
    remaining_N = np.array([len(labels_of(row)[STEP_ENDS]) for row in rows_of(fitting)])
    is_eval, fix = settings["is_eval"], "Raise `max_length` and `max_completion_length`, or remove such rows."
    if settings["train_on_last_step_only"] and not is_eval:
        counts_N = np.minimum(counts_N, 1)
    if not remaining_N.any():
        problem = f"The {name} dataset has no label left, so nothing can be learned or measured. {fix}"
        if not is_eval:
            raise UserError(problem)
        logger.warning(problem)
    elif (removed_N := counts_N - remaining_N).max(initial=0) > 0:
        logger.warning(
            f"{name} dataset: truncation removed {removed_N.clip(0).sum()} of {counts_N.sum()} labels (the first in "
            f"row {(removed_N > 0).argmax()}). {fix}"
        )
    return fitting


def _tokenize_raw_solution(
    row: dict[str, Any], index: int, name: str, tokenize: Any, settings: dict[str, Any], neutral: str | None
) -> dict[str, Any]:
    """Tokenize a raw row with ``tokenize``; raise a UserError that names the row if it is bad."""
    where = checks.row_of(index, name)
    check_solution(row, where)
    steps: list[str] = row["completions"]
    labels: Any = row.get("labels")
    if not is_label_list(labels, len(steps)):
        raise UserError(
            f"{where}: `labels` must have the probability that each of {len(steps)} `completions` is right, 0 to 1, "
            f"got {labels!r:.80}."
        )
    if NEUTRAL in labels and neutral is None:
        raise UserError(
            f"{where}: `labels` has {NEUTRAL}, for a step that is neither right nor wrong. Set neutral_steps='ignore' "
            "to leave such steps out, or 'wrong' to count them as 0."
        )
    instead = NO_LABEL if neutral == "ignore" else 0  # in place of -1
    try:
        tokens = tokenize({**row, "labels": [instead if label == NEUTRAL else label for label in labels]}, **settings)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    traps = find_traps(row, steps[:1] or [""], [tokens["input_ids"]], settings["tokenizer"])
    return tokens | {TRAPS: "\n".join(traps)}
