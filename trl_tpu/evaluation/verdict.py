"""A verdict on a reward model: accuracy with its interval, calibration, length bias, best of N; its JSON file."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, Self, TypeAlias, get_args, get_origin, get_type_hints

import numpy as np

from ..errors import explaining

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_HISTOGRAM_BINS = 40
_CONFIDENCE_BINS = 10
_Z = NormalDist().inv_cdf(0.975)  # for 95 % intervals


@dataclass(frozen=True)
class Proportion:
    """The share ``value`` of ``count`` items, with its 95 % confidence interval from ``low`` to ``high``."""

    value: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, right_N: np.ndarray, weights_N: np.ndarray, units_2N: np.ndarray) -> "Proportion":
        """Return the weighted share of right items, with an interval for items that are not independent.

        Items of one prompt are right or wrong together more often than others. The variance of the share over prompts
        (Liang and Zeger 1986, with the factor G / (G - 1) for G prompts as in Cameron and Miller 2015, "A
        Practitioner's Guide to Cluster-Robust Inference"), divided by its variance over rows, is the design effect.
        Wilson's interval for the number of items divided by it is the interval for clustered data of Korn and Graubard
        (1998) and Franco et al. (2019). The effect is at least 1, and exactly 1 if every row has another prompt. If
        the variance over prompts cannot be estimated (a single prompt, or only right or only wrong items), a prompt
        counts as one item.

        Args:
            right_N: Whether each item is right, or how far, 0 to 1.
            weights_N: Weight of each item.
            units_2N: Number of each item's row, and of its prompt.
        """
        right, total = float(right_N @ weights_N), float(weights_N.sum())
        row_N, prompt_N = (np.unique(number_N, return_inverse=True)[1] for number_N in units_2N)
        if (prompts := prompt_N.max() + 1) == (rows := row_N.max() + 1):
            return proportion(right, total)
        off_N = weights_N * (right_N - right / total)
        is_known = prompts > 1 and np.abs(off_N).max() > 1e-9
        values_N, correction = (off_N, prompts / (prompts - 1) / (rows / (rows - 1))) if is_known else (weights_N, 1.0)
        over_rows, over_prompts = ((np.bincount(unit_N, values_N) ** 2).sum() for unit_N in (row_N, prompt_N))
        return proportion(right, total, max(correction * over_prompts / over_rows, 1.0))


def proportion(right: float, count: float, design_effect: float = 1.0) -> Proportion:
    """Return the share ``right / count`` with its 95 % confidence interval, by Wilson's score method.

    The formula is from Wilson (1927), "Probable Inference, the Law of Succession, and Statistical Inference".
    ``right`` may be fractional if answers are partly right; the interval is then slightly too wide. ``count`` may be
    fractional if only some of a row's comparisons are counted, since all comparisons of a row count as one item.
    ``design_effect`` is the number of dependent items with the information of one independent item: see
    `Proportion.of`.
    """
    value, items = min(right / count, 1.0), count / design_effect  # sums of weights may round to more than all
    middle = (value + _Z**2 / (2 * items)) / (1 + _Z**2 / items)
    half = _Z / (1 + _Z**2 / items) * (value * (1 - value) / items + _Z**2 / (4 * items**2)) ** 0.5
    # near 0 and 1, rounding could put the value itself outside of the interval
    low, high = max(min(middle - half, value), 0.0), min(max(middle + half, value), 1.0)
    return Proportion(float(value), float(low), float(high), round(count))


@dataclass(frozen=True)
class Distribution:
    """Moments, quantiles and a histogram.

    Attributes:
        quantiles: Quantiles by level, such as ``"0.05"``.
        edges: The B + 1 edges of the histogram's B bins.
        counts: Total weight of the values in each bin. The last bin includes its upper edge.
    """

    mean: float
    std: float
    lowest: float
    highest: float
    quantiles: dict[str, float]
    edges: tuple[float, ...]
    counts: tuple[float, ...]

    @classmethod
    def of(cls, values_N: np.ndarray, weights_N: np.ndarray) -> Self:
        """Return the weighted distribution of finite values, [N] with N > 0.

        All bins of the histogram have the same width, and 0 is an edge: no bin mixes positive and negative margins.
        """
        most = largest if (largest := float(np.abs(values_N).max())) > 1e-300 else 1.0  # bin width must not be 0
        counts, edges = np.histogram(values_N, bins=_HISTOGRAM_BINS, range=(-most, most), weights=weights_N)
        mean = float(np.average(values_N, weights=weights_N))
        std = float(np.average((values_N - mean) ** 2, weights=weights_N) ** 0.5)
        lowest, highest = float(values_N.min()), float(values_N.max())
        order_N = np.argsort(values_N)
        sorted_N = weights_N[order_N]
        below_N = np.cumsum(sorted_N) - sorted_N  # for equal weights, this gives numpy's linear quantiles
        quantiles = np.interp(np.array(QUANTILES) * below_N[-1], below_N, values_N[order_N])
        by_level = dict(zip(map(str, QUANTILES), quantiles.tolist(), strict=True))
        return cls(mean, std, lowest, highest, by_level, tuple(edges.tolist()), tuple(counts.tolist()))


@dataclass(frozen=True)
class ConfidenceBin:
    """Pairs with a confidence from ``low`` to ``high``: their ``count``, mean confidence and accuracy."""

    low: float
    high: float
    count: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Calibration:
    """Difference between confidence and accuracy, overall and by confidence.

    Attributes:
        ece: Expected calibration error: the mean over pairs of ``|accuracy - confidence|`` in the pair's bin (Guo et
            al. 2017, "On Calibration of Modern Neural Networks", eq. 3), with ten bins of equal width over [1/2, 1].
            A tie counts as half right.
        brier: Mean of ``(1 - sigmoid(margin))**2``. This is half the score of Brier (1950), since that adds the same
            number for both answers of a pair. A model without any knowledge gets 0.25.
        bins: The bins of the reliability curve, without empty bins.
    """

    ece: float
    brier: float
    bins: tuple[ConfidenceBin, ...]

    @classmethod
    def of(cls, margins_N: np.ndarray, weights_N: np.ndarray) -> Self:
        """Return the weighted calibration of finite margins (chosen minus rejected reward), [N] with N > 0."""
        confidence_N, right_N = 1 / (1 + np.exp(-np.abs(margins_N))), (np.sign(margins_N) + 1) / 2
        edges = np.linspace(0.5, 1.0, _CONFIDENCE_BINS + 1)
        bin_N = np.clip(np.digitize(confidence_N, edges) - 1, 0, _CONFIDENCE_BINS - 1)  # the last bin includes 1
        number_B, place_N, count_B = np.unique(bin_N, return_inverse=True, return_counts=True)
        weight_B = np.bincount(place_N, weights_N)
        confidence_B, right_B = (np.bincount(place_N, x_N * weights_N) / weight_B for x_N in (confidence_N, right_N))
        columns = (edges[number_B], edges[number_B + 1], count_B, confidence_B, right_B)
        bins = zip(*(column.tolist() for column in columns), strict=True)
        ece = np.average(np.abs(right_B - confidence_B), weights=weight_B)
        brier = np.average(np.exp(-2 * np.logaddexp(0.0, margins_N)), weights=weights_N)  # never overflows
        return cls(float(ece), float(brier), tuple(ConfidenceBin(*values) for values in bins))


@dataclass(frozen=True)
class LengthBin:
    """Accuracy among pairs with a length difference, chosen minus rejected tokens, from ``shortest`` to ``longest``.

    The median difference is ``middle``.
    """

    shortest: float
    middle: float
    longest: float
    accuracy: Proportion


@dataclass(frozen=True)
class LengthBias:
    """Accuracy by answer length, and accuracy of rules that read only lengths.

    Attributes:
        longer_wins: Accuracy of always preferring the longer answer; equal lengths count half.
        length_only: Accuracy of always preferring the longer answer, or always the shorter one, whichever is higher.
        controlled: Mean of `chosen_is_longer` and `rejected_is_longer`; None if one of them is None. Any rule that
            reads only lengths gets 1/2. This is the balanced accuracy of Brodersen et al. (2010), with the longer
            answer as the class; applying it to length is our own idea.
        chosen_is_longer: Accuracy among pairs with a longer chosen answer; None without such pairs.
        rejected_is_longer: Accuracy among pairs with a longer rejected answer; None without such pairs.
        bins: Accuracy by length difference, from much longer rejected answers to much longer chosen answers.
    """

    longer_wins: float
    length_only: float
    controlled: float | None
    chosen_is_longer: Proportion | None
    rejected_is_longer: Proportion | None
    bins: tuple[LengthBin, ...]

    @property
    def has_length_differences(self) -> bool:
        """True if any pair has answers of different lengths."""
        return self.chosen_is_longer is not None or self.rejected_is_longer is not None

    @classmethod
    def of(cls, right_N: np.ndarray, longer_N: np.ndarray, weights_N: np.ndarray, units_2N: np.ndarray) -> Self:
        """Return the length bias of N > 0 pairs.

        Args:
            right_N: Whether the chosen answer has the higher reward.
            longer_N: Length difference in tokens: chosen minus rejected answer.
            weights_N: Weight of each pair.
            units_2N: See `Proportion.of`.
        """

        def accuracy(mask_N: np.ndarray) -> Proportion:
            return Proportion.of(right_N[mask_N], weights_N[mask_N], units_2N[:, mask_N])

        bins = []
        for side_N in filter(np.any, (longer_N < 0, longer_N == 0, longer_N > 0)):
            # three bins per side, and one bin for pairs of equal lengths
            edges = np.quantile(longer_N[side_N], (1 / 3, 2 / 3), method="inverted_cdf", weights=weights_N[side_N])
            bin_N = np.searchsorted(edges, longer_N, side="left")  # equal differences go to the same bin
            for number in np.unique(bin_N[side_N]):
                inside_N = side_N & (bin_N == number)
                low, middle, high = (float(end) for end in np.quantile(longer_N[inside_N], (0, 0.5, 1)))
                bins.append(LengthBin(low, middle, high, accuracy(inside_N)))
        longer_wins = float(np.average((np.sign(longer_N) + 1) / 2, weights=weights_N))
        chosen, rejected = (accuracy(side_N) if side_N.any() else None for side_N in (longer_N > 0, longer_N < 0))
        controlled = None if chosen is None or rejected is None else (chosen.value + rejected.value) / 2
        return cls(longer_wins, max(longer_wins, 1 - longer_wins), controlled, chosen, rejected, tuple(bins))


@dataclass(frozen=True)
class Verdict:
    """Evaluation of the rewards of pairs, rankings or steps.

    Attributes:
        pairs: Number of pairs with two finite rewards. For rankings, the number of comparisons; in all means, the
            comparisons of one row together count once.
        left_out: Number of rows with a reward that is not finite.
        accuracy: Share of pairs with a higher reward for the chosen answer; ties count as wrong.
        ties: Number of pairs with equal rewards.
        pairwise_loss: Mean Bradley-Terry loss, ``-log(sigmoid(margin))``. `eval_loss` is another number if training
            minimizes another loss: with target margins, label probabilities or centering.
        margins: Distribution of chosen minus rejected rewards.
        rewards: Distribution of the rewards of all answers, or of steps.
        length: Length bias; None if lengths are unknown.
        groups: Accuracy by group, sorted by label.
        mean_over_groups: Mean accuracy over groups, with equal weights; None without groups.
        worst: Indices of the rows with the most wrong margins, worst first. Rows with positive margins are never
            listed.
        top1_accuracy: For rankings, how often the highest reward belongs to an answer with the highest grade. If
            several answers have the highest reward, the share of best-graded answers among them counts.
        kendall_tau: For rankings, the mean over rows.
        of: Unit of the evaluation: "pairs"; or "answers" or "steps", each compared with 0.
        prompts_in_training: Number of evaluation prompts that are also in the training data, and number of evaluation
            prompts; empty if unknown.
        prompts: Number of different prompts of the evaluated rows. Intervals allow for pairs that share one. None if
            no prompt is known; all pairs then count as independent.
    """

    pairs: int
    left_out: int
    accuracy: Proportion
    ties: int
    pairwise_loss: float
    margins: Distribution
    rewards: Distribution
    calibration: Calibration
    length: LengthBias | None
    groups: dict[str, Proportion]
    mean_over_groups: float | None
    worst: tuple[int, ...]
    top1_accuracy: Proportion | None = None
    kendall_tau: float | None = None
    of: str = "pairs"
    prompts_in_training: tuple[int, ...] = ()
    prompts: int | None = None

    def metrics(self) -> dict[str, float]:
        """Return the metrics to log, by name without the prefix of the evaluation."""
        named: Mapping[str, float | None] = {
            "accuracy_low": self.accuracy.low,
            "accuracy_high": self.accuracy.high,
            "ece": self.calibration.ece,
            "brier": self.calibration.brier,
            "length_only_accuracy": None if self.length is None else self.length.length_only,
            "length_controlled_accuracy": None if self.length is None else self.length.controlled,
            "mean_accuracy_over_groups": self.mean_over_groups,
            "top1_accuracy": None if self.top1_accuracy is None else self.top1_accuracy.value,
            "kendall_tau": self.kendall_tau,
            **{f"accuracy/{name}": share.value for name, share in self.groups.items()},
        }
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True)
class BestOfN:
    """Best-of-N evaluation: how often the highest reward belongs to a right answer.

    Attributes:
        rows: Number of rows with finite rewards.
        left_out: Number of rows with a reward that is not finite.
        accuracy: Mean credit over all rows, including rows of the subset Ties.
        groups: Mean credit of each subset. The subset Ties has RewardBench 2's special score, without interval (nan).
        mean_over_groups: Mean over groups; RewardBench 2's score if the groups are its subsets.
        worst: Indices of wrong rows, worst first: sorted by the best wrong minus the best right reward.
    """

    rows: int
    left_out: int
    accuracy: Proportion
    groups: dict[str, Proportion]
    mean_over_groups: float | None
    worst: tuple[int, ...]


@dataclass(frozen=True)
class ScoreFit:
    """Evaluation of rewards that predict scores, each in the unit of the scores.

    Attributes:
        answers: Number of answers with a finite reward and a score.
        left_out: Number of answers with a reward that is not finite.
        squared_error: Mean of ``(reward - score)**2``.
        variance: Variance of the scores: the squared error of always predicting their mean.
        correlation: Pearson's correlation of rewards and scores; nan if all rewards or all scores are equal.
        rewards: Distribution of the rewards.
        groups: Squared error by group, sorted by label.
        worst: Indices of the rows with the largest errors, largest first.
        prompts_in_training: See `Verdict`.
    """

    answers: int
    left_out: int
    squared_error: float
    variance: float
    correlation: float
    rewards: Distribution
    groups: dict[str, float]
    worst: tuple[int, ...]
    prompts_in_training: tuple[int, ...] = ()

    def metrics(self) -> dict[str, float]:
        """Return the metrics to log, by name without the prefix of the evaluation."""
        named = {"squared_error": self.squared_error, "correlation": self.correlation}
        named |= {f"squared_error/{name}": error for name, error in self.groups.items()}
        return {name: value for name, value in named.items() if value == value}  # without nan


AnyVerdict: TypeAlias = Verdict | BestOfN | ScoreFit
_TYPES: dict[str, type[AnyVerdict]] = {"pairs": Verdict, "best_of_n": BestOfN, "scores": ScoreFit}


def verdict_json(verdict: AnyVerdict) -> str:
    """Return a verdict as JSON, with null for numbers that are not finite."""
    kind = next(name for name, type_ in _TYPES.items() if isinstance(verdict, type_))
    text = json.dumps({"kind": kind} | asdict(verdict))
    content = json.loads(text, parse_constant=lambda _: None)
    return f"{json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)}\n"


def read_verdict(path: Path) -> AnyVerdict:
    """Read a verdict from a file that was written with `verdict_json`.

    Raises:
        UserError: The file does not hold a verdict.
    """
    with explaining(f"{path} cannot be read as a verdict", "Delete it and evaluate again."):
        content = json.loads(path.read_text(encoding="utf-8"))
        if "loss" in content:  # its name in earlier files
            content["pairwise_loss"] = content.pop("loss")
        return _from_json(_TYPES[content.pop("kind")], content)


def _from_json(kind: Any, value: Any) -> Any:
    """Convert a JSON value to the type ``kind``. A null becomes nan if the type is a float."""
    if value is None:
        return math.nan if kind is float else None
    if is_dataclass(kind):
        fields = get_type_hints(kind)
        return kind(**{name: _from_json(fields[name], item) for name, item in value.items()})  # type: ignore[operator]
    parts = get_args(kind)
    if get_origin(kind) is tuple:
        return tuple(_from_json(parts[0], item) for item in value)
    if get_origin(kind) is dict:
        return {name: _from_json(parts[1], item) for name, item in value.items()}
    return _from_json(parts[0], value) if parts else value  # the first part of `X | None` is X
