"""Reads prepared rows: their forms, lengths, labels and shared prompts."""

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from torch.utils.data import Sampler

from ..packing.shapes import PairLengths

logger = logging.getLogger(__name__)

NO_LABEL = -100
"""The label of tokens at which no step ends, as in torch's losses."""
PAIR = ("chosen_ids", "rejected_ids")
RANKING = ("answer_ids", "grades")
SOLUTION = ("input_ids", "labels")
"""Columns of tokenized rows: TRL's of pairs and of solutions with steps, and ours of rankings."""
COLUMNS = (*PAIR, *RANKING, *SOLUTION, "margin", "chosen_probability")
"""All columns that training reads."""
ANSWERS, STEP_ENDS = "answers", "step_ends"


def form_of(columns: Collection[str]) -> tuple[str, ...]:
    """Return the columns that hold a row's tokens: `PAIR`, `RANKING` or `SOLUTION`; none if it is not tokenized."""
    return next((form for form in (PAIR, RANKING, SOLUTION) if set(form) <= set(columns)), ())


def read_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tokenized row in the one schema that batches are made of.

    It has `answers`, a list of lists of token ids, and labels: `margin` and `chosen_probability` of pairs, `grades` of
    rankings, `grades` and `step_ends` (the indices of the tokens at which labeled steps end) of solutions. Other
    columns are left out. A row that is in this schema already stays as it is.
    """
    form = form_of(row)
    if form == PAIR:
        labels = {name: row[name] for name in ("margin", "chosen_probability") if name in row}
        return {ANSWERS: [row[column] for column in PAIR], **labels}
    if form == RANKING:
        return {ANSWERS: row["answer_ids"], "grades": row["grades"]}
    if form == SOLUTION:
        ends = np.flatnonzero(np.asarray(row["labels"]) != NO_LABEL)
        return {ANSWERS: [row["input_ids"]], STEP_ENDS: ends, "grades": [float(row["labels"][end]) for end in ends]}
    return dict(row)


def read_table(table: pa.Table) -> pa.Table:
    """Return tokenized rows of an arrow table in the schema of `read_row`."""
    form = form_of(table.column_names)
    labels = table.drop_columns([column for column in table.column_names if column in form and column != "grades"])
    if form == PAIR:
        kind = pa.list_(pa.int64())
        sequences = pa.concat_arrays([chunk.cast(kind) for column in PAIR for chunk in table[column].chunks])
        by_row = sequences.take(pa.array(np.arange(2 * len(table)).reshape(2, -1).T.ravel()))
        answers = _lists(by_row, np.full(len(table), 2))
    elif form == RANKING:
        answers = table["answer_ids"]
    else:
        answers = _lists(table["input_ids"].combine_chunks(), np.ones(len(table), np.int64))
        values_T, starts_N = flat(table["labels"])
        is_end_T = values_T != NO_LABEL
        counts_N = np.diff(np.concatenate([[0], np.cumsum(is_end_T)])[starts_N])
        ends_E = np.flatnonzero(is_end_T) - np.repeat(starts_N[:-1], counts_N)
        labels = labels.append_column(STEP_ENDS, _lists(pa.array(ends_E), counts_N))
        labels = labels.append_column("grades", _lists(pa.array(values_T[is_end_T].astype(float)), counts_N))
    return labels.append_column(ANSWERS, answers)


def _lists(values: pa.Array, counts_N: np.ndarray) -> pa.Array:
    ends_N = np.concatenate([[0], np.cumsum(counts_N)])
    return pa.ListArray.from_arrays(pa.array(ends_N, pa.int32()), values)


@dataclass(frozen=True)
class Measured:
    """What batches and a resumed run must know of a prepared dataset; it holds no tokens.

    Args:
        lengths: The tokens that the answers of each row share at their beginning, and those after.
        shared_prefix: How many first tokens all sequences share, such as a system prompt.
        checksum: Of all token ids and labels, in the order of the rows.
        answers: K, the most scored positions of a row: answers, or labeled steps.
    """

    lengths: PairLengths
    shared_prefix: int
    checksum: int
    answers: int = 2

    @property
    def sizes_N(self) -> np.ndarray:
        """Tokens that each row of the data takes: all of its sequences, with their common prefix counted once."""
        return self.lengths.sizes_P

    @property
    def longest_N(self) -> np.ndarray:
        """Tokens of the longest sequence of each row."""
        return self.lengths.longest_P


_MEASURED: WeakKeyDictionary[Dataset, Measured] = WeakKeyDictionary()


def is_prepared(dataset: Any) -> bool:
    """Tell whether a dataset has prepared rows, and all of them."""
    return isinstance(dataset, Dataset) and bool(form_of(dataset.column_names))


def has_form(dataset: Any, form: tuple[str, ...]) -> bool:
    """Tell whether a dataset is tokenized in this form."""
    return isinstance(dataset, Dataset) and form_of(dataset.column_names) == form


def measure(dataset: Dataset) -> Measured:
    """Measure a prepared dataset: once, and a few rows at a time.

    Raises:
        ValueError: It is not prepared.
    """
    if dataset not in _MEASURED:
        if not is_prepared(dataset):
            raise ValueError(f"The dataset is not tokenized; its columns are {dataset.column_names}.")
        remember(dataset, measure_tables(tables_of(dataset)))
    return _MEASURED[dataset]


def remember(dataset: Dataset, measured: Measured) -> None:
    """Let `measure` return this for ``dataset``, for as long as that is in use."""
    _MEASURED[dataset] = measured


def measure_tables(tables: Iterable[pa.Table]) -> Measured:
    """Measure prepared rows in arrow tables, one after another."""
    parts: list[PairLengths] = []
    shared: np.ndarray | None = None
    answers = 1
    checksums: dict[str, int] = {}  # one each, so that it does not matter where a table ends and the next begins

    def check(name: str, content: Any) -> None:
        checksums[name] = crc32(content, checksums.get(name, 0))

    for table in tables:
        sequences, counts_N = flat(pc.list_flatten(table[ANSWERS])), pc.list_value_length(table[ANSWERS]).to_numpy()
        parts.append(_lengths(sequences, np.repeat(np.arange(len(table)), counts_N)))
        scored = STEP_ENDS if STEP_ENDS in table.column_names else ANSWERS
        answers = max(answers, pc.max(pc.list_value_length(table[scored])).as_py() or 1)
        values_T, ends_D = sequences
        shared = _shared(shared, values_T, ends_D)
        check(ANSWERS, np.ascontiguousarray(values_T, dtype=np.int64).data)
        check("lengths", np.ascontiguousarray(np.diff(ends_D), dtype=np.int64).data)
        check("counts", np.ascontiguousarray(counts_N, dtype=np.int64).data)
        for label in set(table.column_names) - {ANSWERS}:
            check(label, "".join(f"{value}," for value in table[label].to_pylist()).encode())
    checksum = crc32(repr(sorted(checksums.items())).encode())
    return Measured(PairLengths.joined(parts), 0 if shared is None else len(shared), checksum, answers)


def tables_of(dataset: Dataset) -> Iterator[pa.Table]:
    """Read tokenized rows as arrow tables of many rows, in the schema of `read_row`."""
    return map(read_table, raw_tables_of(dataset))


def raw_tables_of(dataset: Dataset) -> Iterator[pa.Table]:
    """Read the token ids and the labels of tokenized rows as arrow tables of many rows."""
    form = form_of(dataset.column_names)
    optional = [name for name in ("margin", "chosen_probability") if name in dataset.column_names and form == PAIR]
    return dataset.with_format("arrow", columns=[*form, *optional]).iter(batch_size=1000)


def longest_of(answers: pa.ChunkedArray) -> np.ndarray:
    """Return how many tokens the longest answer of each row has, [N]."""
    counts_N = pc.list_value_length(answers).to_numpy()
    lengths_D = pc.list_value_length(pc.list_flatten(answers)).to_numpy()
    longest_N = np.zeros(len(counts_N), np.int64)
    np.maximum.at(longest_N, np.repeat(np.arange(len(counts_N)), counts_N), lengths_D)
    return longest_N


_Flat = tuple[np.ndarray, np.ndarray]


def flat(lists: pa.ChunkedArray) -> _Flat:
    """Return all lists' values one after another, and where each list ends in them, from 0."""
    ends_N = np.cumsum(pc.list_value_length(lists).to_numpy(), dtype=np.int64)
    return pc.list_flatten(lists).to_numpy(), np.concatenate([[0], ends_N])


