"""Bad data is rejected before training, by an error that names the row and the column."""

import logging
import math
import signal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, Features, Value
from preference_forms import assistant, tiny_tokenizer, user
from tokenized import prepare

from trl_tpu.data.checks import check_raw_row
from trl_tpu.errors import UserError

GOOD = {"chosen": "good", "rejected": "bad"}
CHAT = {"prompt": [user("Hi")], "chosen": [assistant("a")], "rejected": [assistant("b")]}
IDS = {"chosen_ids": [1], "rejected_ids": [2]}


def said(content: Any) -> dict[str, Any]:
    """A conversation whose chosen answer has this content."""
    return {**CHAT, "chosen": [{"role": "assistant", "content": content}]}


OTHER_KEYS = [{"from": "user", "text": "a"}]
ROWS: list[tuple[list[dict[str, Any]], type[Exception], str]] = [
    ([{"choosen": "a", "rejected": "b"}], KeyError, "`chosen`.*choosen"),
    ([{"text": "a"}], KeyError, "`chosen` and `rejected`"),
    ([{"chosen_ids": [1], "rejected_id": [2]}], KeyError, "`rejected_ids`"),
    ([GOOD, {**GOOD, "chosen": None}], ValueError, "Row 1 of the train dataset: `chosen`"),
    ([{"chosen": 1, "rejected": 2}], TypeError, "Row 0 .*`chosen`.*int"),
    ([{"chosen": ["a"], "rejected": ["b"]}], TypeError, "Row 0 .*`chosen` .*'a'"),
    ([{**CHAT, "prompt": "Hi"}], ValueError, "Row 0 .*`prompt`"),
    ([{**CHAT, "rejected": [user("b")]}], ValueError, "Row 0 .*'assistant'.*'user'"),
    ([said([{"type": "image"}])], ValueError, "Row 0 .*'image'"),
    ([said(3)], TypeError, "Row 0 .*`chosen`"),
    ([{"chosen": [], "rejected": []}], ValueError, "Row 0 .*`chosen`"),
    ([{"chosen": OTHER_KEYS, "rejected": OTHER_KEYS}], TypeError, "Row 0 .*`chosen` .*`from`"),
    ([{**CHAT, "tools": "no json"}], ValueError, "Row 0 .*`chosen`.*`tools`"),
    ([said([{"type": "text", "text": None}])], ValueError, "Row 0 .*`chosen`.*'text': None"),
    ([said(["a", "b"])], ValueError, "Row 0 .*`chosen`.*'a', 'b'"),
    ([{**GOOD, "margin": 1e300}], ValueError, "Row 0 .*`margin`"),
    ([{**GOOD, "margin": 0.0}, {**GOOD, "margin": math.nan}], ValueError, "Row 1 .*`margin`"),
    ([{**GOOD, "margin": 1}, {**GOOD, "margin": None}], ValueError, "Row 1 .*`margin`"),
    ([{**GOOD, "margin": [1.0]}], ValueError, "Row 0 .*`margin`"),
    ([IDS, {**IDS, "chosen_ids": []}], ValueError, "Row 1 .*`chosen_ids`"),
    ([IDS, {**IDS, "rejected_ids": None}], ValueError, "Row 1 .*`rejected_ids`"),
    ([IDS, {**IDS, "rejected_ids": [-1]}], ValueError, "Row 1 .*`rejected_ids` .*-1"),
    ([{"chosen_ids": "abc", "rejected_ids": "d"}], TypeError, "Row 0 .*`chosen_ids` .*'abc'"),
    ([{"chosen_ids": [0.5], "rejected_ids": [1.0]}], TypeError, "Row 0 .*`chosen_ids`"),
]


@pytest.mark.parametrize(("rows", "error", "text"), ROWS)
@pytest.mark.parametrize("streaming", [False, True])
def test_bad_rows(rows: list[dict[str, Any]], error: type[Exception], text: str, streaming: bool) -> None:
    with pytest.raises(error, match=text) as caught:
        list(prepare(rows, streaming=streaming))  # a stream is checked as it is read
    assert isinstance(caught.value, UserError)


def test_a_misspelled_optional_column_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="trl_tpu"):
        prepare([{**GOOD, "margins": 1.0, "score": 2.0}])
    assert "`margins`" in caplog.text and "`margin`" in caplog.text and "score" not in caplog.text


