"""Prepare rows for training: add columns with the token ids of their answers, as in TRL 1.16."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import transformers
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from . import checks
from .checks import RAW_COLUMNS, PairKind
from .collators import OldPairKind, read_old_row, rename_old_columns
from .formats import apply_template, convert_row, template_arguments
from .length_stats import (
    OLD_KEYS,
    PAIR,
    RANKING,
    SOLUTION,
    answers_of,
    length_stats,
    read_table,
    row_format_of,
    select,
    tables_of,
)
from .loader import main_processes_first
from .rankings import RankingKind, is_ranking
from .traps import TRAPS, find_traps, report_equal_answers, unread_parts, warn_of_new_traps, warn_of_traps

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
    max_length: int | None,
    num_proc: int | None,
    name: str,
    truncation_mode: str | None = None,
    rankings: RankingKind | None = None,
    are_old: bool = False,
) -> Dataset | IterableDataset:
    """Check and tokenize the rows, and truncate or drop rows that are too long.

    Text gets the tokenizer's end-of-sequence token unless it ends with this token. Messages are rendered with the chat
    template and the row's ``tools`` (a list, or JSON text) and ``chat_template_kwargs``; no token is added. An
    explicit ``prompt`` is put before each answer. All other columns are unchanged, whereas TRL writes the
    end-of-sequence token into the text columns.

    Args:
        dataset: Rows in any form that `checks` accepts. A stream is checked and tokenized while it is read.
        processing_class: The tokenizer, with the special tokens and the chat template of the training.
        num_embeddings: Rows of the model's embedding table; token ids must be smaller.
        max_length: Maximum number of tokens of an answer with its prompt; None sets no limit.
        num_proc: Worker processes for a dataset (not for a stream).
        name: Name of the dataset in errors and logs, such as "train".
        truncation_mode: How to truncate rows, see `keep_fitting`.
        rankings: Rules for rows with ranked answers; by default ties are rejected.
        are_old: Whether to tokenize as TRL up to 0.23: without the prompt and without an added end-of-sequence token.

    Returns:
        The dataset with the columns ``chosen_ids`` and ``rejected_ids``, or with ``answer_ids`` and ``grades`` for
        ranked answers. It is already measured, see `length_stats`.

    Raises:
        UserTypeError: The argument is not a dataset, or a value has the wrong type.
        UserError: Missing columns, no rows, null or empty values, margins that are not finite, token ids that the
            model lacks, or no row within ``max_length``. Errors give the index of a row in the original dataset.
    """
    dataset, columns = rename_old_columns(dataset, checks.column_names(dataset, name))
    checks.check_one_form(columns, f"The {name} dataset")
    kind, is_tokenized = _kind_of(dataset, columns, name, rankings or RankingKind(), are_old)
    if not is_tokenized:
        kind = OldPairKind(processing_class) if are_old else kind
        if processing_class.eos_token is None:
            logger.warning(f"The tokenizer has no end-of-sequence token, so none is appended to the {name} texts.")
        if are_old and "prompt" in columns:
            logger.warning(
                f"{name} dataset: as in TRL up to 0.23, the column `prompt` is left out of the tokens, so rewards do "
                "not depend on it. Put it at the beginning of both answers, or use TRL's current columns and collator."
            )
        # columns of the same names would impose their types on the new columns
        dataset = dataset.remove_columns([column for column in kind.columns if column in columns])
        settings = {"processing_class": processing_class, "name": name, "kind": kind}
        settings["warned"] = None if isinstance(dataset, Dataset) else set()
        options: dict[str, Any] = {"with_indices": True, "batched": True, "fn_kwargs": settings}
        dataset = map_rows(dataset, _tokenize_rows, num_proc, name, **options)
    elif row_format_of(columns) not in (PAIR, RANKING):
        settings = {"num_embeddings": num_embeddings, "name": name}
        options = {"with_indices": True, "fn_kwargs": settings, "remove_columns": list(OLD_KEYS)}
        dataset = map_rows(dataset, read_old_row, num_proc, name, **options)
    options = {"max_length": max_length, "truncation_mode": truncation_mode, "num_proc": num_proc, "name": name}
    return keep_fitting(dataset, num_embeddings=num_embeddings, kind=kind, **options)


def _kind_of(
    dataset: Dataset | IterableDataset, columns: list[str], name: str, rankings: RankingKind, are_old: bool
) -> tuple[PairKind, bool]:
    """Return the kind of the rows, and whether they are tokenized.

    Raises:
        UserError: Columns are missing, columns or settings have no effect for this kind, or a stream has rankings or
            single answers.
    """
    has_token_pairs = set(PAIR) <= set(columns) or bool(set(OLD_KEYS) & set(columns))
    first, _ = convert_row(dataset[0] if isinstance(dataset, Dataset) else dict.fromkeys(columns, ""))
    ids = first["answer_ids"] if row_format_of(columns) == RANKING and not has_token_pairs else None
    has_token_rankings = ids is not None and not isinstance(next(iter(ids), None), str | int)  # else an extra column
    is_raw_ranking = is_ranking(first) and not are_old and not has_token_pairs
    if not (rankings.attributes or has_token_rankings or is_raw_ranking):
        checks.check_columns([*first], name)
        if rankings.settings:
            raise UserError(
                f"{', '.join(rankings.settings)}: only rankings use these settings, and the {name} dataset has "
                "pairs. Leave them out, or give `completions` with `scores` or `ranks`."
            )
        return PairKind(), has_token_pairs
    answers = first["answer_ids"] if has_token_rankings else first.get("completions")
    rankings = replace(rankings, has_single_answers=isinstance(answers, list) and len(answers) == 1)
    rankings.check_dataset(dataset, columns, name)
    # several rejected answers to one chosen answer are tied
    return replace(rankings, may_tie=rankings.may_tie or set(RAW_COLUMNS) <= set(columns)), has_token_rankings


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


def _of_code(code: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function``; ``code`` serves only to distinguish the hashes of such calls."""
    return function(*args, **kwargs)


