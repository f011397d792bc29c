"""The verdict as tables: for a terminal, and for a model card."""

import math
from dataclasses import dataclass
from typing import IO

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from ..evaluation.best_of_n import BestOfN
from ..evaluation.proportion import Proportion
from ..evaluation.verdict import Verdict

_WORDS = "what it is"


@dataclass(frozen=True)
class Table:
    """Cells of text, row by row: a column of names, columns of numbers, and perhaps one of words."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def is_words(self, column: int) -> bool:
        """Tell whether a column is read from the left, as words are, and not from the right, as numbers."""
        return column == 0 or self.header[column] == _WORDS


def tables_of(found: Verdict | BestOfN) -> list[Table]:
    """Return what a verdict says in all, by length, and by group."""
    return _tables_of_pairs(found) if isinstance(found, Verdict) else _tables_of_best(found)


def _tables_of_pairs(verdict: Verdict) -> list[Table]:
    tables = [_summary(verdict)]
    if verdict.length is not None and verdict.length.says_something:
        unit = verdict.length.unit
        rows = [(_range(each.shortest, each.longest), *_cells(each.accuracy)) for each in verdict.length.bins]
        tables.append(
            Table("Accuracy by length", (f"chosen less rejected {unit}", "accuracy", "95 %", "pairs"), tuple(rows))
        )
    if verdict.groups:
        tables.append(_groups(verdict.groups, verdict.mean_over_groups, "pairs"))
    return tables


def _tables_of_best(found: BestOfN) -> list[Table]:
    rows = [
        ("rows", f"{found.rows:,}", _left_out(found.left_out, "rows")),
        (
            "accuracy",
            _number(found.accuracy.value),
            f"{_interval(found.accuracy)}; the best reward is a right answer's",
        ),
    ]
    if found.mean_over_groups is not None:
        rows.append(("mean over groups", _number(found.mean_over_groups), "RewardBench 2's score, of its subsets"))
    tables = [Table("Best of several answers", ("measure", "value", _WORDS), tuple(rows))]
    return [*tables, _groups(found.groups, found.mean_over_groups, "rows")] if found.groups else tables


def _summary(verdict: Verdict) -> Table:
    calibration, margins, length = verdict.calibration, verdict.margins, verdict.length
    rows = [
        ("pairs", f"{verdict.pairs:,}", _left_out(verdict.left_out, "pairs")),
        ("accuracy", _number(verdict.accuracy.value), f"{_interval(verdict.accuracy)}; chosen above rejected"),
        ("ties", f"{verdict.ties:,}", "pairs of equal rewards, which count as wrong"),
        ("loss", _number(verdict.loss), "-log sigmoid(margin); 0.6931 is no knowledge"),
        (
            "margin",
            _number(margins.mean),
            f"mean; median {_number(margins.quantiles['0.5'])}, std {_number(margins.std)}",
        ),
        ("calibration error", _number(calibration.ece), "ECE of sigmoid(|margin|) as confidence; 0 is best"),
        ("Brier score", _number(calibration.brier), "of sigmoid(margin); 0 is best, 0.25 is no knowledge"),
    ]
    if length is not None and length.says_something:
        better = "longer" if length.longer_wins >= 0.5 else "shorter"
        rows.append(("length alone", _number(length.length_only), f"accuracy of preferring the {better} answer"))
        if length.controlled is not None:
            what = "mean of those where the chosen and where the rejected answer is longer; length alone gets 0.5"
            rows.append(("accuracy, length controlled", _number(length.controlled), what))
        if length.correlation is not None:
            what = f"of reward and {length.unit}, by ranks"
            rows.append(("correlation with length", f"{length.correlation:+.4f}", what))
    return Table("Verdict", ("measure", "value", _WORDS), tuple(rows))


def _groups(groups: dict[str, Proportion], mean: float | None, counted: str) -> Table:
    rows = [(name, *_cells(each)) for name, each in groups.items()]
    if mean is not None:
        rows.append(("mean over groups", _number(mean), "", ""))
    return Table("Accuracy by group", ("group", "accuracy", "95 %", counted), tuple(rows))


def _cells(share: Proportion) -> tuple[str, str, str]:
    return _number(share.value), _interval(share), f"{share.count:,}"


def _interval(share: Proportion) -> str:
    return "" if math.isnan(share.low) else f"{share.low:.3f} to {share.high:.3f}"


def _number(value: float) -> str:
    return f"{value:.4f}"


def _range(low: float, high: float) -> str:
    ends = [f"{end:+,.0f}" if end else "0" for end in dict.fromkeys((low, high))]
    return " to ".join(ends)


def _left_out(count: int, of: str) -> str:
    return (
        f"{count:,} more {of} have a reward that is not finite, and are left out"
        if count
        else "all have finite rewards"
    )


# ---- on a terminal


def print_tables(tables: list[Table], file: IO[str] | None = None) -> None:
    """Print tables as wide as the terminal, or as 80 columns in a pipe, where nothing has a color."""
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    for table in tables:
        drawn = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for index, name in enumerate(table.header):
            drawn.add_column(_plain(name), justify="left" if table.is_words(index) else "right", overflow="fold")
        for row in table.rows:
            drawn.add_row(*map(_plain, row))
        console.print(drawn)


def _plain(cell: str) -> Text:
    """Return a cell without what a terminal would obey."""
    return Text("".join(letter if letter.isprintable() else " " for letter in cell))


# ---- in a model card


def as_markdown(tables: list[Table]) -> str:
    """Return tables in GitHub's Markdown, each below its title in bold."""
    return "\n\n".join(_markdown(table) for table in tables)


def _markdown(table: Table) -> str:
    marks = ["---" if table.is_words(index) else "---:" for index in range(len(table.header))]
    lines = [map(markdown_text, table.header), marks, *(map(markdown_text, row) for row in table.rows)]
    return "\n".join([f"**{table.title}**", "", *(f"| {' | '.join(cells)} |" for cells in lines)])


def markdown_text(text: str) -> str:
    """Return a line, or a cell, whose letters are only letters to Markdown: a group's name comes from the data."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    escaped = plain.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("`", "&#96;")
    return "".join(f"\\{letter}" if letter in "\\*_[]" else letter for letter in escaped)
