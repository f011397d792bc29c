"""Bad data is refused before training, by an error that names the rule, the row and the fix."""

import logging
import math
import signal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, Features, IterableDataset, Value
from preference_forms import assistant, stream, tiny_tokenizer, user

from trl_tpu.data.checks import check_raw_row
from trl_tpu.data.tokenize import prepare_preference_dataset
from trl_tpu.errors import UserError

GOOD = {"chosen": "good", "rejected": "bad"}
CHAT = {"prompt": [user("Hi")], "chosen": [assistant("a")], "rejected": [assistant("b")]}


def prepare(dataset: Any, **kwargs: Any) -> Any:
    settings = {"num_embeddings": 10_000, "max_length": None, "num_proc": None, "name": "train", **kwargs}
    return list(prepare_preference_dataset(dataset, tiny_tokenizer(), **settings))  # a stream is checked as it is read


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (
            {"choosen": "a", "rejected": "b"},
            r"lacks `chosen`; its columns are \['choosen', 'rejected'\].*dataset.rename_column\(old, new\)",
        ),
        ({"chosen": "a", "Rejected": "b"}, r"lacks `rejected`; its columns are \['Rejected', 'chosen'\]"),
        (
            {"text": "a"},
            r"lacks `chosen` and `rejected`; its columns are \['text'\]\. Preference data has the columns",
        ),
        (
            {"chosen_ids": [1], "rejected_id": [2]},
            r"lacks `rejected_ids`; its columns are \['chosen_ids', 'rejected_id'\]",
        ),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_missing_and_misspelled_columns(columns: dict[str, Any], text: str, streaming: bool) -> None:
    dataset = IterableDataset.from_generator(lambda: iter([columns])) if streaming else Dataset.from_list([columns])
    with pytest.raises(UserError, match=f"^The train dataset {text}"):
        prepare(dataset)


def test_a_misspelled_optional_column_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="trl_tpu"):
        prepare(Dataset.from_list([{**GOOD, "margins": 1.0, "score": 2.0}]))
    assert "column `margins` is not used; if `margin` is meant, rename it" in caplog.text
    assert "score" not in caplog.text


ROWS: list[tuple[list[dict[str, Any]], type[Exception], str]] = [
    ([GOOD, {**GOOD, "chosen": None}], ValueError, "Row 1 of the train dataset: `chosen` is null"),
    ([{"chosen": 1, "rejected": 2}], TypeError, "Row 0 .*`chosen` must be text or a list of messages, got int"),
    ([{"chosen": ["a"], "rejected": ["b"]}], TypeError, "Row 0 .*`chosen` holds 'a'. A message is .'role'"),
    ([{**CHAT, "prompt": "Hi"}], ValueError, "mixes text and lists of messages in `prompt`.*columns.'prompt'"),
    ([{**CHAT, "rejected": [user("b")]}], ValueError, "Row 0 .*ends with a message of the role 'assistant', but"),
    ([{**CHAT, "chosen": [{"role": "assistant", "content": [{"type": "image"}]}]}], ValueError,
     "type 'image'.*text only"),
    ([{**GOOD, "margin": 1e300}], ValueError, "Row 0 .*`margin` is 1e.300.*finite number"),
    ([{**CHAT, "chosen": [{"role": "assistant", "content": 3}]}], TypeError, "`chosen` holds .*both text"),
    ([{"chosen": [], "rejected": []}], ValueError, "Row 0 .*`chosen` is empty"),
    ([{"chosen": [{"from": "user", "text": "a"}], "rejected": [{"from": "user", "text": "a"}]}], ValueError,
     r"`chosen` holds \{'from': 'user', 'text': 'a'\}.*rename other keys"),
    ([{**CHAT, "tools": "no json"}], ValueError, "Row 0 .*`chosen`.* cannot be rendered.*Expecting value.*`tools`"),
    ([{**CHAT, "chosen": [{"role": "assistant", "content": [{"type": "text", "text": None}]}]}], ValueError,
     "Row 0 .*`chosen`.* cannot be rendered.*the content is .*'text': None"),
    ([{**CHAT, "chosen": [{"role": "assistant", "content": ["a", "b"]}]}], ValueError,
     "Row 0 .*`chosen`.* cannot be rendered.*the content is .'a', 'b'"),
    ([{**CHAT, "chosen": [{"role": "assistant", "content": {"a": "b"}}]}], ValueError,
     "Row 0 .*`chosen`.* cannot be rendered.*the content is {'a': 'b'}"),
    ([{**GOOD, "margin": 0.0}, {**GOOD, "margin": math.nan}], ValueError, "Row 1 .*`margin` is nan.*fill it with 0"),
    ([{**GOOD, "margin": 1}, {**GOOD, "margin": None}], ValueError, "Row 1 .*`margin` is None"),
    ([{**GOOD, "margin": [1.0]}], ValueError, r"Row 0 .*`margin` is \[1.0\]"),
    ([{"chosen_ids": [1], "rejected_ids": [2]}, {"chosen_ids": [], "rejected_ids": [2]}], ValueError,
     "Row 1 .*`chosen_ids` holds no tokens"),
    ([{"chosen_ids": [1], "rejected_ids": [2]}, {"chosen_ids": [1], "rejected_ids": None}], ValueError,
     "Row 1 .*`rejected_ids` holds no tokens"),
    ([{"chosen_ids": "abc", "rejected_ids": "d"}], TypeError, "`chosen_ids` .*lists of integer token ids, got 'abc'"),
    ([{"chosen_ids": [0.5], "rejected_ids": [1.0]}], TypeError, "`chosen_ids` .*lists of integer token ids, got"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "error", "text"), ROWS)
