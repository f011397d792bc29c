"""The verdict's four pictures and that of training, by matplotlib; several verdicts, or runs, are in the same axes."""

import io
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..evaluation.best_of_n import BestOfN
from ..evaluation.length_bias import LengthBias
from ..evaluation.proportion import Proportion
from ..evaluation.verdict import Verdict
from .run_history import RunHistory
from .tables import printable

logger = logging.getLogger(__name__)

_NO_MATPLOTLIB = "There are no pictures, since matplotlib is not installed: `pip install matplotlib` brings them."
#: Curves of training, in this order; then what else was logged.
_CURVES = ("loss", "accuracy", "margin", "learning_rate", "grad_norm")


@dataclass(frozen=True)
class Picture:
    """A picture as the bytes of a PNG file."""

    title: str
    png: bytes

    @property
    def name(self) -> str:
        """The name of its file, less the ending."""
        return self.title.lower().replace(" ", "_")


def why_none() -> str:
    """Return why there are no pictures, and how to get them; nothing where matplotlib is installed."""
    return "" if find_spec("matplotlib") is not None else _NO_MATPLOTLIB


def pictures_of(verdicts: Mapping[str, Verdict | BestOfN], runs: Sequence[RunHistory] = ()) -> list[Picture]:
    """Return the pictures that can be drawn of verdicts, by name, and of training; none without matplotlib."""
    if reason := why_none():
        logger.warning(reason)
        return []
    of_pairs = {name: each for name, each in verdicts.items() if isinstance(each, Verdict)}
    lengths = {name: each.length for name, each in of_pairs.items() if each.length and each.length.says_something}
    groups = {name: each.groups for name, each in verdicts.items() if each.groups}
    height = 3.0 + 0.2 * max(map(len, groups.values()), default=0)
    drawn: list[tuple[str, Mapping[str, Any], Callable[[Any, str, str, Any], None], float]] = [
        ("Margins", of_pairs, _margins, 4.0),
        ("Reliability", of_pairs, _reliability, 4.0),
        ("Accuracy by length", lengths, _accuracy_by_length, 4.0),
        ("Accuracy by group", groups, _accuracy_by_group, height),
    ]
    made = [_picture(title, partial(_beside, named, draw), height) for title, named, draw, height in drawn if named]
    curves = _curves(runs)
    return [*made, *([_training(runs, curves)] if curves else [])]


def _picture(title: str, draw: Callable[[Any], None], height: float) -> Picture:
    from matplotlib import rc_context  # takes a second
    from matplotlib.figure import Figure

    written = io.BytesIO()
    with rc_context({"text.parse_math": False}):  # names come from the data
        figure = Figure(figsize=(7.0, height), layout="constrained")
        draw(figure)
        figure.savefig(written, format="png", dpi=150)
    return Picture(title, written.getvalue())


def _beside(named: Mapping[str, Any], draw: Callable[[Any, str, str, Any], None], figure: Any) -> None:
    """Draw several things into the same axes, each in a color of its own."""
    axes = figure.subplots()
    for index, (name, each) in enumerate(named.items()):
        draw(axes, f"C{index}", _short(name), each)
    figure.legend(loc="outside lower center")


def _short(name: str) -> str:
    return printable(name)[-28:]


def _margins(axes: Any, color: str, label: str, verdict: Verdict) -> None:
    edges = np.array(verdict.margins.edges)
    density = np.array(verdict.margins.counts) / sum(verdict.margins.counts) / np.diff(edges)
    axes.stairs(density, edges, color=color, label=label)
    axes.axvline(0, color="gray")
    axes.set(xlabel="chosen less rejected reward", ylabel="share of pairs per unit")


def _reliability(axes: Any, color: str, label: str, verdict: Verdict) -> None:
    bins = verdict.calibration.bins
    confidence, right = [each.confidence for each in bins], [each.accuracy for each in bins]
    axes.plot([0.5, 1], [0.5, 1], ":", color="gray")
    axes.plot(confidence, right, color=color, label=f"{label}: ECE {verdict.calibration.ece:.3f}")
    axes.scatter(
        confidence, right, s=[200 * each.count / sum(one.count for one in bins) for each in bins], color=color
    )
    axes.set(xlabel="confidence, sigmoid(|margin|)", ylabel="right")


def _accuracy_by_length(axes: Any, color: str, label: str, length: LengthBias) -> None:
    middles, shares = [each.middle for each in length.bins], [each.accuracy for each in length.bins]
    axes.errorbar(middles, [each.value for each in shares], yerr=_errors(shares), fmt="o", color=color, label=label)
    axes.axhline(length.length_only, linestyle=":", color=color)
    axes.set(xlabel="chosen less rejected tokens", ylabel="accuracy")


def _accuracy_by_group(axes: Any, color: str, label: str, groups: Mapping[str, Proportion]) -> None:
    names, shares = [_short(name) for name in groups], list(groups.values())
    values = [each.value for each in shares]
    axes.errorbar(values, names, xerr=_errors(shares), fmt="o", capsize=4, alpha=0.6, color=color, label=label)
    axes.set(xlabel="accuracy")


def _errors(shares: Sequence[Proportion]) -> np.ndarray:
    """Return how far below and above each share chance may have it [2, N]; 0 where that is not known."""
    return np.nan_to_num([[each.value - each.low, each.high - each.value] for each in shares]).T


def _curves(runs: Sequence[RunHistory]) -> list[str]:
    """Return the names of what any run has logged over the steps, in the order in which they are drawn."""
    names = [*_CURVES, *sorted({name for run in runs for name in run.curves} - {*_CURVES})]
    return [name for name in names if any(run.series(name)[0] or run.evaluated(name) for run in runs)]


def _training(runs: Sequence[RunHistory], shown: Sequence[str]) -> Picture:
    """Draw each number that training has logged over the steps, with those of evaluations and the resumes."""
    rows = -(-len(shown) // 2)

    def draw(figure: Any) -> None:
        several = figure.subplots(rows, 2, squeeze=False).ravel()
        for axes, metric in zip(several, shown, strict=False):
            axes.set(title=metric, xlabel="step")
            for index, run in enumerate(runs):
                name = _short(run.name)
                axes.plot(*run.series(metric), ".-", color=f"C{index}", label=name)
                for number, (dataset, series) in enumerate(run.evaluated(metric).items(), start=1):
                    label = f"{name}: evaluation {_short(dataset)}"
                    axes.plot(*series, "s--", color=f"C{index + number * len(runs)}", label=label)
                for step in run.resumed_at:
                    axes.axvline(step, linestyle=":", color=f"C{index}", label=f"{name}: resumed")
        for axes in several[len(shown) :]:  # a last one by itself has no neighbor
            axes.set_axis_off()
        named = {
            label: line for axes in several for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=2)

    return _picture("Training", draw, 1.0 + 2.0 * rows)
