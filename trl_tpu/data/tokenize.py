"""Prepare rows for training: add columns with the token ids of their answers, as in TRL 1.16."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from itertools import compress, cycle
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from . import checks
from .checks import TRAPS, Row, warn_of_new_traps, warn_of_traps
from .formats import convert_row
from .kinds import Answers, Pairs, Rankings, RowKind, check_one_form
from .length_stats import RAW_BY_PREPARED, STATS, length_stats, length_stats_of, parts_of

logger = logging.getLogger(__name__)

_SOURCES = sorted(Path(__file__).parents[1].rglob("*.py"))
#: Hash of this package's source, read on import. Results that outlive a process, such as tokens, depend on it.
CODE = sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()

_STREAM_BATCH = 16  # rows tokenized at once from a stream: few, so that the first batch is ready soon


def prepare_preference_dataset(
    dataset: Dataset | IterableDataset,
    processing_class: PreTrainedTokenizerBase,
    *,
    num_embeddings: int,
    num_positions: float = math.inf,
    max_length: int | None,
    num_proc: int | None,
    name: str,
    truncation_mode: str | None = None,
    kinds: Sequence[RowKind] = (Pairs(), Rankings(), Answers()),
    with_settings: Callable[[RowKind], RowKind] = lambda kind: kind,
) -> Dataset | IterableDataset:
    """Check and tokenize the rows, and truncate or drop rows that are too long.

    Text gets the tokenizer's end-of-sequence token unless it ends with this token. Messages are rendered with the chat
    template and the row's ``tools`` (a list, or JSON text) and ``chat_template_kwargs``; no token is added. An
    explicit ``prompt`` is put before each answer. All other columns are unchanged, whereas TRL writes the
    end-of-sequence token into the text columns. Solutions keep no other columns.

    Args:
        dataset: Rows in any form that `trl_tpu.data.kinds` reads. A stream is checked and tokenized while it is read.
        processing_class: The tokenizer, with the special tokens and the chat template of the training.
        num_embeddings: Rows of the model's embedding table; token ids must be smaller.
        num_positions: Number of tokens that the model can read; no sequence within ``max_length`` may be longer.
        max_length: Maximum number of tokens of an answer with its prompt; None sets no limit.
        num_proc: Worker processes for a dataset (not for a stream).
        name: Name of the dataset in errors and logs, such as "train".
        truncation_mode: "keep_start" removes the tokens after ``max_length``. "keep_end" removes the first tokens:
            the same number from all answers of a row, so that a shared prefix stays shared. None truncates nothing.
        kinds: The kinds of rows that are accepted.
        with_settings: Returns a kind with its settings.

    Returns:
        The dataset with the columns of its kind. It is already measured, see `length_stats`.

    Raises:
        UserTypeError: A value has the wrong type.
        UserError: Missing columns, no rows, null or empty values, labels that cannot be learned, token ids or
            positions that the model lacks, or no row within ``max_length``. Errors give the index of a row in the
            original dataset.
    """
    raw, columns = dataset, checks.column_names(dataset, name)
    if len(kinds) > 1:
        check_one_form(columns, f"The {name} dataset")
    # a stream is not read: its columns decide
    placeholders = {column: 0.0 if column in ("label", "score") else "" for column in columns}
    first, _ = convert_row(dataset[0] if isinstance(dataset, Dataset) else placeholders)
    tokenized = next((kind for kind in kinds if kind.is_tokenized(first)), None)
    kind = tokenized or next((kind for kind in kinds if kind.is_raw(first)), kinds[0])
    if isinstance(dataset, IterableDataset) and not kind.are_pairs:
        raise UserError(f"The {name} dataset is a stream of {kind.name}: load it without streaming, as a `Dataset`.")
    kind = with_settings(kind).check_dataset(first, name)
    if tokenized is None:
        if processing_class.eos_token is None and not kind.has_own_tokens:
            logger.warning(f"The tokenizer has no end-of-sequence token, so none is appended to the {name} texts.")
        if not kind.has_own_tokens:  # columns of the same names would impose their types on the new columns
            dataset = dataset.remove_columns([column for column in kind.columns if column in columns])
        arguments = {"processing_class": processing_class, "name": name, "kind": kind}
        arguments["warned"] = None if isinstance(dataset, Dataset) else set()
        raw_only = [column for column in columns if kind.has_own_tokens or column in kind.raw_columns]
        options: Any = {"fn_kwargs": arguments, "features": kind.features(dataset), "remove_columns": raw_only}
        dataset = map_rows(dataset, _tokenize_rows, num_proc, name, with_indices=True, batched=True, **options)
    elif kind.has_own_tokens:
        dataset = dataset.select_columns([*kind.columns])
    limits: dict[str, Any] = {"name": name, "kind": kind}
    limits |= {"num_embeddings": num_embeddings, "num_positions": num_positions}
    limits["max_length"] = None if kind.has_own_tokens else max_length  # else truncated while tokenized
    original, truncates = dataset, truncation_mode is not None and limits["max_length"] is not None
    if truncates:
        arguments = {"max_length": max_length, "truncation_mode": truncation_mode, "kind": kind}
        dataset = map_rows(dataset, _cut, num_proc, name, fn_kwargs=arguments)
    if isinstance(dataset, IterableDataset):
        return dataset.filter(_fits, with_indices=True, fn_kwargs=limits)
    prepared = keep_fitting(warn_of_traps(dataset, name), **limits)
    if truncates:
        cut = (length_stats(original).lengths.longest_N > max_length).sum() - len(dataset) + len(prepared)
        logger.warning(
            f"{name} dataset: {cut} of {len(dataset)} {kind.name} truncated to max_length={max_length} tokens."
        )
    if kind.has_own_tokens:
        RAW_BY_PREPARED[prepared] = raw
    kind.check_prepared(prepared, name)
    return prepared


def map_rows(
    dataset: Any, function: Callable[..., Any], num_proc: int | None, name: str, **settings: Any
) -> Dataset | IterableDataset:
    """Map the rows of a dataset, in the main process first; map a stream while it is read."""
    if isinstance(dataset, IterableDataset):
        return dataset.map(function, batch_size=_STREAM_BATCH, **settings)
    # `datasets` caches the result, but its hash of a function in a module has the function's name only
    function = partial(_of_code, f"{CODE} {transformers.__version__} {tokenizers.__version__}", function)
    with main_processes_first():
        return dataset.map(function, num_proc=num_proc, desc=f"Tokenizing {name} dataset", **settings)


@contextmanager
def main_processes_first() -> Iterator[None]:
    """Run the context in the main process first, then in each node's main process, then in all other processes.

    Later processes find the result in a cache. With a single accelerate process, as on XLA, where one process drives
    all devices of a host, no process waits: hosts need not share a cache.
    """
    if not torch.distributed.is_initialized() or PartialState().num_processes == 1:
        yield
        return
    with PartialState().main_process_first(), PartialState().local_main_process_first():
        yield


def _of_code(code: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function``; ``code`` serves only to distinguish the hashes of such calls."""
    return function(*args, **kwargs)