def _tokenize_rows(
    batch: Mapping[str, Any],
    indices: list[int],
    processing_class: PreTrainedTokenizerBase,
    name: str,
    kind: PairKind,
    warned: set[str] | None,
) -> dict[str, list[Any]]:
    """Tokenize raw rows. Their traps are put into a column, or logged for a stream if not yet in ``warned``."""
    rows_N = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    rows, forms = zip(*map(convert_row, rows_N), strict=True)
    answers_N = [kind.raw_answers(row, checks.row_of(at, name)) for at, row in zip(indices, rows, strict=True)]
    checked = list(zip(indices, rows, answers_N, strict=True))
    texts = [kind.with_prompt(row, text, processing_class) for _, row, answers in checked for text in answers.values()]
    if all(isinstance(text, str) for text in texts):
        tokenized: Any = ((ids, []) for ids in processing_class(text=texts, return_attention_mask=False)["input_ids"])
    else:  # rows of a stream may mix text and messages
        sources = ((row, checks.row_of(at, name, place)) for at, row, answers in checked for place in answers)
        tokenized = (
            tokenize_conversation(text, processing_class, *source) for text, source in zip(texts, sources, strict=True)
        )
    prepared = list[dict[str, Any]]()
    for at, row, answers, converted in zip(indices, rows, answers_N, forms, strict=True):
        ids_K, unread_K = zip(*islice(tokenized, len(answers)), strict=True)
        columns, traps = kind.tokenized(row, [*ids_K], checks.row_of(at, name)), list[str]()
        if kind.has_traps:
            traps = [f"form {form}" for form in converted]
            traps += [*chain(*unread_K), *find_traps(row, [*answers.values()], [*ids_K], processing_class)]
        if warned is None:
            columns[TRAPS] = "\n".join(dict.fromkeys(traps))
        else:
            traps += ["same answers"] * (ids_K[1:] == ids_K[:-1])
            warn_of_new_traps(traps, warned, f"{name} dataset: in row {at}")
        prepared.append(columns)
    return {column: [row[column] for row in prepared] for column in prepared[0]}


def tokenize_conversation(
    dialogue: str | list[dict[str, Any]], processing_class: PreTrainedTokenizerBase, row: Mapping[str, Any], where: str
) -> tuple[list[int], list[str]]:
    """Tokenize one text or one conversation; return the ids, and traps of parts that the chat template does not write.

    Args:
        dialogue: A complete text (see `checks.with_eos`), or messages that `checks.check_conversation` accepts.
        processing_class: The tokenizer.
        row: The row; messages are rendered with its ``tools`` and ``chat_template_kwargs``, if any.
        where: Beginning of error messages.

    Raises:
        UserError: The messages cannot be rendered.
    """
    if isinstance(dialogue, str):
        return processing_class(text=dialogue, return_attention_mask=False)["input_ids"], []
    with checks.rendering(f"{where}, whose roles are {[message['role'] for message in dialogue]},"):
        variables = template_arguments(row.get("tools"), row.get("chat_template_kwargs"))
        if type(processing_class).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
            # Mistral's tokenizer: tokenizing its rendered text would give different tokens
            settings: Any = variables | {"tokenize": True, "return_dict": True}
            tokens: Any = processing_class.apply_chat_template(dialogue, **settings)
            return tokens["input_ids"], []
        render: Callable[..., str] = partial(apply_template, processing_class, **variables)
        text = render(dialogue)
        unread = unread_parts(dialogue, variables, text, render)
    # outside the time limit of rendering, since long texts take longer
    return processing_class(text=text, add_special_tokens=False, return_attention_mask=False)["input_ids"], unread


