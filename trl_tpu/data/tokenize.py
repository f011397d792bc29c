"""Raw preference rows to token pairs: the columns ``chosen_ids`` and ``rejected_ids``, as TRL 1.16 makes them."""

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
from .chat import apply_template, read_tools, template_variables
from .conversion import convert_row
from .judgements import COUNTED, Judgement, Pairs, Rankings, is_ranking
from .measure import dialogues_in, dialogues_of, longest_of, measure_tables, remember, rows_of, tables_of, with_labels
from .traps import TRAPS, find_traps, warn, warn_of_traps

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
) -> Dataset | IterableDataset:
    """Check the rows, tokenize them, and cut or leave out the pairs that are too long.

    Text gets the tokenizer's end-of-sequence token where it does not end with it; messages are rendered by the chat
    template, with the row's ``tools`` (a list, or JSON text) and ``chat_template_kwargs``, and get nothing more. An
    explicit ``prompt`` is put before both answers. Columns of token ids pass through. All other columns stay as they
    are (TRL writes the end-of-sequence token into the text columns).

    Args:
        dataset: Rows of any form that `checks` accepts. A stream is checked and tokenized row by row as it is read.
        processing_class: The tokenizer, its special tokens and chat template as training shall use them.
        num_embeddings: Rows of the model's embedding table, which token ids must not pass.
        max_length: The most tokens a dialogue may have; None keeps all.
        num_proc: Worker processes for a dataset (not for a stream).
        name: What errors and logs call the dataset, "train" say.
        truncation_mode: See `keep_fitting`.
        rankings: What rows of ranked answers must be; by default without ties.

    Returns:
        The dataset with the columns ``chosen_ids`` and ``rejected_ids``, or ``answer_ids`` and ``grades`` of ranked
        answers, already measured: see `measure.measure`.

    Raises:
        UserTypeError: No dataset, or a value of the wrong type.
        UserError: Missing columns, no rows, null or empty values, margins that are not finite, token ids that the
            model lacks, or no pair within ``max_length``. Errors number the rows as they came.
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
    rankings = rankings or Rankings()
    first, _ = convert_row(dataset[0] if isinstance(dataset, Dataset) else dict.fromkeys(columns, ""))
    judgement = rankings if rankings.attributes or is_ranking(first) else Pairs()
    if isinstance(judgement, Rankings):
        if isinstance(dataset, IterableDataset):
            raise UserError(
                f"The {name} dataset is a stream of rankings, and nothing says how many answers a row may have. Make "
                "it a dataset: `datasets.Dataset.from_list(list(stream.take(n)))`."
            )
        if unused := [column for column in Pairs.label_columns if column in columns]:
            raise UserError(
                f"The {name} dataset has rankings, whose loss does not use the column `{unused[0]}`. Drop the column: "
                f"`dataset.remove_columns({unused})`."
            )
        ids = first.get("answer_ids")
        is_tokenized = "grades" in first and ids is not None and not isinstance(next(iter(ids), None), str | int)
        if set(checks.RAW_COLUMNS) <= set(columns):  # prepared from one chosen answer and several rejected ones
            rankings = replace(rankings, may_tie=True)
    else:
        checks.check_columns([*first], name)
        rankings.check_pairs(name)
        is_tokenized = set(judgement.id_columns) <= set(columns)
    if not is_tokenized:
        if processing_class.eos_token is None:
            logger.warning(f"The tokenizer has no end-of-sequence token, so none is added to the {name} texts.")
        written = {*judgement.id_columns, *(("grades",) if isinstance(judgement, Rankings) else ())}
        dataset = dataset.remove_columns([column for column in columns if column in written])  # else it keeps its type
        settings = {"processing_class": processing_class, "name": name, "judgement": judgement}
        settings["warned"] = None if isinstance(dataset, Dataset) else set()
        dataset = map_rows(
            dataset, _tokenize_rows, num_proc, name, with_indices=True, batched=True, fn_kwargs=settings
        )
        dataset = warn_of_traps(dataset, name) if isinstance(dataset, Dataset) else dataset
    if isinstance(judgement, Rankings) and judgement.counts_comparisons:
        dataset = map_rows(dataset, judgement.comparisons_of, num_proc, name, input_columns="grades")
    elif isinstance(judgement, Rankings) and COUNTED in columns:
        dataset = dataset.remove_columns(COUNTED)  # it would be read as ours
    more: dict[str, Any] = {"max_length": max_length, "truncation_mode": truncation_mode, "num_proc": num_proc}
    more |= {"name": name, "rankings": rankings if is_tokenized else None}
    return keep_fitting(dataset, judgement.id_columns, num_embeddings=num_embeddings, **more)


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
    judgement: Judgement,
    warned: set[str] | None,
) -> dict[str, list[Any]]:
    """Tokenize raw rows. Their traps are a column or, of a stream, logged if they are not in ``warned`` yet."""
    rows, converted = zip(*map(convert_row, _rows(batch)), strict=True)
    answers = [
        judgement.raw_answers(row, checks.row_of(index, name)) for index, row in zip(indices, rows, strict=True)
    ]
    dialogues = [
        (with_prompt(with_eos(answer, processing_class), row), row, checks.row_of(index, name, place))
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
        traps = find_traps(row, forms, [*each.values()], ids_K, processing_class)
        prepared.append({**judgement.prepared(row, ids_K), **({TRAPS: traps} if warned is None else {})})
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
    columns: tuple[str, ...],
    *,
    num_embeddings: int,
    max_length: int | None,
    name: str,
    truncation_mode: str | None = None,
    num_proc: int | None = None,
    rankings: Rankings | None = None,
) -> Dataset | IterableDataset:
    """Check the token ids, and cut or leave out pairs that are too long; count them, and pairs of equals, in the log.

    Args:
        dataset: Tokenized pairs. A stream is checked, its margins too, as it is read, and nothing is logged of it.
        columns: The names of the chosen and of the rejected token ids, or that of all answers'.
        num_embeddings: Rows of the model's embedding table.
        max_length: The most tokens a dialogue may have; None keeps all.
        name: What the log calls the dataset.
        truncation_mode: "keep_start" cuts what is beyond ``max_length``, "keep_end" the first tokens: of both
            dialogues as many as the longer one has too many, so that what they share stays shared. None cuts nothing.
        num_proc: Worker processes that cut.
        rankings: What the grades of rankings must be, where they have not been checked.

    Returns:
        The pairs that fit; those of a dataset measured in the same pass: see `measure.measure`.

    Raises:
        UserTypeError: A column does not hold lists of integers.
        UserError: A dialogue without tokens, an id that the model lacks, or no pair that fits.
    """
    whole = dataset
    if truncation_mode is not None and max_length is not None:
        limit = {"columns": columns, "max_length": max_length, "truncation_mode": truncation_mode}
        dataset = map_rows(dataset, _cut, num_proc, name, fn_kwargs=limit)
    if isinstance(dataset, IterableDataset):
        settings = {"columns": columns, "num_embeddings": num_embeddings, "max_length": max_length, "name": name}
        return dataset.filter(_fits, with_indices=True, fn_kwargs=settings)
    longest: list[np.ndarray] = []

    def fitting() -> Iterator[pa.Table]:
        first = 0
        for table in tables_of(dataset, with_labels(columns, dataset)):
            for key, dialogues in dialogues_of(table, columns).items():
                rows_D = first + rows_of(table, columns)[: len(dialogues)]  # of two columns, each has every row
                checks.check_id_column(dialogues, key, rows_D, name, num_embeddings)
            labels = table.drop(list(columns)).to_pylist() if len(columns) == 2 else []
            for index, row in enumerate(labels, start=first):
                checks.check_labels(row, columns, index, name)
            if rankings is not None and "grades" in table.column_names:
                counts = pc.list_value_length(table["answer_ids"]).to_pylist()
                for index, grades in enumerate(table["grades"].to_pylist()):
                    rankings.check_grades(grades, counts[index], checks.row_of(first + index, name), "grades")
            if "labels" in table.column_names:
                checks.check_steps(table, first, name)
            longest.append(longest_of(table, columns))
            first += len(table)
            yield table if max_length is None else table.filter(pa.array(longest[-1] <= max_length))

    measured = measure_tables(fitting(), columns)
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
        longest_N = np.concatenate([longest_of(table, columns) for table in tables_of(whole, columns)])
        cut = (longest_N > max_length).sum() - dropped
        logger.warning(f"{name} dataset: {cut} of {len(longest_N)} pairs cut to max_length={max_length} tokens.")
    if len(same_N := np.flatnonzero(measured.sizes_N == measured.lengths.prefix_P)):
        checks.report_equal_answers(dataset[int(same_N[0])], len(same_N), kept, int(kept_N[same_N[0]]), name)
    remember(dataset, measured)
    return dataset


def _cut(row: Mapping[str, Any], columns: tuple[str, ...], max_length: int, truncation_mode: str) -> dict[str, Any]:
    """Return what is kept of a pair's token ids, and of their masks in the old columns; nothing if it stays as it is.

    So it does where nothing would be left that tells the dialogues apart, and is then left out; and where it is no
    pair, which its check says.
    """
    dialogues = [() if ids is None else ids for ids in dialogues_in(row)]
    excess = max(map(len, dialogues)) - max_length
    first = excess if truncation_mode == "keep_end" else 0
    kept = slice(first, first + max_length)
    cut = [list(ids[kept]) for ids in dialogues]
    if excess <= 0 or not all(cut) or all(ids == cut[0] for ids in cut):
        return {}
    if len(columns) == 1:
        return {columns[0]: cut}
    names = [*columns, *(key.replace("input_ids", "attention_mask") for key in columns)]
    return {key: row[key][kept] for key in names if key in row}


def _fits(
    row: Mapping[str, Any],
    index: int,
    columns: tuple[str, ...],
    num_embeddings: int,
    max_length: int | None,
    name: str,
) -> bool:
    """Check a streamed pair, and tell whether it is short enough."""
    for key in columns:  # of a stream, which has pairs
        checks.check_ids(row[key], checks.row_of(index, name, key), num_embeddings)
    checks.check_labels(row, columns, index, name)
    return max_length is None or max(map(len, dialogues_in(row))) <= max_length