def _lengths(sequences: _Flat, rows_D: np.ndarray) -> PairLengths:
    """Return each row's common prefix and the tails after it, of sequences [D] that lie row after row."""
    values_T, ends_D = sequences
    lengths_D, starts_D = np.diff(ends_D), ends_D[:-1]
    _, firsts_N, answers_N = np.unique(rows_D, return_index=True, return_counts=True)
    answer_D, first_D = np.arange(len(rows_D)) - np.repeat(firsts_N, answers_N), np.repeat(firsts_N, answers_N)
    other_M, first_M = np.flatnonzero(answer_D > 0), first_D[answer_D > 0]
    # token by token through the common length of all at once; first differences end the prefixes
    shorter_M = np.minimum(lengths_D[first_M], lengths_D[other_M])
    begins_M = np.cumsum(shorter_M) - shorter_M
    within_T = np.arange(shorter_M.sum()) - np.repeat(begins_M, shorter_M)
    same_T = (
        values_T[np.repeat(starts_D[first_M], shorter_M) + within_T]
        == values_T[np.repeat(starts_D[other_M], shorter_M) + within_T]
    )
    first_T = np.where(same_T, np.repeat(shorter_M, shorter_M), within_T)
    prefix_M = np.zeros_like(shorter_M)
    some = shorter_M > 0
    if some.any():
        prefix_M[some] = np.minimum.reduceat(first_T, begins_M[some])
    prefix_N = lengths_D[firsts_N]
    np.minimum.at(prefix_N, rows_D[other_M], prefix_M)
    tails_NK = np.zeros((len(prefix_N), answers_N.max(initial=2)), np.int64)
    tails_NK[rows_D, answer_D] = lengths_D - np.repeat(prefix_N, answers_N)
    return PairLengths(prefix_N, tails_NK)


