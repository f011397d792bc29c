"""The verdict in words and tables."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..evaluation.judge import BestOfN
from ..evaluation.reward_sums import Proportion
from ..evaluation.verdict import Verdict


def sentences_of(verdict: Verdict | BestOfN) -> list[str]:
    """Return sentences on what a verdict means for training a policy on the model."""
    if isinstance(verdict, BestOfN):
        said = [
            f"Its best reward goes to a right answer in {_share_in_words(verdict.accuracy)} of {verdict.rows:,} rows."
        ]
        if verdict.mean_over_groups is not None:
            said.append(f"Over its {len(verdict.groups)} groups the mean is {verdict.mean_over_groups:.1%}.")
        return [*said, *_left_out(verdict.left_out, "rows")]
    accuracy = verdict.accuracy
    does = "tells right from wrong" if verdict.of == "steps" else "prefers the chosen answer"
    of = f"{verdict.pairs:,} {verdict.of}"
    if verdict.top1_accuracy is not None:
        of = f"comparisons, averaged over {accuracy.count:,} rankings ({verdict.pairs:,} comparisons)"
    said = [f"It {does} in {_share_in_words(accuracy)} of {of}."]
    if accuracy.high < 0.5:
        exchanged = "the labels" if verdict.of == "steps" else "chosen and rejected"
        said.append(f"That is worse than chance: see whether {exchanged} are exchanged.")
    elif accuracy.low <= 0.5:
        said.append(f"That cannot be told from chance: more {verdict.of} are needed, or a better model.")
    said += _sentences_of_length(verdict) if verdict.of == "pairs" else []
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


def _share_in_words(share: Proportion) -> str:
    return f"{share.value:.1%} ({share.low:.1%} to {share.high:.1%} at 95 %)"


def _left_out(count: int, of: str) -> list[str]:
    lacks = "no finite reward, or no label" if of == "steps" else "a reward that is not finite"
    return [f"{count:,} more {of} have {lacks}, and are left out."] if count else []


def _sentences_of_length(verdict: Verdict) -> list[str]:
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


@dataclass(frozen=True)
class Table:
    """Cells of text, row by row."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables_of(verdicts: Mapping[str, Verdict | BestOfN]) -> list[Table]:
    """Return verdicts, by name, as tables in all and by group, each verdict in a column."""
    tables = []
    for title, kind, measures in (("Verdict", Verdict, _OF_PAIRS), ("Best of several answers", BestOfN, _OF_ROWS)):
        named = {name: each for name, each in verdicts.items() if isinstance(each, kind)}
        rows = [(measure, *map(cell, named.values()), words) for measure, cell, words in measures]
        known = tuple(row for row in rows if any(row[1:-1]))
        tables += [Table(title, ("measure", *named, "what it is"), known)] if named else []
    groups = {name: each.groups for name, each in verdicts.items() if each.groups}
    names = sorted({group for each in groups.values() for group in each})
    rows = [(name, *(_share(each.get(name), with_count=True) for each in groups.values())) for name in names]
    return [*tables, *([Table("Accuracy by group", ("group", *groups), tuple(rows))] if groups else [])]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _share(share: Proportion | None, with_count: bool = False) -> str:
    if share is None:
        return ""
    interval = "" if math.isnan(share.low) else f" ({share.low:.3f} to {share.high:.3f})"
    return f"{share.value:.4f}{interval}{f' of {share.count:,}' if with_count else ''}"


def _of_length(verdict: Verdict, name: str) -> str:
    length = verdict.length
    return _number(getattr(length, name)) if length is not None and length.says_something else ""


# each measure, its cell, and what it is
_OF_PAIRS: Any = (
    ("pairs", lambda verdict: f"{verdict.pairs:,}", "with finite rewards; comparisons of rankings; steps"),
    ("accuracy", lambda verdict: _share(verdict.accuracy), "chosen above rejected; interval of 95 %"),
    ("mean over groups", lambda verdict: _number(verdict.mean_over_groups), "of accuracies"),
    ("top-1 accuracy", lambda verdict: _share(verdict.top1_accuracy), "the best reward is a best answer's"),
    ("Kendall's tau", lambda verdict: _number(verdict.kendall_tau), "of a prompt's order; 1 is right, 0 by chance"),
    ("ties", lambda verdict: f"{verdict.ties:,}", "equal rewards, which count as wrong"),
    ("loss", lambda verdict: _number(verdict.loss), "-log sigmoid(margin); 0.6931 is no knowledge"),
    ("mean margin", lambda verdict: _number(verdict.margins.mean), "chosen less rejected reward"),
    ("median margin", lambda verdict: _number(verdict.margins.quantiles["0.5"]), ""),
    ("std of margins", lambda verdict: _number(verdict.margins.std), ""),
    ("calibration error", lambda verdict: _number(verdict.calibration.ece), "of sigmoid(|margin|); 0 is best"),
    ("Brier score", lambda verdict: _number(verdict.calibration.brier), "0 is best, 0.25 is no knowledge"),
    ("length alone", lambda verdict: _of_length(verdict, "length_only"), "preferring the longer, or shorter, answer"),
    ("length controlled", lambda verdict: _of_length(verdict, "controlled"), "accuracy; length alone gets 0.5"),
)
_OF_ROWS: Any = (
    ("rows", lambda verdict: f"{verdict.rows:,}", "with finite rewards"),
    ("accuracy", lambda verdict: _share(verdict.accuracy), "the best reward is a right answer's; interval of 95 %"),
    ("mean over groups", lambda verdict: _number(verdict.mean_over_groups), "RewardBench 2's score, of its subsets"),
)


def as_markdown(tables: Sequence[Table], clean: Callable[[str], str]) -> str:
    """Return tables in GitHub's Markdown, with columns that a terminal shows below each other.

    Args:
        clean: What a cell goes through: `markdown_text` for a card, `printable` for a terminal.
    """
    parts = []
    for table in tables:
        lines = [[clean(cell) for cell in row] for row in (table.header, *table.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        padded = [" | ".join(map(str.ljust, line, widths)) for line in lines]
        parts.append("\n".join([f"**{table.title}**", "", *(f"| {line} |" for line in padded)]))
    return "\n\n".join(parts)


def printable(text: str) -> str:
    """Return a line without what a terminal would obey, or what turns the direction of letters."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def markdown_text(text: str) -> str:
    """Return a line, or a cell, whose letters are only letters to Markdown: a group's name comes from the data."""
    escaped = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("`", "&#96;")
    return "".join(f"\\{letter}" if letter in "\\*_[]" else letter for letter in escaped)
