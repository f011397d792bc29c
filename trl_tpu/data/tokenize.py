"""Prepare preference rows: the token ids of their answers, as TRL 1.16 makes them, in columns of their own."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch.distributed
from accelerate import PartialState
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from ..errors import UserError
from . import checks
from .checks import TRAPS, find_traps, warn, warn_of_traps
from .formats import apply_template, convert_row, read_tools, template_variables
from .measure import (
    ANSWERS,
    PAIR,
    RANKING,
    SOLUTION,
    form_of,
    longest_of,
    measure_tables,
    raw_tables_of,
    read_row,
    read_table,
    remember,
    tables_of,
)
from .row_formats import OLD_IDS, Pairs, Rankings, is_ranking, old_margin, read_old_columns, render_old, token_columns

logger = logging.getLogger(__name__)

_OLD_TOKEN_COLUMNS = {"chosen_input_ids": "chosen_ids", "rejected_input_ids": "rejected_ids"}
_STREAM_BATCH = 16  # rows tokenized at once from a stream: few, so that the first batch does not wait


def prepare_preference_dataset(
    dataset: Dataset | IterableDataset,
    processing_class: PreTrainedTokenizerBase,
    *,
    num_embeddings: int,
    max_length: int | None,
    num_proc: int | None,
    name: str,
    truncation_mode: str | None = None,
    rankings: Rankings | None = None,
    are_old: bool = False,
) -> Dataset | IterableDataset:
    """Check the rows, tokenize them, and cut or leave out those that are too long.

    Text gets the tokenizer's end-of-sequence token where it does not end with it; messages are rendered by the chat
    template, with the row's ``tools`` (a list, or JSON text) and ``chat_template_kwargs``, and get nothing more. An
    explicit ``prompt`` is put before each answer. All other columns stay as they are (TRL writes the end-of-sequence
    token into the text columns).

    Args:
        dataset: Rows of any form that `checks` accepts. A stream is checked and tokenized row by row as it is read.
        processing_class: The tokenizer, its special tokens and chat template as training shall use them.
        num_embeddings: Rows of the model's embedding table, which token ids must not pass.
        max_length: The most tokens an answer with its prompt may have; None keeps all.
        num_proc: Worker processes for a dataset (not for a stream).
        name: What errors and logs call the dataset, "train" say.
        truncation_mode: See `keep_fitting`.
        rankings: What rows of ranked answers must be; by default without ties.
        are_old: Whether to tokenize as TRL up to 0.23: without the prompt and an added end-of-sequence token.

    Returns:
        The dataset with the columns ``chosen_ids`` and ``rejected_ids``, or ``answer_ids`` and ``grades`` of ranked
        answers, already measured: see `measure.measure`.

    Raises:
        UserTypeError: No dataset, or a value of the wrong type.
        UserError: Missing columns, no rows, null or empty values, margins that are not finite, token ids that the
            model lacks, or no row within ``max_length``. Errors number the rows as they came.
    """
    columns = checks.column_names(dataset, name)
    if set(_OLD_TOKEN_COLUMNS) <= set(columns) and not set(checks.TOKEN_COLUMNS) <= set(columns):
        warnings.warn(
            "The columns `chosen_input_ids` and `rejected_input_ids` are deprecated and will not be supported in v1 "
            "of TRL: rename them to `chosen_ids` and `rejected_ids`.",
            FutureWarning,
            stacklevel=3,
        )
        dataset = dataset.rename_columns(_OLD_TOKEN_COLUMNS)
        columns = [_OLD_TOKEN_COLUMNS.get(column, column) for column in columns]
    checks.check_one_form(columns, f"The {name} dataset")
    form, is_tokenized = _form_of(dataset, columns, name, rankings or Rankings(), are_old)
    if isinstance(form, Rankings):
        if unused := [column for column in Pairs.label_columns if column in columns]:
            raise UserError(
                f"The {name} dataset has rankings, whose loss does not use the column `{unused[0]}`. Drop the column: "
                f"`dataset.remove_columns({unused})`."
            )
        if set(checks.RAW_COLUMNS) <= set(columns):  # prepared from one chosen answer and several rejected ones
            form = replace(form, may_tie=True)
    elif rankings is not None:
        rankings.check_pairs(name)
    if not is_tokenized:
        if processing_class.eos_token is None:
            logger.warning(f"The tokenizer has no end-of-sequence token, so none is added to the {name} texts.")
        if are_old and "prompt" in columns:
            logger.warning(
                f"{name} dataset: as in TRL up to 0.23, the column `prompt` is left out of the tokens, so rewards do "
                "not see it. Put it at the beginning of both dialogues, or use today's columns and collator."
            )
        written = RANKING if isinstance(form, Rankings) else PAIR  # a user's column would lend them its type
        dataset = dataset.remove_columns([column for column in written if column in columns])
        settings = {"processing_class": processing_class, "name": name, "form": form, "are_old": are_old}
        settings["warned"] = None if isinstance(dataset, Dataset) else set()
        dataset = map_rows(
            dataset, _tokenize_rows, num_proc, name, with_indices=True, batched=True, fn_kwargs=settings
        )
        dataset = warn_of_traps(dataset, name) if isinstance(dataset, Dataset) else dataset
    elif form_of(columns) not in (PAIR, RANKING):
        with main_processes_first():
            dataset = read_old_columns(dataset, num_embeddings, name)
    more: dict[str, Any] = {"max_length": max_length, "truncation_mode": truncation_mode, "num_proc": num_proc}
    more |= {"name": name, "rankings": form if isinstance(form, Rankings) and is_tokenized else None}
    return keep_fitting(dataset, num_embeddings=num_embeddings, **more)


def _form_of(
    dataset: Dataset | IterableDataset, columns: list[str], name: str, rankings: Rankings, are_old: bool
) -> tuple[Pairs | Rankings, bool]:
    """Return the form of rows, and whether they are tokenized."""
    first, _ = convert_row(dataset[0] if isinstance(dataset, Dataset) else dict.fromkeys(columns, ""))
    tokens = token_columns(columns, name)
    ids = first.get("answer_ids") if form_of(columns) == RANKING and not tokens else None
    is_tokenized = ids is not None and not isinstance(next(iter(ids), None), str | int)  # else an extra column
    if not (rankings.attributes or is_tokenized or (is_ranking(first) and not are_old and not tokens)):
        if tokens != OLD_IDS:
            checks.check_columns([*first], name)
        return Pairs(), bool(tokens)
    if isinstance(dataset, IterableDataset):
        raise UserError(
            f"The {name} dataset is a stream of rankings, and nothing says how many answers a row may have. Make "
            "it a dataset: `datasets.Dataset.from_list(list(stream.take(n)))`."
        )
    return rankings, is_tokenized


def map_rows(
    dataset: Dataset | IterableDataset,
    function: Callable[..., Any],
    num_proc: int | None,
    name: str,
    **settings: Any,
) -> Dataset | IterableDataset:
    """Map the rows of a dataset, in the main process first; those of a stream as they are read."""
    if isinstance(dataset, IterableDataset):
        return dataset.map(function, batch_size=_STREAM_BATCH, **settings)
    with main_processes_first():
        return dataset.map(function, num_proc=num_proc, desc=f"Tokenizing {name} dataset", **settings)


@contextmanager
def main_processes_first() -> Iterator[None]:
    """Let the main process work first, then that of each node, then all: the others find its work in a cache.

    Where one process drives all devices of a host, as on XLA, none is waited for: hosts need not share a cache.
    """
    if not torch.distributed.is_initialized() or PartialState().num_processes == 1:
        yield
        return
    with PartialState().main_process_first(), PartialState().local_main_process_first():
        yield


def _rows(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    columns = {key: batch[key] for key in batch}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _tokenize_rows(
    batch: Mapping[str, Any],
    indices: list[int],
    processing_class: PreTrainedTokenizerBase,
    name: str,
    form: Pairs | Rankings,
    are_old: bool,
    warned: set[str] | None,
) -> dict[str, list[Any]]:
    """Tokenize raw rows. Their traps are a column or, of a stream, logged if they are not in ``warned`` yet."""
    rows, converted = zip(*map(convert_row, _rows(batch)), strict=True)
    answers = [form.raw_answers(row, checks.row_of(index, name)) for index, row in zip(indices, rows, strict=True)]
    if are_old:
        answers = [
            render_old(row, checks.row_of(index, name), processing_class)
            for index, row in zip(indices, rows, strict=True)
        ]
    dialogues = [
        (
            answer if are_old else with_prompt(with_eos(answer, processing_class), row),
            row,
            checks.row_of(index, name, place),
        )
        for index, row, places in zip(indices, rows, answers, strict=True)
        for place, answer in places.items()
    ]
    if all(isinstance(dialogue, str) for dialogue, *_ in dialogues):
        texts = [dialogue for dialogue, *_ in dialogues]
        ids = iter(processing_class(text=texts, return_attention_mask=False)["input_ids"])
    else:  # a stream may have rows of both forms
        ids = (tokenize_dialogue(dialogue, processing_class, row, where) for dialogue, row, where in dialogues)
    prepared = list[dict[str, Any]]()
    for index, row, each, forms in zip(indices, rows, answers, converted, strict=True):
        ids_K = list(islice(ids, len(each)))
        columns = {**form.prepared(row, ids_K), **(old_margin(row, index, name) if are_old else {})}
        traps = "" if are_old else find_traps(row, forms, [*each.values()], ids_K, processing_class)
        prepared.append({**columns, **({TRAPS: traps} if warned is None else {})})
        if warned is not None:
            lines = traps.splitlines() + ["same answers"] * (ids_K[1:] == ids_K[:-1])
            for key, trap in (line.split(" ", 1) for line in lines if line not in warned):
                warn(key, [trap], f"{name} dataset: in row {index}, and perhaps in later ones")
            warned.update(lines)
    return {column: [row[column] for row in prepared] for column in prepared[0]}


def with_prompt(dialogue: Any, row: Mapping[str, Any]) -> Any:
    """Put a row's prompt, if it has one, before one of its answers."""
    return row["prompt"] + dialogue if "prompt" in row else dialogue


