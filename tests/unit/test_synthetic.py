"""The quickstart's data has a right answer to be generalised, and its model and tokenizer load like any other."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import DatasetDict
from places import EXAMPLES
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from trl_tpu.scripts import synthetic

DATASET = "synthetic:numbers"
MODEL = "synthetic:tiny"


@pytest.fixture(scope="module")
def splits() -> DatasetDict:
    return synthetic.load_dataset(DATASET)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return synthetic.resolve_model(MODEL, str(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def tokenizer(model_folder: str) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_folder)


def read(row: dict[str, Any]) -> tuple[str, list[int], int, int]:
    """What a person reads: the question's word, its two numbers, and the chosen and the rejected number."""
    text = row["prompt"][0]["content"]
    word, *numbers = re.fullmatch(r"Which is (larger|smaller), (\d+) or (\d+)\?", text).groups()
    return word, [int(n) for n in numbers], int(row["chosen"][0]["content"]), int(row["rejected"][0]["content"])


def test_the_chosen_answer_is_right_and_the_rejected_one_wrong(splits: DatasetDict) -> None:
    for split in ("train", "test"):
        for row in splits[split]:
            word, numbers, chosen, rejected = read(row)
            assert chosen == {"larger": max, "smaller": min}[word](numbers)
            assert sorted((chosen, rejected)) == sorted(numbers)
            assert chosen != rejected


def test_no_comparison_of_the_test_split_is_trained_on(splits: DatasetDict) -> None:
    train, test = ({frozenset(read(row)[1]) for row in splits[split]} for split in ("train", "test"))
    assert (len(splits["train"]), len(splits["test"])) == (2048, 512)
    assert (len(train), len(test)) == (512, 128)
    assert not train & test


def test_no_answer_wins_without_its_question(splits: DatasetDict) -> None:
    """Each pair of numbers is asked both ways, so an answer is chosen as often as it is rejected."""
    answers = [read(row)[2:] for row in splits["train"]]
    assert sorted(answers) == sorted((rejected, chosen) for chosen, rejected in answers)


def test_quickstart_meets_one_shape(splits: DatasetDict, tokenizer: PreTrainedTokenizerBase) -> None:
    quickstart = yaml.safe_load((EXAMPLES / "quickstart.yaml").read_text())
    assert (quickstart["model_name_or_path"], quickstart["dataset_name"]) == (MODEL, DATASET)
    lengths = set()
    for split in ("train", "test"):
        for column in ("chosen", "rejected"):
            dialogues = [row["prompt"] + row[column] for row in splits[split]]
            lengths |= {len(ids) for ids in tokenizer.apply_chat_template(dialogues, return_dict=True)["input_ids"]}
    assert lengths == {13}
    assert 13 <= quickstart["max_length"] == quickstart["pad_to_multiple_of"]
    assert len(splits["train"]) % (8 * quickstart["per_device_train_batch_size"]) == 0
    assert len(splits["test"]) % (8 * quickstart["per_device_eval_batch_size"]) == 0


def test_model_folder_loads_as_a_reward_model(model_folder: str, tokenizer: PreTrainedTokenizerBase) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.vocab_size >= len(tokenizer)
    assert model.config.pad_token_id == tokenizer.pad_token_id
    chats = [synthetic.question("larger", 29, 41) + synthetic.answer(number) for number in (41, 29)]
    batch = tokenizer.apply_chat_template(chats, return_dict=True, return_tensors="pt")
    rewards = model(**batch).logits
    assert rewards.shape == (2, 1)
    assert rewards.isfinite().all()
    assert rewards[0] != rewards[1]


def test_model_and_data_are_the_same_at_every_call(model_folder: str, splits: DatasetDict, tmp_path: Path) -> None:
    random_state = torch.random.get_rng_state()
    again = synthetic.resolve_model(MODEL, str(tmp_path))
    assert torch.equal(torch.random.get_rng_state(), random_state), "the caller's random numbers moved"
    weights, weights_again = (
        AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).model.state_dict()
        for folder in (model_folder, again)
    )
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)
    reloaded = synthetic.load_dataset(DATASET)
    assert all(reloaded[split][:] == splits[split][:] for split in splits)


def test_a_later_process_leaves_alone_what_another_reads(tmp_path: Path) -> None:
    first, again = (
        {path.name: path.stat().st_mtime_ns for path in Path(synthetic.resolve_model(MODEL, str(tmp_path))).iterdir()}
        for _ in range(2)
    )
    assert again == first


def test_unknown_names_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"'synthetic:huge'.*{MODEL}"):
        synthetic.resolve_model("synthetic:huge", str(tmp_path))
    assert not any(tmp_path.iterdir())
    with pytest.raises(ValueError, match=f"'synthetic:none'.*{DATASET}"):
        synthetic.load_dataset("synthetic:none")
