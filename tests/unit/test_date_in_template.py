"""Chat templates that write the current date draw a warning with a fix, and the model card names them."""

import logging
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, IterableDataset
from preference_rows import TEMPLATE, assistant, user
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import trl_tpu
from trl_tpu.data import formats
from trl_tpu.data.formats import apply_template, date_written
from trl_tpu.scoring.scorer import Scorer

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