@pytest.mark.parametrize("streaming", [False, True])
def test_bad_rows(rows: list[dict[str, Any]], error: type[Exception], text: str, streaming: bool) -> None:
    dataset = (
        IterableDataset.from_generator(stream, gen_kwargs={"rows": rows}) if streaming else Dataset.from_list(rows)
    )
    with pytest.raises(error, match=text) as caught:
        prepare(dataset)
    assert isinstance(caught.value, UserError)


@pytest.mark.parametrize("row", [{**GOOD, "chosen": "a\ud800"}, {**CHAT, "chosen": [assistant("a\ud800")]}])
def test_half_a_character_of_a_stream(row: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"Row 0 .*`chosen` holds '\\ud800' at character 1, .*half of a character"):
        prepare(IterableDataset.from_generator(stream, gen_kwargs={"rows": [row]}))


@pytest.mark.parametrize("dataset", [Dataset.from_dict({"chosen": [], "rejected": []}), Dataset.from_dict({})])
def test_an_empty_dataset(dataset: Dataset) -> None:
    with pytest.raises(ValueError, match="The eval dataset is empty"):
        prepare(dataset, name="eval")


def test_an_empty_stream() -> None:
    with pytest.raises(ValueError, match="The train dataset is empty"):
        prepare(IterableDataset.from_generator(lambda: iter([])))


def test_a_list_is_no_dataset() -> None:
    with pytest.raises(TypeError, match=r"got `list`.*Dataset.from_list\(rows\)"):
        prepare([GOOD])


def test_a_dataset_that_filtering_empties() -> None:
    dataset = Dataset.from_list([{"chosen": "a" * 30, "rejected": "b"}, {"chosen": "c", "rejected": "d" * 20}])
    with pytest.raises(ValueError, match="all 2 pairs were dropped.*max_length=8 tokens.*shortest pair has 21"):
        prepare(dataset, max_length=8)


def test_conversations_need_a_chat_template() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    settings: dict[str, Any] = {"num_embeddings": 300, "max_length": None, "num_proc": None, "name": "train"}
    with pytest.raises(UserError, match="Row 0 .*chat_template is not set.*chat_template_path"):
        prepare_preference_dataset(Dataset.from_list([CHAT]), tokenizer, **settings)


def test_the_old_api_names_the_row_that_cannot_be_rendered() -> None:
    rows = Dataset.from_list([CHAT | {"chat_template_kwargs": words} for words in (None, "no mapping")])
    with pytest.raises(UserError, match="Row 1 .*cannot be rendered as a chat.*Correct the row, its `tools`"):
        prepare(rows, are_old=True)