@pytest.mark.parametrize("row", [{**GOOD, "chosen": "a\ud800"}, said("a\ud800")])
def test_half_a_character_of_a_stream(row: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"Row 0 .*`chosen` .*'\\ud800'"):
        list(prepare([row], streaming=True))


@pytest.mark.parametrize("streaming", [False, True])
def test_no_dataset_or_an_empty_one(streaming: bool) -> None:
    for rows, error in (
        (Dataset.from_dict({"chosen": [], "rejected": []}), ValueError),
        ([], ValueError),
        (GOOD, TypeError),
    ):
        with pytest.raises(error, match="eval"):
            prepare(rows, streaming=streaming, name="eval")


def test_a_dataset_that_filtering_empties() -> None:
    with pytest.raises(ValueError, match=r"max_length=8 .*21"):
        prepare([{"chosen": "a" * 30, "rejected": "b"}, {"chosen": "c", "rejected": "d" * 20}], max_length=8)


def test_the_old_api_names_the_row_that_cannot_be_rendered() -> None:
    with pytest.raises(UserError, match="Row 1 .*`chat_template_kwargs`"):
        prepare([CHAT | {"chat_template_kwargs": words} for words in (None, "no mapping")], are_old=True)


def test_a_chat_template_may_neither_fail_nor_go_on_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGALRM)
    templates = {
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "1.0 seconds",
        "{% macro more() %}{{ more() }}{% endmacro %}{{ more() }}": "recursion",
        "{{ 1 / (messages | length - messages | length) }}": "division by zero",
    }
    monkeypatch.setattr("trl_tpu.data.checks._RENDERING_SECONDS", 1.0)
    tokenizer = tiny_tokenizer()
    for tokenizer.chat_template, reason in templates.items():
        with pytest.raises(UserError, match=f"^Row 0 .*{reason}.*Correct the row"):
            prepare([CHAT], tokenizer)
    assert signal.getsignal(signal.SIGALRM) == before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_rendering_leaves_a_signal_handler_that_python_did_not_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def install(number: int, handler: Any) -> None:  # returns None for such a handler
        set_handler(number, handler)

    set_handler = signal.signal
    monkeypatch.setattr(signal, "signal", install)
    assert len(prepare([CHAT])) == 1
    assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL


def test_an_empty_answer_to_a_prompt_is_no_error() -> None:
    rows = prepare([{"prompt": "Hi", "chosen": "Yes", "rejected": ""}])
    assert tiny_tokenizer().decode(rows[0]["rejected_ids"]) == "Hi<|im_end|>"


def test_row_numbers_are_right_beyond_the_first_batch_and_with_workers() -> None:
    texts = Dataset.from_list([GOOD] * 1500 + [{**GOOD, "chosen": ""}] + [GOOD] * 3)
    ids = Dataset.from_dict({"chosen_ids": [[1]] * 1500 + [[]], "rejected_ids": [[2]] * 1501})
    margins = Dataset.from_list([{**IDS, "margin": 1.0}] * 1500 + [{**IDS, "margin": math.nan}])
    for dataset, num_proc in ((texts, None), (texts, 2), (ids, None), (margins, None)):
        with pytest.raises(ValueError, match="Row 1500 of"):
            prepare(dataset, num_proc=num_proc)


def test_one_huge_row_among_many_is_left_out_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """So many rows that the check must read columns, not rows; 100,000 tokens, where the others have two."""
    rows, huge = 200_000, 112_345
    ends = np.arange(rows + 1) * 2
    ends[huge + 1 :] += 100_000
    chosen = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(np.ones(ends[-1]), pa.int32()))
    table = pa.table({"chosen_ids": chosen, "rejected_ids": pa.array([[7]] * rows, pa.list_(pa.int32()))})
    with caplog.at_level(logging.WARNING, logger="trl_tpu"):
        assert len(prepare(Dataset(table), num_embeddings=8, max_length=1024)) == rows - 1
    assert f"1 of {rows} pairs dropped" in caplog.text and f"row {huge}, has 100002" in caplog.text


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
        return prepare(rows, are_old=True)["margin"][:]

    assert margins([1.0], [2.0]) == margins(1.0, 2.0) == [1.0, 2.0]
    for bad, row in (([[1.0], [math.nan]], 1), ([[1.0, 2.0]], 0), ([[1.0], None], 1)):
        with pytest.raises(ValueError, match=f"Row {row} .*`margin`"):
            margins(*bad)