def with_eos(dialogue: Any, processing_class: PreTrainedTokenizerBase) -> Any:
    """Put the end-of-sequence token after a text that does not end with it; messages stay as they are."""
    eos = processing_class.eos_token or ""
    return dialogue + eos if isinstance(dialogue, str) and not dialogue.endswith(eos) else dialogue


def tokenize_dialogue(
    dialogue: str | list[dict[str, Any]], processing_class: PreTrainedTokenizerBase, row: Mapping[str, Any], where: str
) -> list[int]:
    """Tokenize one dialogue.

    Args:
        dialogue: A whole text (see `with_eos`), or messages that `checks.check_dialogue` accepts.
        processing_class: The tokenizer.
        row: May hold ``tools`` and ``chat_template_kwargs``, with which messages are rendered.
        where: How errors begin.

    Raises:
        UserError: The messages cannot be rendered.
    """
    if isinstance(dialogue, str):
        return processing_class(text=dialogue, return_attention_mask=False)["input_ids"]
    with checks.rendering(f"{where}, whose roles are {[message['role'] for message in dialogue]},"):
        tools, variables = row.get("tools"), row.get("chat_template_kwargs")
        if type(processing_class).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
            # Mistral's, whose tokens are not those of the text that it renders
            settings = {**template_variables(variables), "tools": read_tools(tools), "tokenize": True}
            tokens: Any = processing_class.apply_chat_template(dialogue, **settings, return_dict=True)
            return tokens["input_ids"]
        text = apply_template(processing_class, dialogue, tools=tools, chat_template_kwargs=variables)
    # outside of the time limit of a rendering: a long text takes its time
    return processing_class(text=text, add_special_tokens=False, return_attention_mask=False)["input_ids"]


