"""The quickstart's data has answers that a model can generalize, and its model and tokenizer load as usual."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import DatasetDict
from environment import EXAMPLES
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trl_tpu.scripts import synthetic
from trl_tpu.scripts.synthetic import DATASET, MODEL


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
    """Return a row's word, its two numbers, and the chosen and rejected number."""
    text = row["prompt"][0]["content"]
    word, *numbers = re.fullmatch(r"Which is (larger|smaller), (\d+) or (\d+)\?", text).groups()
    return word, [int(n) for n in numbers], int(row["chosen"][0]["content"]), int(row["rejected"][0]["content"])


def test_chosen_answers_are_right_and_test_pairs_are_unseen(splits: DatasetDict) -> None:
    """Each pair of numbers occurs in both questions, so no answer is right without its question."""
    asked = []
    for split, rows, pairs in (("train", 2048, 512), ("test", 512, 128)):
        answers = []
        asked.append({frozenset(read(row)[1]) for row in splits[split]})
        assert (len(splits[split]), len(asked[-1])) == (rows, pairs)
        for word, numbers, chosen, rejected in map(read, splits[split]):
            assert chosen == {"larger": max, "smaller": min}[word](numbers) != rejected
            assert sorted((chosen, rejected)) == sorted(numbers)
            answers.append((chosen, rejected))
        assert sorted(answers) == sorted((rejected, chosen) for chosen, rejected in answers)
    assert not asked[0] & asked[1]


def test_quickstart_needs_one_shape(splits: DatasetDict, tokenizer: PreTrainedTokenizerBase) -> None:
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


def test_model_and_data_are_reproducible(model_folder: str, splits: DatasetDict, tmp_path: Path) -> None:
    """A later process does not rewrite files that another process reads."""
    random_state = torch.random.get_rng_state()
    again = Path(synthetic.resolve_model(MODEL, str(tmp_path)))
    assert torch.equal(torch.random.get_rng_state(), random_state), "the caller's random state changed"
    weights, weights_again = (load_file(Path(each, "model.safetensors")) for each in (model_folder, again))
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)
    reloaded = synthetic.load_dataset(DATASET)
    assert all(reloaded[split][:] == splits[split][:] for split in splits)
    written = {path: path.stat().st_mtime_ns for path in again.iterdir()}
    synthetic.resolve_model(MODEL, str(tmp_path))
    assert {path: path.stat().st_mtime_ns for path in again.iterdir()} == written


def test_unknown_names_are_rejected_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=f"'synthetic:none'.*{DATASET}"):
        synthetic.load_dataset("synthetic:none")
