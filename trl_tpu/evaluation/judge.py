"""The verdict on an evaluation: its rewards, with what the data says of each pair, on the host."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from ..data.comparisons import Labels
from ..data.measure import is_prepared, measure, read_row
from ..errors import UserError
from .proportion import check_groups, label_of
from .ranking import judge_rankings
from .reward_sums import pairs_of, sums_on_host
from .verdict import NothingCompared, Verdict, judge_pairs

logger = logging.getLogger(__name__)


def judge(
    rewards_NAK: torch.Tensor, labels: Labels, dataset: Any, eval_by: str | None, names: Sequence[str]
) -> Verdict | None:
    """Return the verdict on the rewards of an evaluation; None, with a warning, if nothing can be compared.

    Args:
        rewards_NAK: Of the answers or steps of N rows.
        labels: Of these rows.
        dataset: Whose first N rows they are of, in order; None where that is not known.
        eval_by: Its column of labels; without one of that name, or with too many labels, no groups are compared.
        names: Of attributes. Each of a row is a ranking of its own, and they are the groups.
    """
    if not len(rewards_NAK):
        return None
    rows, attributes, answers = rewards_NAK.shape
    rewards_NK, grade_NK = (each.reshape(-1, answers) for each in (rewards_NAK.double().numpy(), labels.grade_PAK))
    groups, lengths_NK = list(names) * rows or None, None
    try:
        if labels.has_baseline:
            with_0 = np.stack([rewards_NK, 0 * rewards_NK], axis=-1)
            ordered = np.where((grade_NK > 0.5)[..., None], with_0, with_0[..., ::-1])
            return judge_pairs(ordered[~np.isnan(grade_NK) & (grade_NK != 0.5)], of="steps")
        if not isinstance(dataset, Dataset):
            if eval_by is not None:
                logger.warning("eval_by=%r is left out: it is not known which row each reward is of.", eval_by)
        else:
            if is_prepared(dataset):
                lengths = measure(dataset).lengths
                lengths_NK = (lengths.prefix_P[:, None] + lengths.tails_PK)[:rows].repeat(attributes, axis=0)
            try:
                if eval_by is not None:
                    groups = [label for label in _labels(dataset, eval_by)[:rows] for _ in range(attributes)]
                    check_groups(groups)
            except UserError as reason:  # the data of a later call; what the trainer was given has been checked
                logger.warning("The metrics are without groups. %s", reason)
                groups = None
        if labels.are_rankings:
            return judge_rankings(rewards_NK, grade_NK, lengths_NK, groups)
        if (grade_NK[:, 0] == 1).all():
            return judge_pairs(rewards_NK, lengths_NK, groups)
        # by the more probable answer; of two answers the last two measures say what the accuracy says
        verdict = judge_rankings(rewards_NK, grade_NK, lengths_NK, groups)
        return replace(verdict, top1_accuracy=None, kendall_tau=None)
    except NothingCompared:
        logger.warning(
            "The evaluation has no accuracy: no row has finite rewards of two answers of which one is labeled as "
            "better, or of a labeled step."
        )
        return None


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
    labels = pairs_of(1)
    if is_prepared(dataset):
        most = (args.max_eval_steps or len(dataset)) * args.eval_batch_size * args.world_size
        rows = map(read_row, dataset.select(range(min(most, len(dataset)))))
        labels = Labels.of(list(rows), measure(dataset).answers, len(args.attributes or ()))
        dataset = None if args.train_sampling_strategy == "group_by_length" else dataset
    rewards_NAK = torch.zeros(labels.grade_PAK.shape)
    verdict = judge(rewards_NAK, labels, dataset, args.eval_by, args.attributes or ())
    measured = [*sums_on_host(rewards_NAK, labels, [1.0] * len(args.attributes or ())).metrics()]
    measured += [] if verdict is None else [*verdict.metrics()]
    counted = ["pairs"] if args.max_eval_steps is not None else []
    return ["loss", "num_tokens", *measured, *counted, "runtime", "samples_per_second", "steps_per_second"]