def keep_fitting(
    dataset: Dataset | IterableDataset,
    *,
    num_embeddings: int,
    max_length: int | None,
    name: str,
    truncation_mode: str | None = None,
    num_proc: int | None = None,
    rankings: Rankings | None = None,
) -> Dataset | IterableDataset:
    """Check the token ids, and cut or leave out rows that are too long; count them, and rows of equals, in the log.

    Args:
        dataset: Of tokenized rows. A stream is checked, its margins too, as it is read, and nothing is logged of it.
        num_embeddings: Rows of the model's embedding table.
        max_length: The most tokens an answer may have; None keeps all.
        name: What the log calls the dataset.
        truncation_mode: "keep_start" cuts what is beyond ``max_length``, "keep_end" the first tokens: of all answers
            of a row as many as the longest has too many, so that what they share stays shared. None cuts nothing.
        num_proc: Worker processes that cut.
        rankings: What the grades of rankings must be, where they have not been checked.

    Returns:
        The rows that fit; those of a dataset measured in the same pass: see `measure.measure`.

    Raises:
        UserTypeError: A column does not hold lists of integers.
        UserError: An answer without tokens, an id that the model lacks, or no row that fits.
    """
    whole = dataset
    if truncation_mode is not None and max_length is not None:
        limit = {"max_length": max_length, "truncation_mode": truncation_mode}
        dataset = map_rows(dataset, _cut, num_proc, name, fn_kwargs=limit)
    if isinstance(dataset, IterableDataset):
        settings = {"num_embeddings": num_embeddings, "max_length": max_length, "name": name}
        return dataset.filter(_fits, with_indices=True, fn_kwargs=settings)
    longest: list[np.ndarray] = []

    def fitting() -> Iterator[pa.Table]:
        first = 0
        for raw in raw_tables_of(dataset):
            _check_ids(raw, first, num_embeddings, name)
            table = read_table(raw)
            for index, row in enumerate(table.drop([ANSWERS]).to_pylist(), start=first):
                checks.check_labels(row, index, name)
                if rankings is not None:
                    answers, where = len(raw["answer_ids"][index - first]), checks.row_of(index, name)
                    rankings.check_grades(row["grades"], answers, where, "grades")
            longest.append(longest_of(table[ANSWERS]))
            first += len(table)
            yield table if max_length is None else table.filter(pa.array(longest[-1] <= max_length))

    measured = measure_tables(fitting())
    longest_N = np.concatenate(longest)
    kept_N = np.flatnonzero(longest_N <= (np.inf if max_length is None else max_length))
    kept, dropped = len(kept_N), len(longest_N) - len(kept_N)
    if not kept:
        raise UserError(
            f"The {name} dataset is empty after filtering: all {dropped} pairs were dropped, since a pair is kept "
            f"only when both dialogues have at most max_length={max_length} tokens, and the shortest pair has "
            f"{longest_N.min()}. Raise `max_length`, or set it to None to keep all pairs."
        )
    if dropped:
        logger.warning(
            f"{name} dataset: {dropped} of {len(longest_N)} pairs dropped, since a dialogue is longer than "
            f"max_length={max_length} tokens (the longest, of row {longest_N.argmax()}, has {longest_N.max()}). Raise "
            "`max_length` to keep them."
        )
        dataset = dataset.select(kept_N)
    if truncation_mode is not None and max_length is not None:
        longest_N = np.concatenate([longest_of(table[ANSWERS]) for table in tables_of(whole)])
        cut = (longest_N > max_length).sum() - dropped
        logger.warning(f"{name} dataset: {cut} of {len(longest_N)} pairs cut to max_length={max_length} tokens.")
    same_N = np.flatnonzero(measured.sizes_N == measured.lengths.prefix_P)
    if len(same_N) and form_of(dataset.column_names) != SOLUTION:
        checks.report_equal_answers(dataset[int(same_N[0])], len(same_N), kept, int(kept_N[same_N[0]]), name)
    remember(dataset, measured)
    return dataset