def keep_fitting(
    dataset: Dataset | IterableDataset,
    *,
    num_embeddings: int,
    max_length: int | None,
    name: str,
    truncation_mode: str | None = None,
    num_proc: int | None = None,
    kind: PairKind | None = None,
) -> Dataset | IterableDataset:
    """Check token ids and labels, and truncate or drop rows that are too long.

    The log counts these rows, rows with traps, and rows with equal answers.

    Args:
        dataset: Tokenized rows. A stream is checked while it is read; nothing is logged for it.
        num_embeddings: Rows of the model's embedding table.
        max_length: Maximum number of tokens per answer; None sets no limit.
        name: Name of the dataset in the log.
        truncation_mode: "keep_start" removes the tokens after ``max_length``. "keep_end" removes the first tokens:
            the same number from all answers of a row, so that a shared prefix stays shared. None truncates nothing.
        num_proc: Worker processes for truncation.
        kind: Kind of the rows, to check their labels; None if the labels are already checked.

    Returns:
        The rows that fit. A dataset (not a stream) is measured in the same pass, see `length_stats`.

    Raises:
        UserTypeError: A column does not hold lists of integers.
        UserError: An answer has no tokens, the model lacks a token id, or no row fits.
    """
    original, truncates = dataset, truncation_mode is not None and max_length is not None
    if truncates:
        limit = {"max_length": max_length, "truncation_mode": truncation_mode}
        dataset = map_rows(dataset, _cut, num_proc, name, fn_kwargs=limit)
    if isinstance(dataset, IterableDataset):
        settings = {"num_embeddings": num_embeddings, "max_length": max_length, "name": name, "kind": kind}
        return dataset.filter(_fits, with_indices=True, fn_kwargs=settings)
    dataset, traps_N = warn_of_traps(dataset, name)
    first = 0
    for table in tables_of(dataset):
        checks.check_tokens(table, first, num_embeddings, name)
        if kind is not None:
            for index, row in enumerate(read_table(table), start=first):
                kind.check_labels(row, checks.row_of(index, name))
        first += len(table)
    longest_N = length_stats(dataset).lengths.longest_P
    fits_N = longest_N <= (np.inf if max_length is None else max_length)
    dropped = len(longest_N) - fits_N.sum()
    if not fits_N.any():
        raise UserError(
            f"The {name} dataset is empty after filtering: all {dropped} pairs were dropped, since a pair is kept "
            f"only when both sequences have at most max_length={max_length} tokens, and the shortest pair has "
            f"{longest_N.min()}. Raise `max_length`, or set it to None to keep all pairs."
        )
    if dropped:
        logger.warning(
            f"{name} dataset: {dropped} of {len(longest_N)} pairs dropped, since a sequence is longer than "
            f"max_length={max_length} tokens (the longest, of row {longest_N.argmax()}, has {longest_N.max()}). Raise "
            "`max_length` to keep them."
        )
        dataset = select(dataset, fits_N)
    if truncates:
        cut = (length_stats(original).lengths.longest_P > max_length).sum() - dropped
        logger.warning(f"{name} dataset: {cut} of {len(longest_N)} pairs truncated to max_length={max_length} tokens.")
    lengths = length_stats(dataset).lengths
    same_N = np.flatnonzero(lengths.sizes_P == lengths.prefix_P)
    if len(same_N) and row_format_of(dataset.column_names) != SOLUTION and length_stats(dataset).answers > 1:
        first = int(np.flatnonzero(fits_N)[same_N[0]])
        report_equal_answers(dataset[int(same_N[0])], traps_N[first], len(same_N), len(dataset), first, name)
    return dataset


def _cut(row: Mapping[str, Any], max_length: int, truncation_mode: str) -> dict[str, Any]:
    """Return the columns of a row's truncated answers; none if the answers stay unchanged.

    Answers stay unchanged if truncation would make them empty or equal; the row is then dropped as too long. Values
    that are not lists also stay unchanged; their check then rejects them.
    """
    answers = [() if ids is None else ids for ids in answers_of(row)]
    excess = max(map(len, answers)) - max_length
    first = excess if truncation_mode == "keep_end" else 0
    cut = [list(ids[first : first + max_length]) for ids in answers]
    if excess <= 0 or not all(cut) or all(ids == cut[0] for ids in cut):
        return {}
    return dict(zip(PAIR, cut, strict=True)) if row_format_of(row) == PAIR else {"answer_ids": cut}


def _fits(
    row: Mapping[str, Any], index: int, num_embeddings: int, max_length: int | None, name: str, kind: PairKind
) -> bool:
    """Check a row of a stream, and return whether it is short enough."""
    checks.check_row_ids(row, index, num_embeddings, name)
    kind.check_labels(row, checks.row_of(index, name))
    return max_length is None or max(map(len, answers_of(row))) <= max_length
