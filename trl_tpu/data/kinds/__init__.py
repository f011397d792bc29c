"""The kinds of data rows, one file each: pairs, rankings, single answers, and solutions with steps.

`kind_of` recognizes prepared rows. The rest of the package holds a kind and calls its methods. A new kind is a new
file here, and an entry in `KINDS` and `kinds_for`. A kind with a new name also needs a word in `config/checks.py`, for
the settings that have no meaning for it, and NAME.md.jinja here: a sentence on its loss.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...errors import UserError
from ..checks import RAW_COLUMNS
from .base import RowKind as RowKind
from .pairs import Pairs
from .rankings import TIE_MODELS as TIE_MODELS
from .rankings import Answers, Rankings
from .solutions import Solutions

#: All kinds, with the default settings. The first that fits applies.
KINDS: tuple[RowKind, ...] = (Pairs(), Rankings(), Answers(), Solutions())
#: All columns that training reads.
COLUMNS = tuple(dict.fromkeys(name for kind in KINDS for name in (*kind.columns, *kind.optional_columns)))


def kinds_for(args: Any) -> tuple[RowKind, ...]:
    """Return the kinds of rows that a `RewardConfig` accepts. With a `step_separator`, rows are solutions."""
    if args.step_separator is not None:
        return (Solutions(),)
    rankings = (Rankings(), Answers())
    return rankings if args.attributes else (Pairs(), *rankings)


def check_one_form(columns: Collection[str], what: str) -> None:
    """Raise UserError if rows with these columns can be read both as pairs and as rankings."""
    present = set(columns)
    grades = sorted({"scores", "ranks"} & present)
    for halves in (RAW_COLUMNS, Pairs.columns):
        if present.issuperset(halves) and "completions" in present and grades:
            raise UserError(
                f"{what} has both pairs ({', '.join(halves)}) and rankings (completions, {', '.join(grades)}), so it "
                f"can be read in two ways. Drop the columns of one form, such as `dataset.remove_columns({grades})`."
            )


def kind_of_columns(columns: Collection[str]) -> RowKind | None:
    """Return the first kind whose prepared rows have these columns; None if they are not prepared."""
    return next((kind for kind in KINDS if all(name in columns for name in kind.columns)), None)


def kind_of(row: Mapping[str, Any]) -> RowKind | None:
    """Return the kind of a prepared row, with the default settings; None if the row is not prepared."""
    return next((kind for kind in KINDS if all(name in row for name in kind.columns) and kind.is_tokenized(row)), None)


def answers_of(row: Mapping[str, Any]) -> list[Any]:
    """Return the token ids of each answer of a prepared row."""
    return (kind_of(row) or Pairs()).answers(row)


def labels_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the labels of a prepared row by name: `margin`, `chosen_probability`, `grades`, and `step_ends`.

    `step_ends` are the indices of the tokens at which labeled steps end. `grades` are then the labels of these steps.
    """
    return (kind_of(row) or Pairs()).labels(row)


def scored_kind(columns: Collection[str], rows: Sequence[Mapping[str, Any]]) -> RowKind:
    """Return the kind of rows that `score` has written; rankings if no other kind fits."""
    return next(filter(None, (kind.scored(columns, rows) for kind in KINDS)), Rankings())


def labels_as(args: Any) -> str | None:
    """Return how evaluations of a trained model read labels, if not as usual: saved with the model, see `HeadSpec`."""
    return next(filter(None, (kind.labels_as(args) for kind in kinds_for(args))), None)