def _tokenize_rows(
    batch: Mapping[str, Any],
    indices: list[int],
    processing_class: PreTrainedTokenizerBase,
    name: str,
    kind: RowKind,
    warned: set[str] | None,
) -> dict[str, list[Any]]:
    """Tokenize raw rows. Their traps are put into a column, or logged for a stream if not yet in ``warned``."""
    rows_N = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    prepared = list[dict[str, Any]]()
    places = [checks.row_of(at, name) for at in indices]
    for at, (columns, traps) in zip(indices, kind.tokenize(rows_N, places, processing_class), strict=True):
        ids_K = kind.answers(columns)
        traps += ["same answers"] * (len(ids_K) > 1 and ids_K[1:] == ids_K[:-1])
        if warned is None:
            columns = columns | {TRAPS: "\n".join(dict.fromkeys(traps))}
        else:
            warn_of_new_traps(traps, warned, f"{name} dataset: in row {at}")
        prepared.append(columns)
    return {column: [row[column] for row in prepared] for column in prepared[0]}


def keep_fitting(
    dataset: Dataset, num_embeddings: int, num_positions: float, name: str, kind: RowKind, max_length: int | None
) -> Dataset:
    """Check token ids and labels, drop rows that are too long, and log their number.

    Args:
        dataset: Tokenized rows.
        num_embeddings: Rows of the model's embedding table.
        num_positions: Number of tokens that the model can read.
        name: Name of the dataset in the log.
        kind: Kind of the rows.
        max_length: Maximum number of tokens per answer; None sets no limit.

    Returns:
        The rows that fit. They are measured in the same pass, see `length_stats`.

    Raises:
        UserTypeError: A column does not hold lists of integers.
        UserError: An answer has no tokens, the model lacks a token id or a position, or no row fits.
    """
    longest, fits = list[int](), list[bool]()  # of each row

    def fitting_rows() -> Iterator[list[dict[str, Any]]]:
        for rows in parts_of(dataset):
            numbered = enumerate(rows, start=len(fits))
            sizes = num_embeddings, num_positions
            fits.extend(_fits(row, at, *sizes, name, kind, max_length) for at, row in numbered)
            longest.extend(max(map(len, kind.answers(row))) for row in rows)
            yield list(compress(rows, fits[-len(rows) :]))

    stats = length_stats_of(fitting_rows())  # one pass: tables of a selection are slow to read
    longest_N, dropped = np.array(longest), fits.count(False)
    if not any(fits):
        raise UserError(
            f"The {name} dataset is empty after filtering: all {dropped} {kind.name} were dropped, since a row is "
            f"kept only if each of its sequences has at most max_length={max_length} tokens, and the shortest row has "
            f"{longest_N.min()}. Raise `max_length`, or set it to None to keep all rows."
        )
    if dropped:
        logger.warning(
            f"{name} dataset: {dropped} of {len(longest_N)} {kind.name} dropped, since a sequence is longer than "
            f"max_length={max_length} tokens (the longest, of row {longest_N.argmax()}, has {longest_N.max()}). Raise "
            "`max_length` to keep them."
        )
        dataset = dataset.select(np.flatnonzero(fits))
    STATS[dataset] = stats
    return dataset


