"""Solutions whose steps are judged, the rows of process rewards."""

import logging
from typing import Any

import numpy as np
from datasets import Dataset, Features, Sequence, Value
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from . import checks
from .checks import Row
from .length_stats import NO_LABEL, SOLUTION, STEP_ENDS, labels_of, rows_of
from .tokenize import keep_fitting, map_rows
from .traps import TRAPS, find_traps

logger = logging.getLogger(__name__)


NEUTRAL = -1
"""The label of a step that is neither right nor wrong."""


def are_labels(labels: Any, steps: int) -> bool:
    """Tell whether these are the labels of as many steps: how likely each is right, 0 to 1, or -1 for neither."""
    if not isinstance(labels, list) or len(labels) != steps:
        return False
    return all(isinstance(label, bool | int | float) and (0 <= label <= 1 or label == NEUTRAL) for label in labels)


def check_solution(row: Row, where: str) -> None:
    """Raise UserError unless a raw row's prompt and steps are texts."""
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
    """Tokenize a solution: return its `input_ids`, and `labels` that are -100 but at the last token of a step.

    Args:
        features: `prompt`, `completions` and `labels`.
        tokenizer: Adds no special tokens, but its BOS, if it has one, before the prompt.
        step_separator: Put after each step.
        max_length: Most tokens; those after are cut.
        max_completion_length: The same, of the steps.
        train_on_last_step_only: Whether all labels but the last become -100,
        is_eval: but not in evaluation.
    """
    texts, bos = (step_separator, features["prompt"], *features["completions"]), tokenizer.bos_token_id
    separator_ids, prompt_ids, *steps = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    prompt_ids = [bos] * (bos is not None) + prompt_ids
    input_ids, labels = list[int](), list[int]()
    for place, (ids, label) in enumerate(zip(steps, features["labels"], strict=True), start=1):
        if not ids and not separator_ids:
            raise UserError(
                f"`completions[{place - 1}]` has no tokens, and step_separator={step_separator!r} adds none, so its "
                "label has no place. Remove such steps, or set another step_separator."
            )
        input_ids += ids + separator_ids
        is_left_out = train_on_last_step_only and not is_eval and place < len(steps)
        label = NO_LABEL if is_left_out else int(label) if label % 1 == 0 else label
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
    """Check solutions, and tokenize those that are texts; see `prepare_preference_dataset`.

    Labels of tokens that were cut off are counted in the log.

    Args:
        tokenize: `tokenize_solution`, or what takes its place.
        settings: Its arguments after the first.
        neutral: What becomes of steps with the label -1: "ignore" or "wrong".

    Raises:
        UserError: A bad row, or training data without any label left.
    """
    if not isinstance(dataset, Dataset):
        raise UserError(f"The {name} dataset is no `Dataset` with a length: load it without streaming.")
    columns, first, given_N = checks.column_names(dataset, name), dataset[0], np.zeros(1, np.int64)
    is_labeled = "completions" in columns and are_labels(first.get("labels"), len(first["completions"] or ()))
    if is_labeled or "input_ids" not in columns:  # else any `completions` are an extra column
        every_N = [labels or [] for labels in (dataset["labels"] if "labels" in columns else ())]
        is_soft = any(isinstance(label, float) and label % 1 for labels in every_N for label in labels)
        given_N = np.array([len(labels) - labels.count(NEUTRAL) * (neutral == "ignore") for labels in every_N])
        features = {"input_ids": Sequence(Value("int64")), TRAPS: Value("string")}  # labels would else stay bools
        features["labels"] = Sequence(Value("float64" if is_soft else "int64"))
        given = {"name": name, "tokenize": tokenize, "settings": settings, "neutral": neutral}
        how: dict[str, Any] = {"fn_kwargs": given, "with_indices": True, "remove_columns": columns}
        dataset = map_rows(dataset, _tokenize_raw_solution, num_proc, name, **how, features=Features(features))
    else:
        dataset = dataset.select_columns([*SOLUTION])
        for index, row in enumerate(dataset):
            ids, labels = row["input_ids"] or [], row["labels"] or []
            if len(labels) != len(ids) or not all(label == NO_LABEL or 0 <= label <= 1 for label in labels):
                where = checks.row_of(index, name, "labels")
                raise UserError(f"{where} must be as long as `input_ids`, each from 0 to 1, or {NO_LABEL}.")
    fitting: Any = keep_fitting(dataset, num_embeddings=num_embeddings, max_length=None, name=name)
    kept_N = np.array([len(labels_of(row)[STEP_ENDS]) for row in rows_of(fitting)])
    is_eval, fix = settings["is_eval"], "Raise `max_length` and `max_completion_length`, or remove such rows."
    if settings["train_on_last_step_only"] and not is_eval:
        given_N = np.minimum(given_N, 1)
    if not kept_N.any():
        nothing = f"The {name} dataset has no label left, so nothing can be learned or measured. {fix}"
        if not is_eval:
            raise UserError(nothing)
        logger.warning(nothing)
    elif (removed_N := given_N - kept_N).max(initial=0) > 0:
        logger.warning(
            f"{name} dataset: truncation removed {removed_N.clip(0).sum()} of {given_N.sum()} labels (the first in "
            f"row {(removed_N > 0).argmax()}). {fix}"
        )
    return fitting


def _tokenize_raw_solution(
    row: dict[str, Any], index: int, name: str, tokenize: Any, settings: dict[str, Any], neutral: str | None
) -> dict[str, Any]:
    """Return the columns that ``tokenize`` makes of a raw row; raise UserError, which names the row, if it is bad."""
    where = checks.row_of(index, name)
    check_solution(row, where)
    steps: list[str] = row["completions"]
    labels: Any = row.get("labels")
    if not are_labels(labels, len(steps)):
        raise UserError(
            f"{where}: `labels` must be how likely each of {len(steps)} `completions` is right, 0 to 1, got "
            f"{labels!r:.80}."
        )
    if NEUTRAL in labels and neutral is None:
        raise UserError(
            f"{where}: `labels` has {NEUTRAL}, for a step that is neither right nor wrong. Set neutral_steps='ignore' "
            "to leave such steps out, or 'wrong' to count them as 0."
        )
    instead = NO_LABEL if neutral == "ignore" else 0
    try:
        tokens = tokenize({**row, "labels": [instead if label == NEUTRAL else label for label in labels]}, **settings)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    traps = find_traps(row, [], steps[:1] or [""], [tokens["input_ids"]], settings["tokenizer"])
    return tokens | {TRAPS: traps}
