"""Settings and arguments that cannot work are refused before training, by one error that names rule, value and fix."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from tiny import made_up_pairs, tiny_model, tiny_tokenizer
from transformers import AutoModelForSequenceClassification, EarlyStoppingCallback, TrainerCallback

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.data.collators import DataCollatorForPreference, PairRows, RewardDataCollatorWithPadding
from trl_tpu.errors import UserError
from trl_tpu.modeling.rewards import rewards_of

PAIRS = made_up_pairs(8)


@pytest.fixture(scope="module")
def made() -> tuple[Any, Any]:
    """A tiny model and its tokenizer; a test that changes one takes a copy."""
    tokenizer = tiny_tokenizer([" ".join(row.values()) for row in PAIRS], vocab_size=300)
    return tiny_model(tokenizer), tokenizer


@pytest.fixture
def start(made: tuple[Any, Any], tmp_path: Path) -> Any:
    """Make a trainer of good arguments, some of them replaced."""

    def make(settings: dict[str, Any] | None = None, **arguments: Any) -> RewardTrainer:
        args = RewardConfig(**{"output_dir": str(tmp_path), "bf16": False, "report_to": "none", **(settings or {})})
        model, tokenizer = copy.deepcopy(made)
        given = {"model": model, "train_dataset": PAIRS, "processing_class": tokenizer, **arguments}
        return RewardTrainer(args=args, **given)

    return make


def tokens(*last: int, old: bool = False) -> Dataset:
    """Three pairs of token ids, of which row 2 ends in these."""
    rows = [{"chosen": [5, 6, 7], "rejected": [5, 8]}] * 2 + [{"chosen": [5, 6, 7], "rejected": [5, *last]}]
    if not old:
        return Dataset.from_list([{f"{half}_ids": ids for half, ids in row.items()} for row in rows])
    return Dataset.from_list(list(map(in_old_columns, rows)))


def in_old_columns(row: dict[str, list[int]]) -> dict[str, list[int]]:
    return {f"input_ids_{half}": ids for half, ids in row.items()} | {
        f"attention_mask_{half}": [1] * len(ids) for half, ids in row.items()
    }


EMPTY = Dataset.from_dict({"chosen": [], "rejected": []})
BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "no tokenizer to be found": ({"processing_class": None}, "pass its tokenizer as `processing_class`"),
    "no training data": ({"train_dataset": None}, "`train_dataset` is required"),
    "all splits as training data": (
        {"train_dataset": DatasetDict({"train": PAIRS, "test": PAIRS})},
        "`train_dataset` must be a `Dataset`.*got `DatasetDict`.*Pick a split: train, test.",
    ),
    "a list as evaluation data": ({"eval_dataset": list(PAIRS)}, "The eval dataset must be.*got `list`"),
    "one empty evaluation set of two": (
        {"eval_dataset": {"full": PAIRS, "hollow": EMPTY}},
        "The hollow dataset is empty",
    ),
    "neither model nor model_init": ({"model": None}, "either `model` or `model_init`"),
    "a token id beyond the embeddings": (
        {"train_dataset": tokens(304, 9)},
        "Row 2 of the train dataset.*`rejected_ids` holds the token id 304.*embedding table has 304 rows",
    ),
    "a token id beyond the embeddings in one of the evaluation sets": (
        {"eval_dataset": {"good": PAIRS, "bad": tokens(-100)}},
        "Row 2 of the bad dataset.*the token id -100",
    ),
    "a token id beyond the embeddings in the old columns": (
        {"train_dataset": tokens(304, old=True)},
        "Row 2 of the train dataset.*`input_ids_rejected` holds the token id 304",
    ),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments_of_the_trainer(case: str, start: Any) -> None:
    arguments, message = BAD_ARGUMENTS[case]
    with pytest.raises((ValueError, TypeError), match=message):
        start(**arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pad_token": "<nope>"}, "`pad_token` .'<nope>'.*not found in the vocabulary"),
        (
            {"mesh": "data=2,fsdp=4"},
            "data=2 x fsdp=4 x tensor=1 is 8 and there are 1",
        ),
        (
            {"output_dir": "file:///one", "output_url": "file:///two"},
            "output_dir='file:///one' and output_url='file:///two' are two URLs",
        ),
    ],
)
def test_bad_settings(settings: dict[str, Any], message: str, start: Any) -> None:
    with pytest.raises(ValueError, match=message):
        start(settings)


# ---- what only shows with the data, and with what else there is


BEST = {"eval_strategy": "epoch", "metric_for_best_model": "f1"}


def test_a_metric_is_known_before_training_unless_the_user_measures_more(start: Any) -> None:
    class Measuring(TrainerCallback):
        pass

    stopping = EarlyStoppingCallback()
    for arguments in ({}, {"callbacks": [stopping]}, {"eval_dataset": {"a": PAIRS}}):
        with pytest.raises(UserError, match="metric_for_best_model='f1' is not measured in evaluation"):
            start(BEST, **{"eval_dataset": PAIRS} | arguments)
    with pytest.raises(UserError, match="'loss' is not measured in evaluation, which measures a_loss, a_num_tokens"):
        start({**BEST, "metric_for_best_model": "loss"}, eval_dataset={"a": PAIRS})
    start({**BEST, "metric_for_best_model": "eval_a_accuracy"}, eval_dataset={"a": PAIRS, "b": PAIRS})
    start(BEST, eval_dataset=PAIRS, compute_metrics=lambda _: {"f1": 1.0})
    start(BEST, eval_dataset=PAIRS, callbacks=[Measuring])
    start({"metric_for_best_model": "f1"})  # nothing is evaluated


def test_refused_or_not_the_users_tokenizer_and_data_stay_as_they_were(made: tuple[Any, Any], start: Any) -> None:
    tokenizer = copy.deepcopy(made[1])
    with pytest.raises(ValueError):
        start({"eos_token": "<pad>"}, processing_class=tokenizer, eval_dataset=EMPTY)
    start({"eos_token": "<pad>"}, processing_class=tokenizer)
    assert tokenizer.special_tokens_map == made[1].special_tokens_map
    assert PAIRS.column_names == ["prompt", "chosen", "rejected"]


# ---- token ids of streams and of data given later


def test_row_numbers_count_the_rows_as_they_came_also_of_streams(start: Any) -> None:
    rows = [{"chosen_ids": [5] * 50, "rejected_ids": [5]}, *tokens(500)]
    for dataset in (Dataset.from_list(rows), IterableDataset.from_generator(lambda: iter(rows))):
        with pytest.raises(ValueError, match="Row 3 of the train dataset"):
            list(start({"max_steps": 1, "max_length": 10}, train_dataset=dataset).train_dataset)


def test_token_ids_that_are_given_to_evaluate_and_predict_are_checked(start: Any) -> None:
    trainer = start(train_dataset=tokens(303, 0))  # the largest that the model has
    for call, name in ((trainer.evaluate, "eval"), (trainer.predict, "test")):
        with pytest.raises(ValueError, match=f"Row 2 of the {name} dataset: .*the token id 304.*304 rows"):
            call(tokens(304))


# ---- a pad token that is the eos token


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("layout", ["preference", "pair rows", "old, left"])
def test_with_pad_equal_to_eos_training_reads_the_reward_that_the_saved_model_gives(
    layout: str, made: tuple[Any, Any], start: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = copy.deepcopy(made[1])
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = layout.rpartition(", ")[2] if "old" in layout else "right"
    eos = tokenizer.eos_token_id
    dialogues = [[9, 10, 11, eos], [12, eos, 13, eos], [14, 15, 16, 17, 18, eos, eos], [19, eos], [20], [21, 22]]
    pairs = [{"chosen_ids": a, "rejected_ids": b} for a, b in zip(dialogues[::2], dialogues[1::2], strict=True)]
    collate: Any = DataCollatorForPreference(eos)
    if "old" in layout:
        pairs = [in_old_columns({half.removesuffix("_ids"): ids for half, ids in row.items()}) for row in pairs]
        collate = RewardDataCollatorWithPadding(tokenizer)
    elif layout == "pair rows":
        collate = PairRows(collate, 4, eos)
    with caplog.at_level(logging.WARNING, logger="trl_tpu"):
        trainer = start({"max_steps": 2}, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer)
    assert "The pad token is the eos token ('<eos>')" in caplog.text and "Set own_pad_token=True" in caplog.text

    trainer.train()
    trainer.model.eval()
    batch = trainer._prepare_inputs(collate(pairs))
    with torch.no_grad():
        _, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    rewards_P2 = rewards_of(outputs, batch, eos, tokenizer.padding_side)
    assert rewards_P2 is not None
    trained = rewards_P2[:3].flatten().cpu()

    trainer.save_model(str(tmp_path / "saved"))
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", num_labels=1)
    with torch.no_grad():
        scored = torch.tensor([saved(torch.tensor([ids])).logits.item() for ids in dialogues])
    torch.testing.assert_close(trained, scored, atol=1e-6, rtol=1e-6)
