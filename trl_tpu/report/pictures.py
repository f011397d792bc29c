"""The verdict as pictures: margins, calibration, length, groups; several verdicts are in the same axes."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..evaluation.best_of_n import BestOfN
from ..evaluation.proportion import Proportion
from ..evaluation.verdict import Verdict
from .canvas import DASHES, GRAY, MARKERS, Picture, color, shortened
from .scored_rows import ScoredRows

_MOST_POINTS = 1500
_MOST_GROUPS = 40


def pictures_of(judged: Mapping[str, Verdict | BestOfN], scored: Sequence[ScoredRows] = ()) -> list[Picture]:
    """Return the pictures that can be drawn of verdicts, by name, and of the rows that some are on."""
    verdicts = {name: each for name, each in judged.items() if isinstance(each, Verdict)}
    pictures = []
    if verdicts:
        pictures += [margins(verdicts), reliability(verdicts)]
    by_length = {
        name: each for name, each in verdicts.items() if each.length is not None and each.length.says_something
    }
    if by_length:
        pictures.append(accuracy_by_length(by_length))
    with_lengths = [each for each in scored if (lengths_M := each.finite[1]) is not None and len(set(lengths_M)) > 1]
    if with_lengths:
        pictures.append(reward_by_length(with_lengths))
    grouped = {name: each.groups for name, each in judged.items() if each.groups}
    if grouped:
        pictures.append(accuracy_by_group(grouped))
    return pictures


def margins(verdicts: Mapping[str, Verdict]) -> Picture:
    """Draw how margins are distributed; of a single verdict the wrong pairs are hatched."""

    def draw(axes: Any) -> None:
        for index, (name, verdict) in enumerate(verdicts.items()):
            edges, counts = np.array(verdict.margins.edges), np.array(verdict.margins.counts)
            if len(verdicts) > 1:
                density = counts / counts.sum() / np.diff(edges)
                look = {"color": color(index), "linestyle": DASHES[index % len(DASHES)], "linewidth": 1.8}
                axes.stairs(density, edges, label=shortened(name), **look)
                continue
            is_wrong_B = edges[:-1] < 0
            wrong, right = np.where(is_wrong_B, counts, 0), np.where(is_wrong_B, 0, counts)
            axes.stairs(wrong, edges, label="wrong", color=color(1), hatch="///")
            axes.stairs(right, edges, label="right, or a tie", color=color(0), fill=True, alpha=0.85)
        axes.axvline(0, color=GRAY, linewidth=1)
        axes.set(
            xlabel="chosen less rejected reward", ylabel="pairs" if len(verdicts) == 1 else "share of pairs per unit"
        )

    words = "How many pairs have which margin. Right of 0 the chosen answer has the higher reward."
    return Picture("margins", "Margins", words, draw)


def reliability(verdicts: Mapping[str, Verdict]) -> Picture:
    """Draw the share of right picks over the confidence in them."""

    def draw(axes: Any) -> None:
        axes.plot([0.5, 1], [0.5, 1], color=GRAY, linestyle=":", label="calibrated")
        for index, (name, verdict) in enumerate(verdicts.items()):
            bins = verdict.calibration.bins
            label = f"{shortened(name)}: ECE {verdict.calibration.ece:.3f}"
            look = {"color": color(index), "linestyle": DASHES[index % len(DASHES)], "label": label}
            at = [each.confidence for each in bins]
            axes.plot(at, [each.accuracy for each in bins], **look)
            size = [20 + 180 * each.count / verdict.pairs for each in bins]
            marker = MARKERS[index % len(MARKERS)]
            axes.scatter(at, [each.accuracy for each in bins], s=size, color=color(index), marker=marker)
        axes.set(xlim=(0.49, 1.01), ylim=(-0.03, 1.05), xlabel="confidence, sigmoid(|margin|)", ylabel="right")

    words = (
        "Of the pairs in which the model is so sure, the share in which it is right; larger marks stand for more "
        "pairs. Below the dotted line it is too sure."
    )
    return Picture("reliability", "Is it as right as it is sure?", words, draw)


def accuracy_by_length(verdicts: Mapping[str, Verdict]) -> Picture:
    """Draw accuracy over the difference in length, with intervals, and what length alone reaches."""
    units = {each.length.unit for each in verdicts.values() if each.length is not None}

    def draw(axes: Any) -> None:
        for index, (name, verdict) in enumerate(verdicts.items()):
            if verdict.length is None:
                continue
            at = [each.middle for each in verdict.length.bins]
            shares = [each.accuracy for each in verdict.length.bins]
            _with_intervals(axes, at, shares, index, shortened(name))
            axes.axhline(
                verdict.length.length_only, color=color(index), linestyle=":", label=f"{shortened(name)}: length alone"
            )
        axes.axvline(0, color=GRAY, linewidth=1)
        largest = max(abs(end) for end in axes.get_xlim())
        axes.set(ylim=(-0.03, 1.03), xlim=(-largest, largest), ylabel="accuracy")
        axes.set_xlabel(f"chosen less rejected {' or '.join(sorted(units))}")

    words = (
        "Accuracy among the pairs with that difference in length, with intervals of 95 %. A model that favors long "
        "answers rises to the right. The dotted line is the accuracy of preferring the longer answer, or the shorter "
        "one, without reading it."
    )
    return Picture("accuracy_by_length", "Accuracy by difference in length", words, draw)


def reward_by_length(scored: Sequence[ScoredRows]) -> Picture:
    """Draw rewards over lengths: each answer of a single file, and for each file the medians by length."""
    units = sorted({each.unit for each in scored})

    def draw(axes: Any) -> None:
        for index, each in enumerate(scored):
            reward_M, lengths_M, chosen_M = each.finite
            assert lengths_M is not None
            if len(scored) == 1:
                some = np.random.default_rng(0).permutation(len(reward_M))[:_MOST_POINTS]
                is_pair = bool(len(chosen_M)) and not chosen_M.all()
                for chosen, label in ((True, "chosen" if is_pair else "answers"), (False, "rejected")):
                    own = some[chosen_M[some] == chosen]
                    look: dict[str, Any] = {"marker": "o" if chosen else "x", "color": color(0 if chosen else 1)}
                    if len(own):
                        axes.scatter(
                            lengths_M[own], reward_M[own], s=12, alpha=0.45, label=label, linewidths=0.8, **look
                        )
            at, medians = _medians(lengths_M, reward_M)
            look = {"color": color(2 if len(scored) == 1 else index), "linestyle": DASHES[index % len(DASHES)]}
            label = "median" if len(scored) == 1 else f"{shortened(each.name)}: median"
            axes.plot(at, medians, marker=MARKERS[index % len(MARKERS)], label=label, **look)
        axes.set(xlabel=f"{' or '.join(units)} of the answer", ylabel="reward")

    of_marks = "Each mark is an answer." if len(scored) == 1 else "Each mark is the median of a tenth of the answers."
    words = f"{of_marks} Where the median rises, longer answers get higher rewards."
    return Picture("reward_by_length", "Reward against length", words, draw)


def _medians(lengths_M: np.ndarray, reward_M: np.ndarray) -> tuple[list[float], list[float]]:
    """Return the median length and reward of each tenth of the answers, by length."""
    parts = [part for part in np.array_split(np.argsort(lengths_M, kind="stable"), 10) if len(part)]
    return [float(np.median(lengths_M[part])) for part in parts], [float(np.median(reward_M[part])) for part in parts]


def accuracy_by_group(groups_of: Mapping[str, Mapping[str, Proportion]]) -> Picture:
    """Draw the accuracy of each group, with intervals; the largest groups, where there are many."""
    sizes: dict[str, int] = {}
    for groups in groups_of.values():
        for group, share in groups.items():
            sizes[group] = max(sizes.get(group, 0), share.count)
    largest = sorted(sizes, key=lambda group: -sizes[group])[:_MOST_GROUPS]
    shown = sorted(largest, reverse=True)

    def draw(axes: Any) -> None:
        for index, (name, groups) in enumerate(groups_of.items()):
            own = [(place, groups[group]) for place, group in enumerate(shown) if group in groups]
            at = [place - 0.6 * (index / len(groups_of) - (1 - 1 / len(groups_of)) / 2) for place, _ in own]
            _with_intervals(axes, at, [share for _, share in own], index, shortened(name), across=True)
        axes.axvline(0.5, color=GRAY, linewidth=1)
        axes.set_yticks(range(len(shown)), [shortened(group, 22) for group in shown])
        axes.set(xlim=(-0.02, 1.02), ylim=(-0.6, len(shown) - 0.4), xlabel="accuracy")

    more = f" The {_MOST_GROUPS} largest of {len(sizes)} groups." if len(sizes) > _MOST_GROUPS else ""
    words = f"Accuracy of each group, with intervals of 95 %.{more}"
    height = 1.6 + len(shown) * max(0.3, 0.22 * len(groups_of))
    return Picture("accuracy_by_group", "Accuracy by group", words, draw, height)


def _with_intervals(
    axes: Any, at: Sequence[float], shares: Sequence[Proportion], index: int, label: str, across: bool = False
) -> None:
    """Draw marks with intervals, where they have any."""
    values = np.array([each.value for each in shares])
    errors = np.nan_to_num([[each.value - each.low, each.high - each.value] for each in shares]).T.reshape(2, -1)
    look = {"color": color(index), "marker": MARKERS[index % len(MARKERS)], "linestyle": "none", "capsize": 3}
    if across:
        axes.errorbar(values, at, xerr=errors, label=label, **look)
    else:
        axes.errorbar(at, values, yerr=errors, label=label, **look)
