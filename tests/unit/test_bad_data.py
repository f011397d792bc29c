"""Bad data is rejected before training by an error that names row and column."""

import logging
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, Features, Value
from preference_rows import assistant, prepare, tiny_tokenizer, user

from trl_tpu.compat.old_trl import OldPairs
from trl_tpu.data.kinds import Rankings
from trl_tpu.data.trl_dict import old_columns
from trl_tpu.errors import UserError

GOOD = {"chosen": "good", "rejected": "bad"}
CHAT = {"prompt": [user("Hi")], "chosen": [assistant("a")], "rejected": [assistant("b")]}
IDS = {"chosen_ids": [1], "rejected_ids": [2]}
SMALL = {"max_length": 9, "num_embeddings": 500}


def conversation(content: Any) -> dict[str, Any]:
    """Return a conversation with the given content of its chosen answer."""
    return {**CHAT, "chosen": [{"role": "assistant", "content": content}]}


OTHER_KEYS = [{"from": "user", "text": "a"}]
TWO = {"prompt": "a", "completions": ["b", "c"]}
TWO_IDS = {"answer_ids": [[1], [2]]}
OLD = old_columns(IDS)
IN_OLD_API = {"kinds": [OldPairs(tiny_tokenizer())]}
OF_TWO = {"kinds": [Rankings(attributes=("helpful", "brief"))]}


class BadRows(NamedTuple):
    """Rows, a pattern for the error, a second class of the error besides `UserError`, and settings."""

    rows: list[dict[str, Any]]
    text: str
    error: type[Exception] = UserError
    settings: Mapping[str, Any] = {}


