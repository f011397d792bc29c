"""Conversions in the guide of popular datasets turn rows of each schema into rows that training reads."""

import re
from typing import Any

import pytest
import tiny
from datasets import Dataset
from environment import EXAMPLES
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from trl_tpu import RewardConfig
from trl_tpu.data.kinds import answers_of, labels_of
from trl_tpu.experimental.prm import PRMConfig
from trl_tpu.modeling.build import build_dataset, build_reward_model

PAGE = (EXAMPLES / "guides" / "popular_datasets.md").read_text(encoding="utf-8")
ATTRIBUTES = ["helpfulness", "correctness", "coherence", "complexity", "verbosity"]


def turn(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def graded(text: str, grade: int) -> dict[str, Any]:
    return {"prompt": "Name a river.", "response": text, **dict.fromkeys(ATTRIBUTES, grade)}


def message(number: int, parent: int | None, text: str, rank: int | None = None) -> dict[str, Any]:
    role = "assistant" if rank is not None else "prompter"
    ids = {"message_id": f"m{number}", "parent_id": parent if parent is None else f"m{parent}"}
    return {**ids, "text": text, "role": role, "rank": rank}


def parts(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "image": None, "mimeType": None}]


RIVER = "Name a river."
STEPS = "2 + 3 is ? Step 1: 2 + 3 is 5. {}\nStep 2: The answer is: 6 {}"
PRM = [
    {"completions": [{"text": "2 + 3 is 5.", "rating": 1}], "chosen_completion": 0},
    {"completions": [{"text": "So 5.", "rating": 0}, {"text": "So 6.", "rating": -1}], "chosen_completion": 1},
]
SCORED = [{"response": "Rhine", "overall_score": 7.5}, {"response": "Bonn", "overall_score": 1}]
RANKED = [{"answer": f"R{n}", "rank": n} for n in (2, 1)]
SAFER = {"response_0": "Rhine", "response_1": "Bonn", "better_response_id": 0, "safer_response_id": 1}
COMPARED = [
    {"context": [turn("user", RIVER)], "response1": one, "response2": other, "overall_preference": preference}
    for one, other, preference in (("Bonn", "Rhine", 2), ("a", "b", 0))
]
VOTED = {"human_ref_A": "Bonn", "human_ref_B": "Rhine", "labels": 0, "score_A": 3, "score_B": 5}
CHATS: dict[str, Any] = {
    f"conversation_{side}": [turn("user", parts(RIVER)), turn("assistant", parts(answer))]
    for side, answer in (("a", "Bonn"), ("b", "Rhine"))
}
TREE = [message(1, None, RIVER), message(2, 1, "Bonn", 1), message(3, 1, "Rhine", 0), message(4, 3, "And a sea?")]
BETTER = {"chosen": "Rhine", "rejected": "Bonn"}
WHOLE = {
    column: [{"content": RIVER, "role": "user"}, {"content": text, "role": "assistant"}]
    for column, text in BETTER.items()
}
GRADED = {"prompt_id": "f0e37e9f", "messages": WHOLE["chosen"], "score_chosen": 8.5, "score_rejected": 3.0}
SOLVED = {"prompt": "2 + 3 is ?", "completions": ["2 + 3 is 5.", "So 6."], "labels": [True, False]}
BY_TWO = {"grades": [[1.0, 0.0], [0.0, 1.0]]}
SKIP, STEPWISE, FIRST = {"ties": "skip"}, {"step_separator": "\n"}, {"grades": [1.0, 0.0]}
#: Rows of each schema, the settings named in the guide, and the expected grades or labels.
ROWS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]] = {
    "ultrafeedback": ([{"instruction": RIVER, "completions": SCORED}], SKIP, {"grades": [7.5, 1.0]}),
    "nectar": ([{"prompt": "\n\nHuman: A river?\n\nAssistant: ", "answers": RANKED}], SKIP, {"grades": [-2.0, -1.0]}),
    "helpsteer2": (
        [graded("Rhine", 4), graded("Bonn", 0)],
        {"attributes": ATTRIBUTES, "loss_type": "regression"},
        {"grades": [[4.0, 0.0]] * 5},
    ),
    "saferlhf": ([SAFER | {"prompt": RIVER}], {"attributes": ["helpful", "safe"]}, BY_TWO),
    "helpsteer3": (COMPARED, {}, {"margin": 2.0}),
    "shp": ([VOTED | {"history": RIVER}], {}, {"chosen_probability": 0.6}),
    "arena": ([CHATS | {"winner": "model_b"}], {"ties": "rao_kupper"}, {"grades": [0.0, 1.0]}),
    "oasst": (TREE, {}, {"grades": [-1.0, 0.0]}),
    "orca": ([BETTER | {"system": "", "question": RIVER}], {}, {}),
    "alpaca": ([BETTER | {"instruction": RIVER, "input": "Of Europe."}], {}, {}),
    "prm800k": ([{"question": {"problem": "2 + 3 is ?"}, "label": {"steps": PRM}}], STEPWISE, FIRST),
    "HuggingFaceH4/ultrafeedback_binarized": ([WHOLE | GRADED | {"prompt": RIVER}], {}, {}),
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": (
        [WHOLE | {"id": "a1", "prompt": RIVER, "source": "ai2-adapt-dev/wildchat"}],
        {},
        {},
    ),
    "Skywork/Skywork-Reward-Preference-80K-v0.2": ([WHOLE | {"source": "magpie_pro"}], {}, {}),
    "trl-lib/prm800k": ([SOLVED], STEPWISE, FIRST),
    "trl-lib/math_shepherd": ([SOLVED], STEPWISE, FIRST),
    "math_shepherd": ([{"input": STEPS.format("ки", "ки"), "label": STEPS.format("+", "-")}], STEPWISE, FIRST),
}
_TAKE_ALL_ROWS = ("helpsteer2", "helpsteer3", "oasst")