def _check_ids(table: pa.Table, first: int, num_embeddings: int, name: str) -> None:
    """Check the token ids of raw columns, whose rows are numbered from ``first`` on."""
    rows_N = first + np.arange(len(table))
    for column in [column for column in (*PAIR, SOLUTION[0]) if column in table.column_names]:
        checks.check_id_column(table[column], column, rows_N, name, num_embeddings)
    if "answer_ids" in table.column_names:
        rows_D = np.repeat(rows_N, pc.list_value_length(table["answer_ids"]).to_numpy())
        checks.check_id_column(pc.list_flatten(table["answer_ids"]), "answer_ids", rows_D, name, num_embeddings)


def _cut(row: Mapping[str, Any], max_length: int, truncation_mode: str) -> dict[str, Any]:
    """Return what is kept of a row's answers; nothing if they stay as they are.

    So it does where nothing would be left that tells the answers apart, and they are then left out; and where they are
    no lists, which their check says.
    """
    answers = [() if ids is None else ids for ids in read_row(row)[ANSWERS]]
    excess = max(map(len, answers)) - max_length
    first = excess if truncation_mode == "keep_end" else 0
    cut = [list(ids[first : first + max_length]) for ids in answers]
    if excess <= 0 or not all(cut) or all(ids == cut[0] for ids in cut):
        return {}
    return dict(zip(PAIR, cut, strict=True)) if form_of(row) == PAIR else {"answer_ids": cut}


def _fits(row: Mapping[str, Any], index: int, num_embeddings: int, max_length: int | None, name: str) -> bool:
    """Check a streamed pair, and tell whether it is short enough."""
    for column in PAIR:
        checks.check_ids(row[column], checks.row_of(index, name, column), num_embeddings)
    checks.check_labels(row, index, name)
    return max_length is None or max(len(row[column]) for column in PAIR) <= max_length
