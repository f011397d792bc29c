"""Datasets load by Hub id, folder, file or synthetic name, alone or mixed, and errors name the broken line."""

import math
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import trl
import yaml
from datasets import DatasetDict
from environment import EXAMPLES
from preference_rows import write_jsonl
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trl_tpu.errors import UserError
from trl_tpu.scripts import synthetic, utils
from trl_tpu.scripts.synthetic import DATASET, MODEL
from trl_tpu.scripts.utils import DatasetConfig, DatasetMixtureConfig, ScriptArguments, get_dataset, load_splits

ROWS = [{"prompt": f"p{i}", "chosen": f"c{i}", "rejected": f"r{i}"} for i in range(10)]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def folder(tmp_path: Path, name: str, size: int) -> Path:
    write_jsonl(tmp_path / name / "train.jsonl", [{"prompt": f"{name}{i}", "index": i} for i in range(size)])
    return tmp_path / name


def named_splits(**arguments: Any) -> Any:
    return load_splits(ScriptArguments(**arguments), DatasetMixtureConfig())[0]


def write(path: Path) -> None:
    dataset, name = datasets.Dataset.from_list(ROWS), path.name
    if ".parquet" in name:
        dataset.to_parquet(path)
    elif "sv" in name:
        dataset.to_csv(path, sep="\t" if ".tsv" in name else ",")
    else:
        dataset.to_json(path, lines=name != "array.json", compression="gzip" if name.endswith(".gz") else None)


@pytest.mark.parametrize(
    "name", ["d.jsonl", "d.json", "array.json", "d.parquet", "d.csv", "d.tsv", "d.jsonl.gz", "D.JSONL"]
)
@pytest.mark.parametrize("streaming", [False, True])
def test_local_file_is_a_dataset_with_a_train_split(name: str, streaming: bool, tmp_path: Path) -> None:
    write(tmp_path / name)
    splits = named_splits(dataset_name=str(tmp_path / name), dataset_streaming=streaming)
    assert list(splits) == ["train"] and list(splits["train"]) == ROWS
    assert list(utils.open_rows(str(tmp_path / name))[0]) == ROWS  # the reader of `score`
    mixture = DatasetMixtureConfig([DatasetConfig(str(tmp_path / name), columns=["chosen"])], streaming=streaming)
    assert list(get_dataset(mixture)["train"]) == [{"chosen": row["chosen"]} for row in ROWS]


def test_folder_of_files_keeps_its_splits(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data" / "train.jsonl", ROWS[:7])
    write_jsonl(tmp_path / "data" / "test.jsonl", ROWS[7:])
    splits = named_splits(dataset_name=str(tmp_path / "data"))
    assert {name: rows.to_list() for name, rows in splits.items()} == {"train": ROWS[:7], "test": ROWS[7:]}
    with pytest.raises(ValueError, match="'dev'.*'(train|test)', '(train|test)'"):
        utils.pick_split(splits, "dev", "the data")


@pytest.mark.parametrize("streaming", [False, True])
def test_file_names_are_not_patterns(streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "br[1]"
    for name, row in {"a[1].jsonl": 0, "a1.jsonl": 1, "b*.json": 2, "b1.json": 3, "sub/c[1].json": 4}.items():
        write_jsonl(base / name, [ROWS[row]])
    write_jsonl(tmp_path / "br1" / "a1.jsonl", [ROWS[9]])
    monkeypatch.chdir(base)
    asked: list[tuple[dict[str, Any], list[int]]] = [
        ({"path": "a[1].jsonl"}, [0]),
        ({"path": str(base / "b*.json")}, [2]),
        ({"path": "../br[1]"}, [1, 0, 2, 3, 4]),
        ({"path": "json", "data_files": ["a[1].jsonl", str(base / "a1.jsonl")]}, [0, 1]),
        ({"path": "json", "data_files": {"train": "a*.jsonl"}}, [1, 0]),
        ({"path": str(base), "data_dir": "sub"}, [4]),
        ({"path": str(base), "data_files": "sub/c[1].json"}, [4]),
    ]
    for settings, rows in asked:
        mixture = DatasetMixtureConfig([DatasetConfig(**settings)], streaming=streaming)
        assert list(get_dataset(mixture)["train"]) == [ROWS[row] for row in rows], settings
    coming, _ = utils.open_rows("b*.json")  # the reader of `score`
    assert list(coming) == [ROWS[2]]


def test_file_slices_work(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", ROWS)
    mixture = DatasetMixtureConfig([DatasetConfig(str(path), split="train[:30%]")])
    assert get_dataset(mixture)["train"].to_list() == ROWS[:3]


@pytest.mark.parametrize("fractions", [(None, None, None), (0.75, 0.25, 0.5), (0.1, 0.05, 0.7), (3, 2, 1)])
def test_mixture_has_trls_rows_in_trls_order(fractions: tuple[float | None, ...], tmp_path: Path) -> None:
    folders = [folder(tmp_path, name, size) for name, size in (("a", 13), ("b", 40), ("c", 7))]
    parts = [{"path": str(f), "fraction": fraction} for f, fraction in zip(folders, fractions, strict=True)]
    ours = get_dataset(DatasetMixtureConfig(datasets=list(parts)))
    theirs = trl.get_dataset(trl.DatasetMixtureConfig(datasets=list(parts)))
    assert {k: v.to_list() for k, v in ours.items()} == {k: v.to_list() for k, v in theirs.items()}
    assert len(ours["train"]) > 0


@pytest.mark.parametrize(("size", "rows"), [(2, 2), (2.0, 2), (0.25, 3)])
def test_held_out_rows_are_the_same_in_every_run(size: float, rows: int, tmp_path: Path) -> None:
    path = str(write_jsonl(tmp_path / "d.jsonl", ROWS))
    first = get_dataset(DatasetMixtureConfig([DatasetConfig(path)], test_split_size=size))
    second, _ = load_splits(ScriptArguments(path), DatasetMixtureConfig(test_split_size=size))
    assert (len(first["train"]), len(first["test"])) == (10 - rows, rows)
    assert first["test"].to_list() == second["test"].to_list()
    together = first["train"].to_list() + first["test"].to_list()
    assert sorted(row["prompt"] for row in together) == [row["prompt"] for row in ROWS]


BAD_FRACTIONS: list[Any] = [(0.5, None), (1, 0), (-1.5, 2.0), (0.5, math.nan), (math.inf, 1.0), ("0.5", "0.5")]
STREAMED = {"streaming": True}


@pytest.mark.parametrize(
    ("fractions", "options", "name"),
    [
        *((each, {}, "`fraction`") for each in BAD_FRACTIONS),
        ((0.5, 0.5), STREAMED, "`fraction`"),
        ((None, None), STREAMED | {"test_split_size": 0.5}, "`test_split_size`"),
    ],
)
def test_bad_mixtures_are_named(fractions: tuple[Any, ...], options: Any, name: str, tmp_path: Path) -> None:
    parts = [DatasetConfig(str(folder(tmp_path, f"d{i}", 4)), fraction=f) for i, f in enumerate(fractions)]
    with pytest.raises(UserError, match=name):
        get_dataset(DatasetMixtureConfig(parts, **options))
    given: Any = [{"path": "x"}]
    assert DatasetMixtureConfig(given).datasets == [DatasetConfig("x")] and given == [{"path": "x"}]


# ---- the quickstart's data, model and tokenizer


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