def _cut(row: Mapping[str, Any], max_length: int, truncation_mode: str, kind: RowKind) -> dict[str, Any]:
    """Return the columns of a row's truncated answers; none if the answers stay unchanged.

    Answers stay unchanged if truncation would make them empty or equal; the row is then dropped as too long.
    """
    answers = kind.answers(row)
    excess = max(map(len, answers)) - max_length
    first = excess if truncation_mode == "keep_end" else 0
    cut = [list(ids[first : first + max_length]) for ids in answers]
    if excess <= 0 or not all(cut) or (len(cut) > 1 and all(ids == cut[0] for ids in cut)):
        return {}
    return kind.with_answers(cut)


def _fits(
    row: Row, index: int, num_embeddings: int, num_positions: float, name: str, kind: RowKind, max_length: int | None
) -> bool:
    """Check a row's token ids, see `check_ids`, its labels and its length, and return whether it is short enough."""
    answers = kind.answers(row)
    for column, ids in zip(cycle(kind.token_columns), answers, strict=False):
        checks.check_ids(ids, checks.row_of(index, name, column), num_embeddings)
    kind.check_labels(row, checks.row_of(index, name))
    longest = max(map(len, answers))
    is_short = max_length is None or longest <= max_length
    if is_short and longest > num_positions:
        raise UserError(
            f"A sequence of {longest} tokens, in row {index} of the {name} dataset, is longer than the model's "
            f"{num_positions} positions (`max_position_embeddings`). Set max_length={num_positions} to drop such rows."
        )
    return is_short