@pytest.fixture(scope="module")
def functions() -> dict[str, Any]:
    """Return the functions that the guide defines."""
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        exec(block, names)
    return names


def test_every_dataset_in_the_guide_is_tested(functions: dict[str, Any]) -> None:
    named, published = (
        set(re.findall(row, PAGE, re.MULTILINE)) for row in (r"\| `(\w+)` \|", r"^\| `(\S+)`.* \| none")
    )
    assert named | published == ROWS.keys() and named <= functions.keys()


@pytest.mark.parametrize("name", ROWS)
def test_converted_rows_are_trained_on(name: str, functions: dict[str, Any], tmp_path: Any) -> None:
    rows, settings, labels = ROWS[name]
    convert = functions.get(name, dict)
    converted = list(convert(rows)) if name in _TAKE_ALL_ROWS else list(map(convert, rows))
    tokenizer = tiny.tiny_tokenizer(list(tiny.texts_in(converted)))
    kind = PRMConfig if "step_separator" in settings else RewardConfig
    args = kind(str(tmp_path), report_to="none", **settings)
    auto = AutoModelForTokenClassification if "step_separator" in settings else AutoModelForSequenceClassification
    config = tiny.tiny_model(tokenizer).config
    config.num_labels = 2 if "step_separator" in settings else len(args.attributes or ()) or 1
    model, tokenizer = build_reward_model(auto.from_config(config), args, tokenizer)
    (row,) = build_dataset(Dataset.from_list(converted), model, tokenizer, args, "train")
    for key, label in labels.items():
        assert labels_of(row)[key] == (label if key == "grades" else pytest.approx(label))
    texts = [tokenizer.decode(ids) for ids in answers_of(row)]
    if name in ("alpaca", "orca", "shp", "helpsteer3") or rows[0].keys() >= WHOLE.keys():
        assert "Rhine" in texts[0] and "Bonn" in texts[1]
        assert [text.count(RIVER) for text in texts] == [1, 1]
    assert all("River" in text or "river" in text or "2 + 3" in text for text in texts)
