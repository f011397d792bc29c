"""The data functions return the same as TRL 1.16's, except where TRL's are wrong.

Chat templates that write the current date draw a warning with a fix, and the model card names them.
"""

import logging
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import trl.data_utils as reference
from datasets import Dataset, IterableDataset
from hypothesis import given
from hypothesis import strategies as st
from preference_rows import TEMPLATE, TOOLS, assistant, rows_of_every_format, tiny_tokenizer, user
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl.trainer.utils import pad as reference_pad
from trl.trainer.utils import remove_none_values as reference_remove_none_values

import trl_tpu
from trl_tpu import data_utils
from trl_tpu.data import formats
from trl_tpu.data.formats import apply_template, date_written
from trl_tpu.scoring.scorer import Scorer
from trl_tpu.trainer.utils import pad

FORMS = rows_of_every_format()
EXAMPLES: list[dict[str, Any]] = [
    {"messages": [user("Hi"), assistant("Yes?")]},
    {"prompt": [user("Hi")]},
    {"prompt": [user("Hi"), assistant("Ye")]},
    {"prompt": [user("Hi"), {"role": "tool", "content": "3"}], "completion": [assistant("Yes")], "label": True},
    {"prompt": [user("Hi")], "completion": [assistant("Yes")]},
    {"prompt": [user("Hi")], "completion": [assistant("Yes")], "chat_template_kwargs": {"shout": "HEY"}},
    {"prompt": "Hi", "completion": "Yes"},
    {"chosen": "Hi", "rejected": "Yes", "margin": 1.0},
    {"text": "Hi"},
    *[row for rows in FORMS.values() for row in rows],
]


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("tools", [None, [], TOOLS])
def test_chat_templates_render_as_in_trl(example: dict[str, Any], tools: Any) -> None:
    ours, theirs = (each.maybe_apply_chat_template(example, tiny_tokenizer(), tools) for each in (formats, reference))
    assert ours == theirs
    assert formats.is_conversational(example) == reference.is_conversational(example)


def test_template_arguments_reach_the_template() -> None:
    rendered = formats.apply_chat_template({"prompt": [user("Hi")]}, tiny_tokenizer(), shout="HEY")
    assert rendered == {"prompt": "LOUD HEY\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"}


def test_tools_among_template_arguments_are_used() -> None:
    row = {"prompt": [user("Hi")]}
    rendered = formats.apply_chat_template(row | {"chat_template_kwargs": {"tools": TOOLS}}, tiny_tokenizer())
    assert rendered == formats.apply_chat_template(row, tiny_tokenizer(), tools=TOOLS)
    assert rendered != formats.apply_chat_template(row, tiny_tokenizer())


def test_text_parts_render_as_plain_text() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}
    for form in ("messages", "prompt"):
        render = formats.conversations_formatting_function(tiny_tokenizer(), form)
        for how in (render, lambda row: formats.apply_chat_template(row, tiny_tokenizer())):
            assert how({form: [parts]}) == how({form: [user("Hi")]})


def test_absent_generation_prompt_is_not_part_of_the_prompt() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    row = {"prompt": [user("Hi")], "chosen": [assistant("Yes")], "rejected": [assistant("No")]}
    ours = formats.apply_chat_template(row, tokenizer)
    assert ours == reference.apply_chat_template(row, tokenizer)
    assert ours["prompt"].endswith("assistant\n") and ours["chosen"] == "Yes<|im_end|>\n"


values = st.recursive(
    st.none() | st.integers(0, 3) | st.text(max_size=1),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from("abc"), values) | st.lists(values, max_size=3))
def test_none_values_are_removed_as_in_trl(example: Any) -> None:
    assert formats.remove_none_values(example) == reference_remove_none_values(example)


@pytest.mark.parametrize("example", [each for each in EXAMPLES if {"chosen", "rejected"} <= set(each)])
def test_prompts_are_extracted_as_in_trl(example: dict[str, Any]) -> None:
    assert data_utils.maybe_extract_prompt(dict(example)) == reference.maybe_extract_prompt(dict(example))


@pytest.mark.parametrize(("side", "multiple"), [("right", None), ("left", 4)])
def test_tensors_are_padded_as_in_trl(side: str, multiple: int | None) -> None:
    tensors = [torch.tensor([1, 2, 3]), torch.tensor([4]), torch.tensor([5, 6, 7, 8, 9])]
    assert torch.equal(pad(tensors, 9, side, multiple), reference_pad(tensors, 9, side, multiple))


