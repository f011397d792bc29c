"""Write verdicts as sentences and tables, and read rows and the scored rows that verdicts evaluate."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.parquet as pq
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..data.collate import Labels
from ..data.kinds import KINDS, Pairs, RowKind, check_one_form, scored_kind
from ..data.length_stats import Prompt, prompt_of
from ..errors import UserError, explaining
from ..evaluation.evaluate import evaluate_best_of_n, evaluate_rows, label_of, padded
from ..evaluation.verdict import AnyVerdict, BestOfN, Proportion, ScoreFit, Verdict

Row = Mapping[str, Any]
#: Rows; a line that is not a JSON object is replaced by an error that describes the fault.
Rows = Iterator[dict[str, Any] | UserError]
Clean = Callable[[str], str]

TEMPLATES = FileSystemLoader(Path(__file__).parent)


def sentences_of(verdict: AnyVerdict) -> list[str]:
    """Return sentences that interpret a verdict for training a policy on the model."""
    environment = Environment(loader=TEMPLATES, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters["printable"] = printable
    template = environment.get_template("verdict.txt.jinja")
    kind = next(kind for kind in KINDS if kind.unit == verdict.of) if isinstance(verdict, Verdict) else None
    return [*filter(None, template.render(verdict=verdict, type=type(verdict).__name__, kind=kind).splitlines())]


@dataclass(frozen=True)
class Table:
    """A table of text cells."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self, clean: Clean) -> str:
        """Return the table in GitHub's Markdown, aligned for terminals; ``clean`` is applied to each cell."""
        lines = [[clean(cell) for cell in row] for row in (self.header, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        aligned = [" | ".join(map(str.ljust, line, widths)) for line in lines]
        return "\n".join([f"**{self.title}**", "", *(f"| {line} |" for line in aligned)])


def as_markdown(verdicts: Mapping[str, AnyVerdict], clean: Clean) -> str:
    """Return verdicts as sentences and tables in Markdown, for a terminal or a model card.

    Args:
        verdicts: Verdicts by name.
        clean: Function that escapes each text: `markdown_text` for a card, `printable` for a terminal.
    """
    parts = []
    for name, verdict in verdicts.items():
        parts += [f"### {clean(name)}"] * bool(name)
        parts.append("\n".join(f"- {clean(sentence)}" for sentence in sentences_of(verdict)))
    return "\n\n".join([*parts, *(table.markdown(clean) for table in tables_of(verdicts))])


def tables_of(verdicts: Mapping[str, AnyVerdict]) -> list[Table]:
    """Return tables of verdicts, given by name: totals and accuracy by group, with one column per verdict."""
    tables, verdicts = [], {name or "value": verdict for name, verdict in verdicts.items()}
    for title, type_, measures in _MEASURES:
        columns = {name: verdict for name, verdict in verdicts.items() if isinstance(verdict, type_)}
        rows = list[tuple[str, ...]]()
        for measure, value, meaning in measures:
            cells = [_cell(value(verdict)) for verdict in columns.values()]
            rows += [(measure, *cells, meaning)] if any(cells) else []
        tables += [Table(title, ("measure", *columns, "meaning"), tuple(rows))] if columns else []
    for title, types in (("Accuracy by group", Verdict | BestOfN), ("Squared error by group", ScoreFit)):
        groups = {name: each.groups for name, each in verdicts.items() if each.groups and isinstance(each, types)}
        names = sorted({name for shares in groups.values() for name in shares})
        rows = [(name, *(_cell(shares.get(name), with_count=True) for shares in groups.values())) for name in names]
        tables += [Table(title, ("group", *groups), tuple(rows))] if groups else []
    return tables


def _cell(value: Proportion | float | None, with_count: bool = False) -> str:
    if isinstance(value, Proportion):
        interval = "" if math.isnan(value.low) else f" ({value.low:.3f} to {value.high:.3f})"
        return f"{value.value:.4f}{interval}{f' of {value.count:,}' if with_count else ''}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def _length(verdict: Verdict, name: str) -> float | None:
    length = verdict.length
    return getattr(length, name) if length is not None and length.has_length_differences else None


# name, value and meaning of each measure
_PAIR_MEASURES: Any = (
    ("pairs", lambda verdict: verdict.pairs, "pairs, comparisons or steps with finite rewards"),
    ("prompts", lambda verdict: verdict.prompts, "intervals allow for pairs that share a prompt"),
    ("accuracy", lambda verdict: verdict.accuracy, "chosen above rejected, or right told from wrong; 95 % interval"),
    ("mean over groups", lambda verdict: verdict.mean_over_groups, "mean accuracy, with equal weight per group"),
    ("top-1 accuracy", lambda verdict: verdict.top1_accuracy, "highest reward goes to a best-graded answer"),
    ("Kendall's tau", lambda verdict: verdict.kendall_tau, "order of a prompt's answers; 1 is best, 0 is chance"),
    ("ties", lambda verdict: verdict.ties, "equal rewards, counted as wrong"),
    ("pairwise loss", lambda verdict: verdict.pairwise_loss, "-log sigmoid(margin); 0.6931 without any knowledge"),
    ("mean margin", lambda verdict: verdict.margins.mean, "chosen minus rejected reward"),
    ("median margin", lambda verdict: verdict.margins.quantiles["0.5"], ""),
    ("std of margins", lambda verdict: verdict.margins.std, ""),
    ("calibration error", lambda verdict: verdict.calibration.ece, "of the confidence sigmoid(|margin|); 0 is best"),
    ("Brier score", lambda verdict: verdict.calibration.brier, "0 is best, 0.25 without any knowledge"),
    ("length alone", lambda verdict: _length(verdict, "length_only"), "accuracy of a rule that reads only lengths"),
    ("length controlled", lambda verdict: _length(verdict, "controlled"), "accuracy; length alone gets 0.5"),
)
_BEST_OF_N_MEASURES: Any = (
    ("rows", lambda verdict: verdict.rows, "rows with finite rewards"),
    ("accuracy", lambda verdict: verdict.accuracy, "highest reward goes to a right answer; 95 % interval"),
    ("mean over groups", lambda verdict: verdict.mean_over_groups, "RewardBench 2's score for its subsets"),
)
_SCORE_MEASURES: Any = (
    ("answers", lambda verdict: verdict.answers, "answers with a finite reward and a score"),
    ("squared error", lambda verdict: verdict.squared_error, "mean of (reward - score) squared; 0 is best"),
    ("variance of scores", lambda verdict: verdict.variance, "squared error of always predicting the mean"),
    ("correlation", lambda verdict: verdict.correlation, "of rewards and scores; 1 is best"),
    ("mean reward", lambda verdict: verdict.rewards.mean, ""),
    ("std of rewards", lambda verdict: verdict.rewards.std, ""),
)
_MEASURES: Any = (
    ("Verdict", Verdict, _PAIR_MEASURES),
    ("Best of several answers", BestOfN, _BEST_OF_N_MEASURES),
    ("Prediction of scores", ScoreFit, _SCORE_MEASURES),
)


def printable(text: str) -> str:
    """Replace unprintable characters in a line: a terminal would obey them, or they change the text direction."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def markdown_text(text: str) -> str:
    """Escape Markdown and HTML in a line or a table cell: names of groups come from the data."""
    escaped = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("`", "&#96;")
    return "".join(f"\\{letter}" if letter in "\\*_[]" else letter for letter in escaped)


_GROUP_COLUMNS = ("attribute", "subset")  # added for models with attributes, and RewardBench's


class LabeledRewards:
    """Rewards and labels of scored rows, which are added part by part.

    Args:
        eval_by: The column that groups rows. By default it is ``attribute`` or ``subset``, if a part has it.

    Attributes:
        kind: The kind of the rows.
    """

    def __init__(self, eval_by: str | None = None) -> None:
        self.kind: RowKind = Pairs()
        self._groups: list[str | None] = []
        self._eval_by, self._lists_answers = eval_by, False
        self._arrays = [(padded([]), padded([]), padded([]))]  # rewards, grades and tokens of each part, [N, K] each
        self._prompts, self._ids = list[Prompt](), list[str]()

    def add(self, rows: Sequence[Row], columns: Sequence[str]) -> list[Row]:
        """Add scored rows, and return the evaluated items: rows, attributes of a row, or solutions up to a step.

        Args:
            rows: The scored rows.
            columns: Their columns.

        Raises:
            TypeError, ValueError: A reward is not a number.
        """
        kind = scored_kind(columns, rows)
        if not self.kind.orders_answers:  # rows of a file may have one answer, or several
            self.kind = kind
        parts = [part for row in rows for part in kind.from_scored(row)]
        items = [row for row, *_ in parts]
        self._lists_answers |= any(map(kind.lists_answers, rows))
        compares_lengths, tokens = not (kind.compares_with_zero or self._lists_answers), list[list[Any]]()
        for row, rewards, _ in parts:
            counts = kind.token_counts(row) if compares_lengths else None
            tokens.append(counts[: len(rewards)] if counts else [math.nan] * len(rewards))
        self._arrays.append((padded([part[1] for part in parts]), padded([part[2] for part in parts]), padded(tokens)))
        group_by = self._eval_by or next((name for name in _GROUP_COLUMNS if any(name in row for row in items)), None)
        self._groups += [None if group_by is None else label_of(row.get(group_by)) for row in items]
        self._prompts += [prompt_of(row) or b"" for row in items]
        self._ids += [str(row.get("id", "")) for row in items]
        return items

    def verdict(self) -> AnyVerdict:
        """Return the verdict on all rows: best of N for lists of right and wrong answers, as in RewardBench 2.

        Raises:
            UserError: Nothing can be evaluated.
        """
        rewards_NK, grade_NK, tokens_NK = (padded([*chain(*parts)]) for parts in zip(*self._arrays, strict=True))
        if self._lists_answers:
            return evaluate_best_of_n(rewards_NK, grade_NK, self._ids, self._groups, self._prompts)
        labels = Labels(grade_NK[:, None], kind=self.kind)
        return evaluate_rows(rewards_NK, labels, tokens_NK, self._groups, self._prompts)


@dataclass(frozen=True)
class ScoredRows:
    """Rows with rewards, as read from a file, and the verdict on their pairs, rankings or lists of answers."""

    rows: Sequence[Row]
    verdict: AnyVerdict


def lines_of(path: Path) -> Iterator[bytes]:
    """Read the lines of a file, compressed or not.

    Raises:
        UserError: The file cannot be read.
    """
    fault = f"{path} cannot be read"  # each compression raises other errors, and none names the file
    with explaining(fault, "Correct the file."), fsspec.open(str(path), mode="rb", compression="infer") as file:
        yield from file


def read_json(lines: Iterable[bytes], what: str) -> Rows:
    """Parse JSON Lines; unlike the rows of a dataset with a schema, rows may have different keys."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))
            if not isinstance(row, dict):
                raise ValueError("a row must be a JSON object")
        except ValueError as error:  # invalid JSON or UTF-8
            row = UserError(f"{what} is broken: line {number}: {error}. Correct the line.")
        yield row


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a JSON Lines or Parquet file.

    Raises:
        UserError: The file cannot be read, or a line is broken.
    """
    if path.suffix.lower() == ".parquet":
        with explaining(f"{path} cannot be read as rows", "Correct the file."):
            return pq.ParquetFile(path).read().to_pylist()  # `read_table` also makes columns from folder names
    rows: list[Any] = list(read_json(lines_of(path), str(path)))
    if faults := [row for row in rows if isinstance(row, UserError)]:
        raise faults[0]
    return rows


def read_scored(path: Path, eval_by: str | None = None) -> ScoredRows:
    """Read a JSON Lines or Parquet file of rows with rewards, and evaluate them.

    The length bias is computed if every scored row has ``tokens_chosen`` and ``tokens_rejected``.

    Args:
        path: The file.
        eval_by: The column that groups rows. By default it is ``attribute`` or ``subset``, if rows have it.

    Raises:
        UserError: The file cannot be read, has no labeled rewards or no finite ones, or has no column ``eval_by``.
    """
    rows, scored = read_rows(path), LabeledRewards(eval_by)
    columns = sorted({name for row in rows for name in row})
    with explaining(f"{path} cannot be evaluated", "Use the output of `trl-tpu score` on rows with labels."):
        items = scored.add(rows, columns)
    if not scored.kind.is_one_sequence:  # a row of a process reward model may have other columns, too
        check_one_form(columns, str(path))
    if eval_by is not None and not any(eval_by in row for row in items):
        raise UserError(f"{path} has no column {eval_by!r}.")
    return ScoredRows(items, scored.verdict())