PAIRS = [
    BadRows([{"choosen": "a", "rejected": "b"}], "`chosen`.*choosen", KeyError),
    BadRows([{"text": "a"}], "`chosen` and `rejected`", KeyError),
    BadRows([{"chosen_ids": [1], "rejected_id": [2]}], "`rejected_ids`", KeyError),
    BadRows([GOOD, {**GOOD, "chosen": None}], "Row 1 of the train dataset: `chosen`"),
    BadRows([{"chosen": 1, "rejected": 2}], "Row 0 .*`chosen`.* 1", TypeError),
    BadRows([{"chosen": ["a"], "rejected": ["b"]}], "Row 0 .*`chosen` .*'a'", TypeError),
    BadRows([{**CHAT, "prompt": "Hi"}], "Row 0 .*`prompt`"),
    BadRows([{**CHAT, "rejected": [user("b")]}], "Row 0 .*'assistant'.*'user'"),
    BadRows([conversation([{"type": "image"}])], "Row 0 .*`chosen`.*'image'"),
    BadRows([conversation(3)], "Row 0 .*`chosen`.* 3"),
    BadRows([{"chosen": [], "rejected": []}], "Row 0 .*`chosen`"),
    BadRows([{"chosen": OTHER_KEYS, "rejected": OTHER_KEYS}], "Row 0 .*`chosen` .*`from`", TypeError),
    BadRows([{**CHAT, "tools": "no json"}], "Row 0 .*`chosen`.*`tools`"),
    BadRows([conversation([{"type": "text", "text": None}])], "Row 0 .*`chosen`.*'text': None"),
    BadRows([conversation(["a", "b"])], "Row 0 .*`chosen`.*'a', 'b'"),
    BadRows([{**GOOD, "margin": 1e300}], "Row 0 .*`margin`"),
    BadRows([{**GOOD, "margin": 0.0}, {**GOOD, "margin": math.nan}], "Row 1 .*`margin`"),
    BadRows([{**GOOD, "margin": 1}, {**GOOD, "margin": None}], "Row 1 .*`margin`"),
    BadRows([{**GOOD, "margin": [1.0]}], "Row 0 .*`margin`"),
    BadRows([IDS, {**IDS, "chosen_ids": []}], "Row 1 .*`chosen_ids`"),
    BadRows([IDS, {**IDS, "rejected_ids": None}], "Row 1 .*`rejected_ids`"),
    BadRows([IDS, {**IDS, "rejected_ids": [-1]}], "Row 1 .*`rejected_ids` .*-1"),
    BadRows([{"chosen_ids": "abc", "rejected_ids": "d"}], "Row 0 .*`chosen_ids` .*'abc'", TypeError),
    BadRows([{"chosen_ids": [0.5], "rejected_ids": [1.0]}], "Row 0 .*`chosen_ids`", TypeError),
    # rows are numbered by their original position, whatever was dropped before
    BadRows([{**IDS, "chosen_ids": [5] * 50}, IDS, {**IDS, "chosen_ids": [500]}], "Row 2 .*500", settings=SMALL),
    BadRows([OLD | {"margin": [1.0]}, OLD | {"margin": [math.nan]}], "Row 1 .*`margin`", settings=IN_OLD_API),
    BadRows([GOOD | {"margin": [1.0, 2.0]}], "Row 0 .*`margin`", settings=IN_OLD_API),
    BadRows([GOOD | {"margin": [1.0]}, GOOD | {"margin": None}], "Row 1 .*`margin`", settings=IN_OLD_API),
]
RANKINGS = [  # rankings are not read as streams
    BadRows([{**TWO, "scores": [1.0, 1.0]}], "Row 0 .*`scores`"),
    BadRows([{**TWO, "scores": [2**53, 2**53 + 1]}], "Row 0 .*`scores`"),  # equal in float64
    BadRows([{**TWO, "completions": ["b", "c", "d"], "ranks": [1, 2, 2]}], "Row 0 .*`ranks` .*ties"),
    BadRows([{**TWO, "scores": [1.0, math.nan]}], "Row 0 .*`scores`"),
    BadRows([{**TWO, "scores": [1.0, 0.0]}, {**TWO, "completions": ["b"], "scores": [1.0]}], "Row 1 .*1 answers"),
    BadRows([{**TWO, "completions": ["b", None], "scores": [1, 2]}], r"Row 0 .*`completions\[1\]`"),
    BadRows([TWO], "Row 0 .*`scores`"),
    BadRows([{**TWO_IDS, "grades": [1.0]}], "Row 0 .*`grades`"),
    BadRows([{"answer_ids": [[1], [999999]], "grades": [1.0, 2.0]}], "Row 0 .*`answer_ids` .*999"),
    BadRows([{"answer_ids": [[1]] * 65, "grades": [float(place) for place in range(65)]}], "Row 0 .*65 answers"),
    BadRows([{**TWO_IDS, "grades": [1.0, 1e300]}], "Row 0 .*`grades`"),
    BadRows([{**TWO, "scores": [1, 2], "margin": 1.0}], "`margin`"),
    BadRows([{"chosen": "a", "rejected": ["b", "c"], "margin": 1.0}], "`margin`"),
    BadRows([{**GOOD, "chosen_probability": 1.5}], "Row 0 .*`chosen_probability`"),
    BadRows([{**TWO, "ranks": [1, 2]}], "Row 0 .*`scores`", settings={"kinds": [Rankings(True, True, True)]}),
    BadRows([{**TWO, **GOOD, "ranks": [1, 2]}], "completions, ranks"),
    BadRows([{**TWO, **IDS, "scores": [1.0, 2.0]}], "completions, scores"),
    BadRows([{**TWO, "scores": {"helpful": [1, 2], "brief": [2, 1]}}], "Row 0 .*`scores`"),
    BadRows([{**TWO_IDS, "grades": [[1.0, 2.0], None]}], "Row 0 .*`grades` "),
    BadRows([{**TWO, "scores": [1.0, 2.0]}], "Row 0 .*`scores` of 'helpful'", settings=OF_TWO),
    BadRows([{**TWO, "scores": {"helpful": [1, 2]}}], r"Row 0 .*`scores` .*attributes=\('helpful'", settings=OF_TWO),
    BadRows([{**TWO, "scores": {"helpful": [1, 2], "brief": [1]}}], "Row 0 .*`scores` of 'brief'", settings=OF_TWO),
    BadRows([{**TWO, "scores": {"helpful": [1, math.inf], "brief": None}}], "'helpful' .*inf", settings=OF_TWO),
    BadRows([{**TWO, "scores": {"helpful": [1, 1], "brief": None}}], "Row 0 .*`scores`", settings=OF_TWO),
    BadRows([{**TWO_IDS, "grades": [1.0, 2.0]}], "Row 0 .*`grades` of 'helpful'", settings=OF_TWO),
    BadRows([{**TWO_IDS, "grades": [[1.0, 2.0]]}], "Row 0 .*`grades` .*attributes", settings=OF_TWO),
    BadRows([GOOD], "Row 0 .*`completions` .*None", TypeError, settings=OF_TWO),
    BadRows(
        [GOOD | {"chosen": "a" * 30}, GOOD | {"rejected": "b" * 20}], "max_length=8 .*21", settings={"max_length": 8}
    ),
]
STREAMED = [
    BadRows([row], r"Row 0 .*`chosen` .*'\\ud800'") for row in (GOOD | {"chosen": "a\ud800"}, conversation("a\ud800"))
]
READ = [(bad, is_stream) for bad in PAIRS for is_stream in (False, True)]
READ += [(bad, False) for bad in RANKINGS] + [(bad, True) for bad in STREAMED]


