"""Verdicts as tables, a column each: for a terminal, a model card and the report."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..evaluation.best_of_n import BestOfN
from ..evaluation.proportion import Proportion
from ..evaluation.verdict import Verdict


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
