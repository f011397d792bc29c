"""Preference rows: of every format that TRL's reward trainer takes, as token ids, and as JSON Lines files.

A tiny tokenizer and model for them are here, too.
"""

import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForSequenceClassification

from trl_tpu.data.kinds.solutions import NO_LABEL
from trl_tpu.data.tokenize import prepare_preference_dataset

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% if shout %}LOUD {{ shout }}\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_WEATHER = {"name": "weather", "description": "The weather somewhere", "parameters": _CITY}
TOOLS = [{"type": "function", "function": _WEATHER}]


def tiny_tokenizer(**kwargs: Any) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer without merges: one token per byte, and four special tokens."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(special + alphabet)}, merges=[]))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", **kwargs}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32768, **settings)
    fast.chat_template = TEMPLATE
    return fast


def tiny_config(**kwargs: Any) -> Qwen2Config:
    size = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    size |= {"vocab_size": 260, "intermediate_size": 16, "num_labels": 1, "pad_token_id": 0}
    return Qwen2Config(**size | kwargs)


def tiny_model(**kwargs: Any) -> Qwen2ForSequenceClassification:
    return Qwen2ForSequenceClassification(tiny_config(**kwargs))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def rows_of_every_format() -> dict[str, list[dict[str, Any]]]:
    """Return rows, each with a margin, by the name of their format."""
    answers = [
        ("Sky?", "Blue.", "Green, I think."),
        ("Sum of 2 and 2?", "4", "Fünf 🙂."),
        ("Sun?", "", "In the sea<|im_end|>"),
    ]
    standard = [{"prompt": q + " ", "chosen": good, "rejected": bad} for q, good, bad in answers]
    chat = [{"prompt": [user(q)], "chosen": [assistant(yes)], "rejected": [assistant(no)]} for q, yes, no in answers]

    def implicit(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{key: row["prompt"] + row[key] for key in ("chosen", "rejected")} for row in rows]

    formats = {
        "standard": standard,
        "standard, implicit prompt": implicit(standard),
        "conversational": chat,
        "conversational, implicit prompt": implicit(chat),
        "tools as a list": [{**row, "tools": TOOLS} for row in chat],
        "tools as JSON": [{**row, "tools": json.dumps(TOOLS)} for row in implicit(chat)],
        "no tools in one row": [{**row, "tools": TOOLS if i else None} for i, row in enumerate(chat)],
        "chat_template_kwargs": [row | {"chat_template_kwargs": {"shout": "AB"[i % 2]}} for i, row in enumerate(chat)],
    }
    return {name: [{**row, "margin": i / 2} for i, row in enumerate(rows)] for name, rows in formats.items()}


# ---- token ids, in the columns of prepared datasets

TOKEN_COLUMNS = ("chosen_ids", "rejected_ids")


def to_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Move `answers` of a row to the columns of its prepared dataset; other columns stay."""
    others = {name: value for name, value in row.items() if name not in ("answers", "step_ends")}
    if "step_ends" in row:
        (ids,), grades = row["answers"], dict(zip(row["step_ends"], others.pop("grades"), strict=True))
        return others | {"input_ids": ids, "labels": [grades.get(at, NO_LABEL) for at in range(len(ids))]}
    if "grades" in row:
        return others | {"answer_ids": row["answers"]}
    return others | dict(zip(TOKEN_COLUMNS, row["answers"], strict=True))


def dataset_of(pairs: Iterable[Any], **more: list[Any]) -> Dataset:
    """Build a prepared dataset from pairs of token id lists, with ``more`` columns."""
    return Dataset.from_dict({**dict(zip(TOKEN_COLUMNS, zip(*pairs, strict=True), strict=True)), **more})


def prepare(data: Any, tokenizer: Any = None, streaming: bool = False, **settings: Any) -> Any:
    """Tokenize a dataset, or a list of rows, for training."""
    if isinstance(data, list):
        data = IterableDataset.from_generator(partial(iter, data)) if streaming else Dataset.from_list(data)
    defaults: dict[str, Any] = {"num_embeddings": 100_000, "max_length": None, "num_proc": None, "name": "train"}
    return prepare_preference_dataset(data, tokenizer or tiny_tokenizer(), **defaults | settings)


# ---- JSON Lines files for `trl-tpu score`, and its command line


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def score_command(model: Path, dataset: Path | str, output: Path | None = None) -> list[str]:
    """Return the command line of `trl-tpu score`."""
    more = [] if output is None else ["--output", str(output)]
    return ["score", "--model_name_or_path", str(model), "--dataset_name", str(dataset), *more]