# ---- templates that write the date


# the beginning of Llama 3.2's template
DATED = (
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    '{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}{%- set date_string = "26 Jul 2024" %}'
    '{%- endif %}{%- endif %}{{- "Today Date: " + date_string + "\n\n" }}' + TEMPLATE
)
# some templates write the date only without a system message
DATED_UNLESS_TOLD = (
    "{% if messages[0]['role'] != 'system' %}It is {{ strftime_now('%Y-%m-%d')[:4] }}.\n{% endif %}" + TEMPLATE
)
ASKED, ANSWER = [user("Sky?")], [assistant("Blue.")]
PAIRS = [{"prompt": ASKED, "chosen": ANSWER, "rejected": [assistant("Green.")]}] * 4


@pytest.fixture(autouse=True)
def reset_warning() -> None:
    formats._warn_of_date.cache_clear()


@pytest.fixture
def tokenizer(good_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(good_model)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "date" in record.getMessage()]


DATES = [
    (DATED, ASKED + ANSWER, {}, "%d %b %Y"),
    (DATED, ASKED + ANSWER, {"chat_template_kwargs": {"date_string": None}}, "%d %b %Y"),
    (DATED, ASKED + ANSWER, {"chat_template_kwargs": {"date_string": "26 Jul 2024"}}, None),
    (DATED_UNLESS_TOLD, ASKED + ANSWER, {}, "%Y-%m-%d"),
    (DATED_UNLESS_TOLD, [{"role": "system", "content": "Be kind."}, *ASKED], {}, None),
    (TEMPLATE + "{# not strftime_now #}", ASKED + ANSWER, {}, None),
    ("{{ strftime_now('%d') ~ strptime() }}" + TEMPLATE, ASKED + ANSWER, {}, None),
]


@pytest.mark.parametrize(("template", "messages", "row", "date_format"), DATES)
def test_date_is_found_if_it_changes_the_text(
    tokenizer: Any, template: str, messages: Any, row: dict[str, Any], date_format: str | None
) -> None:
    tokenizer.chat_template = template
    expected = date_format and datetime.now().strftime(date_format)
    assert date_written(tokenizer, [(messages, row)]) == expected


def test_warning_is_given_once_and_its_fix_keeps_the_text(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer.chat_template = DATED
    before = apply_template(tokenizer, ASKED + ANSWER)
    for _ in range(2):
        assert date_written(tokenizer, [(ASKED + ANSWER, {})]) in before  # type: ignore[operator]
    (told,) = warnings(caplog)
    tokenizer.chat_template = told.split("`")[1] + DATED
    assert apply_template(tokenizer, ASKED + ANSWER) == before
    assert date_written(tokenizer, [(ASKED + ANSWER, {})]) is None


@pytest.mark.parametrize(("template", "is_stream"), [(DATED, False), (DATED, True), (TEMPLATE, False)])
def test_training_and_the_model_card_state_the_date(
    good_model: Path, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, template: str, is_stream: bool
) -> None:
    tokenizer.chat_template = template
    args = trl_tpu.RewardConfig(str(tmp_path), max_steps=1, report_to="none")
    pairs: Any = IterableDataset.from_generator(lambda: iter(PAIRS)) if is_stream else Dataset.from_list(PAIRS)
    model = AutoModelForSequenceClassification.from_pretrained(good_model, num_labels=1)
    trainer = trl_tpu.RewardTrainer(model, args, train_dataset=pairs, processing_class=tokenizer)
    trainer.create_model_card()
    card, date = (tmp_path / "README.md").read_text(), datetime.now().strftime("%d %b %Y")
    assert (date in card) == (template == DATED)
    assert len(warnings(caplog)) == (template == DATED)


def test_scoring_warns_about_the_date_for_messages_only(good_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    scorer = Scorer(str(good_model))
    scorer.tokenizer.chat_template = DATED
    list(trl_tpu.score(scorer, ["a text"] * 3))
    assert not warnings(caplog)
    (broken, *_) = trl_tpu.score(scorer, [{"messages": None}, {"messages": ASKED + ANSWER}])
    assert broken["reward"] is None and len(warnings(caplog)) == 1
