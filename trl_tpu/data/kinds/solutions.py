"""Solutions with labeled steps, the rows of process reward models."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import numpy as np
import torch
from datasets import Features, Value
from datasets import Sequence as ListOf
from transformers import PreTrainedTokenizerBase

from ...errors import UserError
from .. import checks
from ..checks import TRAPS, Row, find_traps
from .base import LABELS_AS, RowKind, ScoredItem, numbers_in

logger = logging.getLogger(__name__)

#: Label of tokens that do not end a labeled step; the same value as `ignore_index` in torch's losses.
NO_LABEL = -100
#: Name of the labels of a row that say which of its tokens are scored.
STEP_ENDS = "step_ends"
#: Label of a step that is neither right nor wrong.
NEUTRAL = -1
#: The settings of `tokenize_solution` with the names of a `PRMConfig`.
_SETTINGS = ("step_separator", "max_length", "max_completion_length", "train_on_last_step_only")
_NEUTRAL_IS_WRONG = "neutral_steps=wrong"  # the value of `labels_as`


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


@dataclass(frozen=True)
class Solutions(RowKind):
    """Rows with the steps of a solution, and for each step the probability that it is right.

    Args:
        step_separator, max_length, max_completion_length, train_on_last_step_only: See `tokenize_solution`.
        neutral: How to treat steps with the label -1: "ignore" or "wrong". By default they are rejected.
        is_eval: Whether the rows are for evaluation.
        tokenize_row: `tokenize_solution`, or a replacement for it.
    """

    step_separator: str = "\n"
    max_length: int | None = None
    max_completion_length: int | None = None
    train_on_last_step_only: bool = False
    neutral: str | None = None
    is_eval: bool = False
    tokenize_row: Callable[..., dict[str, list[int]]] = tokenize_solution
    name, unit = "solutions", "steps"
    does, swapped, lacks = "tells right from wrong", "the labels", "no finite reward, or no label"
    too_long = "solutions"
    columns = ("input_ids", "labels")
    token_columns = ("input_ids",)
    scored_columns = {"completions": ("step_rewards", "tokens")}
    compares_with_zero = is_one_sequence = weighs_comparisons = has_own_tokens = True

    def of(self, args: Any, **of_solutions: Any) -> Self:
        """Return the kind with the settings of a `PRMConfig`; ``of_solutions`` are further fields."""
        settings = {name: getattr(args, name) for name in _SETTINGS}
        return replace(self, **settings, neutral=args.neutral_steps, **of_solutions)

    def labels_as(self, args: Any) -> str | None:
        return _NEUTRAL_IS_WRONG if args.neutral_steps == "wrong" else None

    def rewards_of(self, scores_SA: torch.Tensor) -> torch.Tensor:
        """Return the log-odds that each step is right, from the logits of both labels."""
        return scores_SA[:, 1:] - scores_SA[:, :1]

    # ---- raw rows

    def is_raw(self, row: Row) -> bool:
        return True  # of these rows, no other kind is accepted

    def is_tokenized(self, row: Row) -> bool:
        # next to token ids, a column `completions` without a label for each step belongs to the user
        steps = row.get("completions") or ()
        return "input_ids" in row and not ("completions" in row and is_label_list(row.get("labels"), len(steps)))

    def features(self, dataset: Any) -> Features:
        """Return the types of the prepared columns. Without them, labels would stay bools."""
        labels_N = [labels or [] for labels in (dataset["labels"] if "labels" in dataset.column_names else ())]
        is_soft = any(isinstance(label, float) and label % 1 for labels in labels_N for label in labels)
        labels = ListOf(Value("float64" if is_soft else "int64"))
        return Features({"input_ids": ListOf(Value("int64")), "labels": labels, TRAPS: Value("string")})

    def tokenize(
        self, rows_N: Sequence[Row], places: Sequence[str], tokenizer: PreTrainedTokenizerBase
    ) -> list[tuple[dict[str, Any], list[str]]]:
        prepared = []
        for row, where in zip(rows_N, places, strict=True):
            tokens = self.tokens_of(row, where, tokenizer)
            traps = find_traps(row, row["completions"][:1] or [""], [tokens["input_ids"]], tokenizer)
            scored = [label for label in row["labels"] if label != NEUTRAL or self.neutral != "ignore"]
            most = 1 if self.train_on_last_step_only and not self.is_eval else len(scored)
            traps += ["truncation labels"] * (len(self.labels(tokens)[STEP_ENDS]) < min(most, len(scored)))
            prepared.append((tokens, traps))
        return prepared

    def tokens_of(self, row: Row, where: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[int]]:
        """Check and tokenize a raw row.

        Raises:
            UserError: The row is bad. The message begins with ``where``.
        """
        prompt, steps, labels = (cast(Any, row.get(name)) for name in ("prompt", "completions", "labels"))
        if not isinstance(steps, list) or not all(isinstance(text, str) for text in (prompt, *steps)):
            raise UserError(f"{where}: `prompt` must be text, and `completions` a list of texts, the steps.")
        checks.check_text([prompt, *steps], where)
        if not is_label_list(labels, len(steps)):
            raise UserError(
                f"{where}: `labels` must have the probability that each of {len(steps)} `completions` is right, 0 to "
                f"1, got {labels!r:.80}."
            )
        if NEUTRAL in labels and self.neutral is None:
            raise UserError(
                f"{where}: `labels` has {NEUTRAL}, for a step that is neither right nor wrong. Set "
                "neutral_steps='ignore' to leave such steps out, or 'wrong' to count them as 0."
            )
        instead = NO_LABEL if self.neutral == "ignore" else 0  # in place of -1
        labels = [instead if label == NEUTRAL else label for label in labels]
        settings = {name: getattr(self, name) for name in _SETTINGS}
        return self.tokenize_row({**row, "labels": labels}, tokenizer=tokenizer, is_eval=self.is_eval, **settings)

    def sequences_to_score(self, row: Row, where: str, tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
        """Return the token ids from the prompt to the end of each step of a raw row, which needs no labels.

        Raises:
            UserError: The row is bad. The message begins with ``where``.
        """
        tokens = self.tokens_of({**row, "labels": [0] * len(row.get("completions") or ())}, where, tokenizer)
        ids = np.asarray(tokens["input_ids"], np.int32)
        return [ids[: end + 1] for end in self.labels(tokens)[STEP_ENDS]]

    # ---- prepared rows

    def labels(self, row: Row) -> dict[str, Any]:
        """Return the indices of the tokens at which labeled steps end, and the labels of these steps."""
        ends = np.flatnonzero(np.asarray(row["labels"]) != NO_LABEL).tolist()
        return {STEP_ENDS: ends, "grades": [float(row["labels"][end]) for end in ends]}

    def check_labels(self, row: Row, where: str) -> None:
        labels = np.asarray(row["labels"])
        if labels.shape != (len(row["input_ids"]),) or not all((labels == NO_LABEL) | ((labels >= 0) & (labels <= 1))):
            raise UserError(f"{where}: `labels` must be as long as `input_ids`, each from 0 to 1, or {NO_LABEL}.")

    def check_prepared(self, prepared: Any, name: str) -> None:
        if any((np.asarray(labels) != NO_LABEL).any() for labels in prepared["labels"]):
            return
        problem = f"The {name} dataset has no label left, so nothing can be learned or measured. Raise `max_length`."
        if not self.is_eval:
            raise UserError(problem)
        logger.warning(problem)

    # ---- comparisons

    def compared(self, grade_GK: np.ndarray, learns_ties: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Compare each labeled step with the constant 0."""
        steps = grade_GK.shape[1]
        return np.arange(steps), np.full(steps, -1), grade_GK

    # ---- predictions

    def predictions(self, rewards: torch.Tensor, grade: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits of both labels [N, K, 2], always 0 for label 0, and labels [N, K], -100 for missing steps."""
        logits_NK2 = torch.stack([torch.zeros_like(rewards), rewards], dim=-1)
        return logits_NK2, torch.where(grade.isnan(), NO_LABEL, grade.nan_to_num())

    def label_ids(self, labels: np.ndarray) -> np.ndarray:
        """Return integers, as in TRL, unless a label is a probability."""
        return labels.astype(np.int64) if (labels == labels.round()).all() else labels

    # ---- scored rows

    def from_scored(self, row: Row) -> Iterator[ScoredItem]:
        """Yield each labeled step, with the solution up to it."""
        rewards, labels, steps = row.get("step_rewards"), row.get("labels"), row.get("completions") or []
        if not isinstance(rewards, list) or not isinstance(labels, list) or not is_label_list(labels, len(rewards)):
            yield row, [float("nan")], [1.0]  # nan: the verdict counts the row as left out
            return
        counts_neutral = row.get(LABELS_AS) == _NEUTRAL_IS_WRONG
        numbers = numbers_in(rewards) if rewards else []
        for end, (label, reward) in enumerate(zip(labels, numbers, strict=True), start=1):
            if label != NEUTRAL or counts_neutral:
                yield {**row, "completions": steps[:end], "reward": reward}, [reward], [max(float(label), 0.0)]


def is_label_list(labels: Any, steps: int) -> bool:
    """Check for a list with one label per step: the probability that the step is right (0 to 1), or -1 for neutral."""
    if not isinstance(labels, list) or len(labels) != steps:
        return False
    return all(isinstance(label, bool | int | float) and (0 <= label <= 1 or label == NEUTRAL) for label in labels)
