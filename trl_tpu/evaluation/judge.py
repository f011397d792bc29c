"""The verdict on an evaluation: its rewards, with what the data says of each pair, on the host."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset

from ..data.judgements import labels_of, with_grades
from ..data.measure import NO_LABEL, flat, has_steps, id_columns, measure, most_answers, tables_of
from ..errors import UserError
from .proportion import check_groups, label_of
from .ranking import judge_rankings, steps_compared
from .reward_sums import sums_on_host
from .verdict import NothingCompared, Verdict, judge_pairs

logger = logging.getLogger(__name__)


def judge(
    rewards: torch.Tensor, labels: Mapping[str, torch.Tensor], dataset: Any, eval_by: str | None, names: Sequence[str]
) -> Verdict | None:
    """Return the verdict on the rewards of an evaluation; None, with a warning, if nothing can be compared.

    Args:
        rewards: Of pairs, chosen first, of ranked answers or of steps, [N, K]; of several attributes, [N, A, K].
        labels: What the data says of these, see `trl_tpu.data.judgements`.
        dataset: Whose first N pairs they are of, in order; None where that is not known.
        eval_by: Its column of labels; without one of that name, or with too many labels, no groups are compared.
        names: Of attributes. Each of a row is a ranking of its own, and they are the groups.
    """
    if not len(rewards):
        return None
    try:
        if "step" in labels:
            return judge_pairs(steps_compared(rewards, labels), of="steps")
        labels, copies = with_grades(labels), rewards[0].numel() // rewards.shape[-1]
        groups, lengths_NK = list(names) * len(rewards) or None, None
        if not isinstance(dataset, Dataset):
            if eval_by is not None:
                logger.warning("eval_by=%r is left out: it is not known which row each reward is of.", eval_by)
        else:
            if id_columns(dataset.column_names) is not None:
                lengths = measure(dataset).lengths
                lengths_NK = (lengths.prefix_P[:, None] + lengths.tails_PK)[: len(rewards)].repeat(copies, axis=0)
            try:
                if eval_by is not None:
                    groups = [label for label in _labels(dataset, eval_by)[: len(rewards)] for _ in range(copies)]
                    check_groups(groups)
            except UserError as reason:  # the data of a later call; what the trainer was given has been checked
                logger.warning("The metrics are without groups. %s", reason)
                groups = None
        given = [rewards.double(), *(labels[name] for name in ("grade", "is_there") if name in labels)]
        arrays: Any = [values.numpy().reshape(-1, values.shape[-1]) for values in given]
        judge_rows: Any = judge_rankings if "grade" in labels else judge_pairs
        verdict: Verdict = judge_rows(*arrays, lengths_NK, groups)
    except NothingCompared:
        logger.warning(
            "The evaluation has no accuracy: no row has finite rewards of two answers of which one is labeled as "
            "better, or of a labeled step."
        )
        return None
    # of two answers, these say what the accuracy says
    return replace(verdict, top1_accuracy=None, kendall_tau=None) if "chosen_probability" in labels else verdict


def _labels(dataset: Dataset, column: str) -> list[str]:
    """Return the label of each row.

    Raises:
        UserError: There is no such column.
    """
    if column not in dataset.column_names:
        raise UserError(
            f"eval_by={column!r} names no column of the evaluation data, whose columns are "
            f"{', '.join(dataset.column_names)}. Name one of them, or leave it out."
        )
    return [label_of(value) for value in dataset[column]]


def check_eval_by(args: Any, eval_dataset: Any) -> None:
    """Raise UserError where evaluation is to tell groups apart that the data does not have, or has too many of."""
    if args.eval_by is None or eval_dataset is None:
        return
    if args.train_sampling_strategy == "group_by_length":
        raise UserError(
            "eval_by needs pairs in the order of the evaluation data, which train_sampling_strategy='group_by_length' "
            "changes. Leave one of them out: packed rows have no padding."
        )
    for dataset in eval_dataset.values() if isinstance(eval_dataset, Mapping) else [eval_dataset]:
        if not isinstance(dataset, Dataset):
            raise UserError(
                f"eval_by={args.eval_by!r} needs evaluation data with a length, not a stream. Leave it out."
            )
        check_groups(_labels(dataset, args.eval_by))


def check_best_metric(args: Any, eval_dataset: Any) -> None:
    """Raise UserError where `metric_for_best_model` is not measured: transformers would find out hours later.

    Args:
        eval_dataset: Prepared data, or a mapping of several.
    """
    asked = args.metric_for_best_model
    if asked is None or args.eval_strategy == "no" or eval_dataset is None:
        return
    sets = eval_dataset if isinstance(eval_dataset, Mapping) else {"": eval_dataset}
    known = [f"{name}_{each}" if name else each for name in sets for each in _metrics_of(args, sets[name])]
    if asked.removeprefix("eval_") not in known:
        raise UserError(
            f"metric_for_best_model={asked!r} is not measured in evaluation, which measures {', '.join(known)}. "
            "Choose one of them, or give a compute_metrics that returns it."
        )


def _metrics_of(args: Any, dataset: Any) -> list[str]:
    """Name what an evaluation measures on prepared data, as found by measuring rewards that are all equal."""
    rewards, labels = torch.zeros(1, 2), dict[str, torch.Tensor]()
    if has_steps(dataset):
        labeled = any((flat(table["labels"])[0] != NO_LABEL).any() for table in tables_of(dataset, ["labels"]))
        labels = {"step": torch.ones(1, 2), "is_there": torch.full((1, 2), bool(labeled))}
    elif isinstance(dataset, Dataset):
        most = (args.max_eval_steps or len(dataset)) * args.eval_batch_size * args.world_size
        rows = dataset.select(range(min(most, len(dataset))))
        if columns := [name for name in ("grades", "chosen_probability") if name in dataset.column_names]:
            arrays = labels_of(rows.select_columns(columns).to_list(), most_answers(dataset))
            labels = {name: torch.from_numpy(values) for name, values in arrays.items()}
        rewards = torch.zeros_like(labels["grade"]) if "grade" in labels else torch.zeros(len(rows), 2)
        dataset = None if args.train_sampling_strategy == "group_by_length" else dataset
    verdict = judge(rewards, labels, dataset, args.eval_by, args.attributes or ())
    measured = [*sums_on_host(rewards, labels, [1.0] * len(args.attributes or ())).metrics()]
    measured += [] if verdict is None else [*verdict.metrics()]
    counted = ["pairs"] if args.max_eval_steps is not None else []
    return ["loss", "num_tokens", *measured, *counted, "runtime", "samples_per_second", "steps_per_second"]