@pytest.mark.parametrize(("bad", "streaming"), READ, ids=lambda value: getattr(value, "text", None))
def test_bad_rows_are_rejected_by_row_and_column(bad: BadRows, streaming: bool) -> None:
    with pytest.raises(UserError, match=bad.text) as caught:
        list(prepare(bad.rows, streaming=streaming, **bad.settings))  # a stream is checked while it is read
    assert isinstance(caught.value, bad.error)


@pytest.mark.parametrize("streaming", [False, True])
def test_missing_or_empty_dataset_is_rejected(streaming: bool) -> None:
    for rows in (Dataset.from_dict({"chosen": [], "rejected": []}), []):
        with pytest.raises(ValueError, match="eval"):
            prepare(rows, streaming=streaming, name="eval")


def test_failing_chat_template_is_rejected() -> None:
    templates = {
        None: "chat_template_path",
        "{% for x in %}": "chat template",
        "{{ raise_exception('Only two roles') }}": r"\['user', 'assistant'\].*Only two roles",
        "{% macro more() %}{{ more() }}{% endmacro %}{{ more() }}": "recursion",
        "{{ 1 / (messages | length - messages | length) }}": "division by zero",
    }
    tokenizer = tiny_tokenizer()
    for tokenizer.chat_template, reason in templates.items():
        with pytest.raises(UserError, match=f"^Row 0 .*{reason}"):
            prepare([CHAT], tokenizer)


def test_row_numbers_are_right_beyond_the_first_batch_and_with_workers() -> None:
    texts = Dataset.from_list([GOOD] * 1500 + [{**GOOD, "chosen": None}] + [GOOD] * 3)
    ids = Dataset.from_dict({"chosen_ids": [[1]] * 1500 + [[]], "rejected_ids": [[2]] * 1501})
    margins = Dataset.from_list([{**IDS, "margin": 1.0}] * 1500 + [{**IDS, "margin": math.nan}])
    for dataset, num_proc in ((texts, None), (texts, 2), (ids, None), (margins, None)):
        with pytest.raises(ValueError, match="Row 1500 of"):
            prepare(dataset, num_proc=num_proc)


def test_huge_row_is_skipped_and_named(caplog: pytest.LogCaptureFixture) -> None:
    """The row has 100,000 tokens, all others have two."""
    rows, huge = 20_000, 12_345
    ends = np.arange(rows + 1) * 2
    ends[huge + 1 :] += 100_000
    chosen = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(np.ones(ends[-1]), pa.int32()))
    table = pa.table({"chosen_ids": chosen, "rejected_ids": pa.array([[7]] * rows, pa.list_(pa.int32()))})
    with caplog.at_level(logging.WARNING, logger="trl_tpu"):
        assert len(prepare(Dataset(table), num_embeddings=8, max_length=1024)) == rows - 1
    assert f"1 of {rows}" in caplog.text and f"row {huge}" in caplog.text


def test_answers_may_end_with_any_common_role_and_be_empty() -> None:
    asked = {"chosen": [assistant("a"), user("b")], "rejected": [assistant("c"), user("d")]}
    unanswered = {"prompt": "Hi", "chosen": "Yes", "rejected": ""}
    silent = {"prompt": [user("Hi")], "chosen": [assistant("a")], "rejected": []}
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    for row in (asked, unanswered, silent, {"chosen": [assistant("a"), calls], "rejected": [calls]}):
        assert len(prepare([row])) == 1


@pytest.mark.parametrize("kind", ["int8", "uint64", "float16", "float64"])
def test_margins_may_be_any_number_type(kind: str) -> None:
    margins = Dataset.from_dict({"margin": [1, 2]}, Features({"margin": Value(kind)}))
    prepare(margins.add_column("chosen_ids", [[1], [2]]).add_column("rejected_ids", [[3], [4]]))