def _shared(shared: np.ndarray | None, values_T: np.ndarray, ends_N: np.ndarray) -> np.ndarray | None:
    """Return the first tokens that ``shared`` and all these lists have in common; None before there is any list."""
    starts_N, lengths_N = ends_N[:-1], np.diff(ends_N)
    if not len(lengths_N):
        return shared
    shared = values_T[: lengths_N[0]] if shared is None else shared
    shared = shared[: lengths_N.min()]
    differs = (depth for depth, token in enumerate(shared) if (values_T[starts_N + depth] != token).any())
    return shared[: next(differs, len(shared))].copy()  # a view would keep all tokens of its table


_PROMPT = 8  # the fewest tokens that are taken for a prompt, where nothing else tells
_MORE = 16  # the first tokens that a pair's answers may have in common, of which nothing tells that they are no prompt


def prompt_groups(dataset: Dataset) -> np.ndarray:
    """Number the pairs of token ids, so that those that share a prompt have the same number [N].

    What a pair's dialogues share is the prompt, and some more tokens if its answers begin alike. So a prompt is what
    the dialogues of some pair share, and its pairs are those whose dialogues share it and at most a few tokens more.
    What all dialogues of the dataset share, a system prompt say, is none.
    """
    prompt_of: dict[bytes, bytes] = {}  # of what a pair's dialogues share
    around = [b""]  # in lexicographic order, the prompts that what comes next may begin with
    for shared in sorted(set(_shared_prompts(dataset))):
        while not shared.startswith(around[-1]):
            around.pop()
        if not around[-1] or len(shared) - len(around[-1]) > 4 * _MORE:
            around.append(shared)
        prompt_of[shared] = around[-1]
    numbers: dict[bytes | int, int] = {}
    keys = (prompt_of[shared] or pair for pair, shared in enumerate(_shared_prompts(dataset)))
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys])


def _shared_prompts(dataset: Dataset, skip: int | None = None) -> Iterator[bytes]:
    """Yield the tokens that each row's answers begin with alike, 4 bytes each, without the first ``skip``.

    By default those are skipped that all rows share.
    """
    measured = measure(dataset)
    skip = measured.shared_prefix if skip is None else skip
    prefixes = iter(measured.lengths.prefix_P.tolist())
    for table in tables_of(dataset):
        values_T, ends_D = flat(pc.list_flatten(table[ANSWERS]))
        firsts_N = np.cumsum(pc.list_value_length(table[ANSWERS]).to_numpy()) - pc.list_value_length(table[ANSWERS])
        ids = values_T.astype(np.uint32).tobytes()
        for start, prefix in zip(ends_D[firsts_N].tolist(), prefixes, strict=False):
            yield ids[4 * (start + skip) : 4 * (start + prefix)]


def prompts_in_training(train: Any, evaluation: Any, name: str = "") -> tuple[int, ...]:
    """Return how many distinct prompts of prepared evaluation data the training data has too, and their number.

    Any are also logged. Empty for streams. A prompt is the column `prompt`, or else the tokens that a row's answers
    begin with alike, if they are several more than all rows share.

    Args:
        name: That of the evaluation data, if it is one of several.
    """
    both = (train, evaluation)
    if not all(map(is_prepared, both)):
        return ()
    if all("prompt" in each.column_names for each in both):
        known, prompts = ({hash(json.dumps(value)) for value in each["prompt"] if value} for each in both)
    else:
        least = [4 * (measure(each).shared_prefix + _PROMPT) for each in both]
        known, prompts = (
            {hash(ids) for ids in _shared_prompts(each, 0) if len(ids) >= size}
            for each, size in zip(both, least, strict=True)
        )
    shared = len(known & prompts) if len(known | prompts) > 1 else 0  # one prompt for all rows is none
    if shared:
        of = f" of {name!r}" if name else ""
        logger.warning(f"{shared:,} of {len(prompts):,} evaluation prompts{of} also occur in the training data.")
    return shared, len(prompts)


class ByPrompt(Sampler[int]):
    """Hands out each group's pairs one after another, in another order each epoch, which is the same everywhere.

    The groups' order is random, and so is that of updates: those that one group fills do not follow one another.

    Args:
        group_N: From `prompt_groups`.
        pairs: Of an update, over all processes.
        seed: Of the run.
    """

    def __init__(self, group_N: np.ndarray, pairs: int, seed: int = 0) -> None:
        self._group_N, self._pairs, self._seed, self._epoch = group_N, pairs, seed, 0

    def __len__(self) -> int:
        return len(self._group_N)

    def set_epoch(self, epoch: int) -> None:
        """Choose the next order."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator, count = np.random.default_rng([self._seed, self._epoch]), len(self)
        order_N = np.lexsort((generator.permutation(count), generator.permutation(count)[self._group_N]))
        whole = count - count % self._pairs
        yield from generator.permutation(order_N[:whole].reshape(-1, self._pairs)).ravel().tolist()
        yield from order_N[whole:].tolist()
        self._epoch += 1
