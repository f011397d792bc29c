"""The verdict in sentences: what the numbers rule out, and what they do not."""

from ..evaluation.best_of_n import BestOfN
from ..evaluation.proportion import Proportion
from ..evaluation.verdict import Verdict


def sentences_of(verdict: Verdict | BestOfN) -> list[str]:
    """Return sentences on what a verdict means for training a policy on the model."""
    if isinstance(verdict, BestOfN):
        said = [f"Its best reward goes to a right answer in {_share(verdict.accuracy)} of {verdict.rows:,} rows."]
        if verdict.mean_over_groups is not None:
            said.append(f"Over its {len(verdict.groups)} groups the mean is {verdict.mean_over_groups:.1%}.")
        return [*said, *_left_out(verdict.left_out, "rows")]
    accuracy = verdict.accuracy
    does = "tells right from wrong" if verdict.of == "steps" else "prefers the chosen answer"
    of = f"{verdict.pairs:,} {verdict.of}"
    if verdict.top1_accuracy is not None:
        of = f"comparisons, averaged over {accuracy.count:,} rankings ({verdict.pairs:,} comparisons)"
    said = [f"It {does} in {_share(accuracy)} of {of}."]
    if accuracy.high < 0.5:
        exchanged = "the labels" if verdict.of == "steps" else "chosen and rejected"
        said.append(f"That is worse than chance: see whether {exchanged} are exchanged.")
    elif accuracy.low <= 0.5:
        said.append(f"That cannot be told from chance: more {verdict.of} are needed, or a better model.")
    said += _of_length(verdict) if verdict.of == "pairs" else []
    said.append(f"Its margins have an expected calibration error of {verdict.calibration.ece:.3f}; 0 is best.")
    if below := [name for name, each in verdict.groups.items() if each.high < 0.5]:
        said.append(f"It is worse than chance on: {', '.join(below)}.")
    if verdict.ties > verdict.pairs / 100:
        share = verdict.ties / verdict.pairs
        said.append(f"{share:.1%} of the {verdict.of} get equal rewards, from which nothing is learned.")
    if verdict.prompts_in_training and verdict.prompts_in_training[0]:
        shared, prompts = verdict.prompts_in_training
        said.append(f"{shared:,} of {prompts:,} evaluation prompts also occur in the training data.")
    return [*said, *_left_out(verdict.left_out, verdict.of)]


def _share(share: Proportion) -> str:
    return f"{share.value:.1%} ({share.low:.1%} to {share.high:.1%} at 95 %)"


def _left_out(count: int, of: str) -> list[str]:
    lacks = "no finite reward, or no label" if of == "steps" else "a reward that is not finite"
    return [f"{count:,} more {of} have {lacks}, and are left out."] if count else []


def _of_length(verdict: Verdict) -> list[str]:
    length = verdict.length
    if length is None:
        return ["Lengths are not known, so what a rule of length alone would reach is not, either."]
    if not length.says_something:
        return ["The answers of each pair are of equal length, so length says nothing."]
    better = "longer" if length.longer_wins >= 0.5 else "shorter"
    above = "clearly" if verdict.accuracy.low > length.length_only else "not clearly"
    said = [f"Preferring the {better} answer reaches {length.length_only:.1%}; the model is {above} above that."]
    chosen, rejected = length.chosen_is_longer, length.rejected_is_longer
    if chosen is not None and rejected is not None and (chosen.low > rejected.high or rejected.low > chosen.high):
        favored = "longer" if chosen.value > rejected.value else "shorter"
        said.append(
            f"It favors {favored} answers: it is right in {chosen.value:.1%} of the pairs whose chosen answer is "
            f"longer, and in {rejected.value:.1%} of those whose rejected one is. A policy may learn that."
        )
    return said