def test_a_chat_template_may_neither_fail_nor_go_on_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGALRM)
    templates = {
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "longer than 0.2 seconds",
        "{% macro more() %}{{ more() }}{% endmacro %}{{ more() }}": "recursion",
        "{{ 1 / (messages | length - messages | length) }}": "division by zero",
    }
    monkeypatch.setattr("trl_tpu.data.checks._RENDERING_SECONDS", 0.2)
    for template, reason in templates.items():
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        settings: dict[str, Any] = {"num_embeddings": 300, "max_length": None, "num_proc": None, "name": "train"}
        with pytest.raises(UserError, match=f"^Row 0 .* cannot be rendered as a chat: .*{reason}.*Correct the row"):
            prepare_preference_dataset(Dataset.from_list([CHAT]), tokenizer, **settings)
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_rendering_leaves_a_signal_handler_that_python_did_not_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def install(number: int, handler: Any) -> None:  # returns None for such a handler
        set_handler(number, handler)

    set_handler = signal.signal
    monkeypatch.setattr(signal, "signal", install)
    assert len(prepare(Dataset.from_list([CHAT]))) == 1
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_an_empty_answer_to_a_prompt_is_no_error() -> None:
    rows = prepare(Dataset.from_list([{"prompt": "Hi", "chosen": "Yes", "rejected": ""}]))
    assert tiny_tokenizer().decode(rows[0]["rejected_ids"]) == "Hi<|im_end|>"


def test_row_numbers_are_right_beyond_the_first_batch_and_with_workers() -> None:
    rows = [GOOD] * 1500 + [{**GOOD, "chosen": ""}] + [GOOD] * 3
    for num_proc in (None, 2):
        with pytest.raises(ValueError, match="Row 1500 of"):
            prepare(Dataset.from_list(rows), num_proc=num_proc)
    ids = {"chosen_ids": [[1]] * 12_000 + [[]], "rejected_ids": [[2]] * 12_001}
    with pytest.raises(ValueError, match="Row 12000 of"):
        prepare(Dataset.from_dict(ids))
    margins = {"margin": [1.0] * 12_000 + [math.nan]}
    with pytest.raises(ValueError, match="Row 12000 of"):
        prepare(Dataset.from_dict({"chosen_ids": [[1]] * 12_001, "rejected_ids": [[2]] * 12_001} | margins))


def test_one_huge_row_among_many_is_left_out_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """A million rows, so the check must read columns, not rows; 100,000 tokens, where the others have two."""
    rows, huge = 1_000_000, 712_345
    ends = np.arange(rows + 1) * 2
    ends[huge + 1 :] += 100_000
    chosen = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(np.ones(ends[-1]), pa.int32()))
    table = pa.table({"chosen_ids": chosen, "rejected_ids": pa.array([[7]] * rows, pa.list_(pa.int32()))})
    with caplog.at_level(logging.WARNING, logger="trl_tpu"):
        prepared: Any = prepare_preference_dataset(
            Dataset(table), tiny_tokenizer(), num_embeddings=8, max_length=1024, num_proc=None, name="train"
        )
    assert len(prepared) == rows - 1
    assert f"1 of {rows} pairs dropped" in caplog.text
    assert f"(the longest, of row {huge}, has 100002)" in caplog.text


def test_answers_of_both_sides_may_end_with_any_one_role_and_be_empty_after_a_prompt() -> None:
    asked = {"chosen": [assistant("a"), user("b")], "rejected": [assistant("c"), user("d")]}
    silent = {"prompt": [user("Hi")], "chosen": [assistant("a")], "rejected": []}
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    for row in (asked, silent, {"chosen": [calls], "rejected": [calls]}):
        check_raw_row(row, {half: row[half] for half in ("chosen", "rejected")}, "Row 0")


@pytest.mark.parametrize("kind", ["int8", "uint64", "float16", "float64"])
def test_margins_may_be_numbers_of_any_kind(kind: str) -> None:
    margins = Dataset.from_dict({"margin": [1, 2]}, Features({"margin": Value(kind)}))
    prepare(margins.add_column("chosen_ids", [[1], [2]]).add_column("rejected_ids", [[3], [4]]))


@pytest.mark.parametrize("is_tokenized", [True, False])
def test_old_margins_may_be_lists_of_one(is_tokenized: bool) -> None:
    halves = {"input_ids_chosen": [2], "attention_mask_chosen": [1]}
    halves |= {"input_ids_rejected": [3], "attention_mask_rejected": [1]}

    def margins(*given: Any) -> list[float]:
        rows = [(halves if is_tokenized else GOOD) | {"margin": margin} for margin in given]
        return [row["margin"] for row in prepare(Dataset.from_list(rows), are_old=True)]

    assert margins([1.0], [2.0]) == margins(1.0, 2.0) == [1.0, 2.0]
    for bad, row in (([[1.0], [math.nan]], 1), ([[1.0, 2.0]], 0), ([[1.0], None], 1)):
        with pytest.raises(ValueError, match=f"Row {row} .*`margin`"):
            margins(*bad)
