"""The verdict in words: what the numbers rule out, and what they do not."""

import numpy as np

from ..evaluation.best_of_n import BestOfN
from ..evaluation.verdict import Verdict

_BIAS = 0.05  # of accuracy: less is not worth a line


def findings(found: Verdict | BestOfN) -> list[str]:
    """Say, a sentence each, what the numbers of a verdict mean for whoever wants to train a policy on the model."""
    return _of_pairs(found) if isinstance(found, Verdict) else _of_answers(found)


def _of_answers(found: BestOfN) -> list[str]:
    accuracy = found.accuracy
    interval = f"{accuracy.low:.1%} to {accuracy.high:.1%} at 95 %"
    said = [f"Its best reward goes to a right answer in {accuracy.value:.1%} of {found.rows:,} rows ({interval})."]
    if found.mean_over_groups is not None:
        said.append(f"Over its {len(found.groups)} groups the mean is {found.mean_over_groups:.1%}.")
    if found.left_out:
        said.append(f"{found.left_out:,} more rows have a reward that is not finite, and are left out.")
    return said


def _of_pairs(verdict: Verdict) -> list[str]:
    accuracy = verdict.accuracy
    interval = f"{accuracy.low:.1%} to {accuracy.high:.1%} at 95 %"
    said = [f"It prefers the chosen answer in {accuracy.value:.1%} of {verdict.pairs:,} pairs ({interval})."]
    if accuracy.high < 0.5:
        said.append("That is worse than chance: see whether chosen and rejected are exchanged.")
    elif accuracy.low <= 0.5:
        said.append("That cannot be told from chance: more pairs are needed, or a better model.")
    said += _of_length(verdict)
    said += _of_calibration(verdict)
    below = [name for name, each in verdict.groups.items() if each.high < 0.5]
    if below:
        said.append(f"It is worse than chance on: {', '.join(below)}.")
    if verdict.ties > verdict.pairs / 100:
        said.append(
            f"{verdict.ties / verdict.pairs:.1%} of the pairs get equal rewards, from which nothing is learned."
        )
    if verdict.left_out:
        said.append(f"{verdict.left_out:,} more pairs have a reward that is not finite, and are left out.")
    return said


def _of_length(verdict: Verdict) -> list[str]:
    length, accuracy = verdict.length, verdict.accuracy
    if length is None:
        return ["Lengths are not known, so what a rule of length alone would reach is not, either."]
    if not length.says_something:
        return ["The answers of each pair are of equal length, so length says nothing."]
    better = "longer" if length.longer_wins >= 0.5 else "shorter"
    said = f"Preferring the {better} answer reaches {length.length_only:.1%}"
    is_above = accuracy.low > length.length_only
    said += "; the model is above that." if is_above else ", and the model is not clearly above that."
    chosen, rejected = length.chosen_is_longer, length.rejected_is_longer
    if chosen is None or rejected is None or (chosen.low <= rejected.high and rejected.low <= chosen.high):
        return [said]
    favored = "longer" if chosen.value > rejected.value else "shorter"
    return [
        said,
        f"It favors {favored} answers: it is right in {chosen.value:.1%} of the pairs whose chosen answer is longer, "
        f"and in {rejected.value:.1%} of those whose rejected one is. A policy may learn that.",
    ]


def _of_calibration(verdict: Verdict) -> list[str]:
    bins = verdict.calibration.bins
    counts = np.array([each.count for each in bins])
    confidence = float(np.average([each.confidence for each in bins], weights=counts))
    right = float(np.average([each.accuracy for each in bins], weights=counts))
    if abs(confidence - right) < _BIAS:
        return [f"Its margins say how sure it may be (expected calibration error {verdict.calibration.ece:.3f})."]
    too = "wide" if confidence > right else "narrow"
    return [
        f"Its margins are too {too}: on average they claim {confidence:.1%} and {right:.1%} is right (expected "
        f"calibration error {verdict.calibration.ece:.3f}). Scale rewards before you mix them with others."
    ]
