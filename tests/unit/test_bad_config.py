"""Settings and arguments that cannot work are refused before training, by one error that names rule, value and fix."""

import copy
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from tiny import made_up_pairs, tiny_model, tiny_tokenizer
from transformers import (
    AutoModelForSequenceClassification,
    EarlyStoppingCallback,
    LlamaForSequenceClassification,
    TrainerCallback,
)

from trl_tpu.data.collators import DataCollatorForPreference, PairRows, RewardDataCollatorWithPadding
from trl_tpu.errors import UserError
from trl_tpu.trainer.reward_config import RewardConfig
from trl_tpu.trainer.reward_trainer import RewardTrainer

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
        args = RewardConfig(str(tmp_path), **{"bf16": False, "report_to": "none", **(settings or {})})
        model, tokenizer = copy.deepcopy(made)
        given = {"model": model, "train_dataset": PAIRS, "processing_class": tokenizer, **arguments}
        return RewardTrainer(args=args, **given)

    return make


def test_the_good_arguments_are_good(start: Any) -> None:
    trainer = start(eval_dataset={"a": PAIRS, "b": PAIRS})
    assert len(trainer.train_dataset) == 8
    assert set(trainer.eval_dataset) == {"a", "b"}


def with_two_labels() -> LlamaForSequenceClassification:
    model = tiny_model(tiny_tokenizer(["text"], vocab_size=300))
    model.config.num_labels = 2
    return LlamaForSequenceClassification(model.config)


def without_special_tokens() -> Any:
    tokenizer = tiny_tokenizer(["text"], vocab_size=300)
    tokenizer.pad_token = tokenizer.eos_token = None
    return tokenizer


def with_tokens_that_the_model_lacks(pad_token: str) -> Any:
    tokenizer = tiny_tokenizer(["text"], vocab_size=300)
    tokenizer.add_tokens([f"<more{number}>" for number in range(99)])
    tokenizer.pad_token = pad_token
    return tokenizer


def token_rows(*bad: int, old: bool = False) -> list[dict[str, Any]]:
    row: dict[str, Any] = {"chosen_ids": [5, 6, 7], "rejected_ids": [5, 8]}
    rows = [row, row, {**row, "rejected_ids": [5, *bad]}]
    if not old:
        return rows
    return [
        {
            **{f"input_ids_{half}": each[f"{half}_ids"] for half in ("chosen", "rejected")},
            **{f"attention_mask_{half}": [1] * len(each[f"{half}_ids"]) for half in ("chosen", "rejected")},
        }
        for each in rows
    ]


def stream(rows: list[dict[str, Any]]) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(rows))


EMPTY = Dataset.from_dict({"chosen": [], "rejected": []})
SPLITS = DatasetDict({"train": PAIRS, "test": PAIRS})

BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "two labels": (
        {"model": with_two_labels()},
        ValueError,
        ["num_labels=2", "require `num_labels=1`", "from_pretrained(..., num_labels=1)"],
    ),
    "no pad and no eos token": (
        {"processing_class": without_special_tokens()},
        ValueError,
        ["neither a pad nor an eos token", "Set `tokenizer.pad_token`"],
    ),
    "a pad token without an embedding": (
        {"processing_class": with_tokens_that_the_model_lacks("<more98>")},
        ValueError,
        ["The pad token '<more98>'", "embedding table has 304 rows", "model.resize_token_embeddings(len(tokenizer))"],
    ),
    "no tokenizer to be found": ({"processing_class": None}, ValueError, ["Pass the tokenizer as `processing_class`"]),
    "both names of the tokenizer": (
        {"tokenizer": without_special_tokens()},
        ValueError,
        ["`tokenizer` is the old name of `processing_class`", "give only `processing_class`"],
    ),
    "all splits as training data": (
        {"train_dataset": SPLITS},
        TypeError,
        ["`train_dataset` must be a `Dataset`", "got `DatasetDict`", "Pick a split: train, test."],
    ),
    "a list as training data": ({"train_dataset": list(PAIRS)}, TypeError, ["`train_dataset` must be", "got `list`"]),
    "a list as evaluation data": (
        {"eval_dataset": list(PAIRS)},
        TypeError,
        ["The eval dataset must be", "got `list`", "Dataset.from_list(rows)"],
    ),
    "empty training data": ({"train_dataset": EMPTY}, ValueError, ["The train dataset is empty", "at least one pair"]),
    "empty evaluation data": ({"eval_dataset": EMPTY}, ValueError, ["The eval dataset is empty"]),
    "one empty evaluation set of two": (
        {"eval_dataset": {"full": PAIRS, "hollow": EMPTY}},
        ValueError,
        ["The hollow dataset is empty"],
    ),
    "neither model nor model_init": ({"model": None}, ValueError, ["either `model` or `model_init`"]),
    "both model and model_init": ({"model_init": with_two_labels}, ValueError, ["either `model` or `model_init`"]),
    "a token id beyond the embeddings": (
        {"train_dataset": Dataset.from_list(token_rows(304, 9))},
        ValueError,
        [
            "Row 2 of the train dataset",
            "`rejected_ids` holds the token id 304",
            "embedding table has 304 rows",
            "resize_token_embeddings",
        ],
    ),
    "a negative token id": (
        {"train_dataset": Dataset.from_list(token_rows(-100))},
        ValueError,
        ["Row 2 of the train dataset", "the token id -100", "ids 0 to 303"],
    ),
    "a token id beyond the embeddings in one of the evaluation sets": (
        {"eval_dataset": {"good": PAIRS, "bad": Dataset.from_list(token_rows(999))}},
        ValueError,
        ["Row 2 of the bad dataset", "the token id 999"],
    ),
    "a token id beyond the embeddings in the old columns": (
        {"train_dataset": Dataset.from_list(token_rows(304, old=True))},
        ValueError,
        ["Row 2 of the train dataset", "`input_ids_rejected` holds the token id 304"],
    ),
    "a tokenizer that makes ids the model lacks": (
        {
            "train_dataset": Dataset.from_list(
                [{"chosen": "a", "rejected": "b"}, {"chosen": "a<more98>", "rejected": "b"}]
            ),
            "processing_class": with_tokens_that_the_model_lacks("<pad>"),
        },
        ValueError,
        ["Row 1 of the train dataset", "`chosen_ids` holds the token id", "304 rows"],
    ),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments_of_the_trainer(case: str, start: Any) -> None:
    arguments, error, fragments = BAD_ARGUMENTS[case]
    with pytest.raises(error) as caught:
        start(**arguments)
    assert [text for text in fragments if text not in str(caught.value)] == [], str(caught.value)


BAD_SETTINGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a pad token that is not in the vocabulary": (
        {"pad_token": "<nope>"},
        ["`pad_token` ('<nope>')", "not found in the vocabulary", "add_special_tokens"],
    ),
    "an eos token that is not in the vocabulary": (
        {"eos_token": "<nope>"},
        ["`eos_token` ('<nope>')", "not found in the vocabulary", "resize_token_embeddings"],
    ),
    "more mesh than devices": (
        {"mesh": "data=2,fsdp=4"},
        ["mesh 'data=2,fsdp=4'", "data=2 x fsdp=4 x tensor=1 is 8 and there are 1", "Meshes that work: data=1,fsdp=1"],
    ),
    "a mesh that does not divide": ({"mesh": "data=3,fsdp=-1"}, ["leaves 1/3, no whole number, for fsdp", "fsdp=-1"]),
    "an unknown mesh axis": ({"mesh": "fdsp=-1"}, ["unknown axis 'fdsp'", "data, fsdp", "Did you mean 'fsdp'?"]),
    "an unknown optimizer": ({"optim": "adamw_trch"}, ["adamw_trch", "adamw_torch"]),
    "activation offloading": (
        {"activation_offloading": True},
        ["activation_offloading is not supported", "gradient_checkpointing=True"],
    ),
    "a multiple that is no number": ({"pad_to_multiple_of": "many"}, ["many"]),
    "text where a number belongs": ({"learning_rate": "1e-4"}, ["learning_rate must be a finite number", "'1e-4'"]),
    "a strategy that there is not": (
        {"train_sampling_strategy": "longest"},
        ["train_sampling_strategy must be one of 'random', 'sequential'", "got 'longest'"],
    ),
    "options that are no mapping": ({"lr_scheduler_kwargs": [1]}, ["lr_scheduler_kwargs must be a mapping", "[1]"]),
    "no tracker at all": ({"report_to": None}, ["report_to names None", "'none'"]),
    "a maximum length that no pair has": ({"max_length": 1}, ["all 8 pairs were dropped", "max_length=1", "None"]),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_bad_settings(case: str, start: Any) -> None:
    settings, fragments = BAD_SETTINGS[case]
    with pytest.raises(ValueError) as caught:
        start(settings)
    assert [text for text in fragments if text not in str(caught.value)] == [], str(caught.value)


GOOD_SETTINGS: list[dict[str, Any]] = [
    {"warmup_steps": 0.1, "logging_steps": 0.5, "save_steps": 1.0, "max_steps": -1},
    {"save_strategy": "no", "save_steps": 0, "logging_strategy": "no", "logging_steps": 0, "eval_steps": -1},
    {
        "fsdp": "no",
        "packing": "off",
        "resume_from_checkpoint": False,
        "optim_args": "",
        "dataloader_persistent_workers": False,
    },
    {"optim": "sgd", "optim_args": "momentum=0.9, nesterov=true", "neftune_noise_alpha": 0},
    *({"lr_scheduler_type": name} for name in ("linear", "cosine", "polynomial", "inverse_sqrt", "constant")),
    *({"lr_scheduler_type": name} for name in ("cosine_with_restarts", "constant_with_warmup")),
    *({"lr_scheduler_type": name, "eval_strategy": "epoch"} for name in ("reduce_lr_on_plateau", "greedy")),
    {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": '{"min_lr_rate": 0.1}', "warmup_steps": 10},
    {"lr_scheduler_type": "cosine_warmup_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}},
    {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 100}},
]


@pytest.mark.parametrize("settings", GOOD_SETTINGS)
def test_settings_that_mean_something_are_taken(settings: dict[str, Any], tmp_path: Path) -> None:
    args = RewardConfig(str(tmp_path), bf16=False, **settings)
    assert args.lr_scheduler_type == settings.get("lr_scheduler_type", "linear")


# ---- what only shows with the data, and with what else there is


def with_lengths() -> Dataset:
    return PAIRS.add_column("length", list(range(8)))


@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_pairs_are_grouped_by_a_column_of_lengths_or_not_at_all(strategy: str, start: Any) -> None:
    settings = {"train_sampling_strategy": strategy, "max_steps": 1}
    for other in ({}, {"remove_unused_columns": False, "length_column_name": "size"}):
        with pytest.raises(UserError, match=f"train_sampling_strategy='{strategy}' reads lengths from a column"):
            start(settings | other, train_dataset=with_lengths())
    start(settings | {"remove_unused_columns": False}, train_dataset=with_lengths()).train()


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
    start({**BEST, "metric_for_best_model": "margin"}, eval_dataset=PAIRS, callbacks=[stopping])
    start(BEST, eval_dataset=PAIRS, compute_metrics=lambda _: {"f1": 1.0})
    start(BEST, eval_dataset=PAIRS, callbacks=[Measuring])
    start({"metric_for_best_model": "f1"})  # nothing is evaluated


def test_smoothing_labels_is_told_to_do_nothing(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="trl_tpu"):
        start({"label_smoothing_factor": 0.1})
    assert "label_smoothing_factor does nothing" in caplog.text


def test_an_empty_checkpoint_is_none_to_resume_from(start: Any) -> None:
    with pytest.raises(UserError, match="resume_from_checkpoint='' is no folder"):
        start().train(resume_from_checkpoint="")


PUSHED = {"push_to_hub": True, "hub_token": "x"}


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A hub that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield server


def test_a_hub_that_does_not_answer_is_told_before_a_model_is_loaded(
    start: Any, online: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trl_tpu.config.before_training._HUB_TIMEOUT", 0.2)
    with pytest.raises(UserError, match=r"the Hub does not answer as it should \(ReadTimeout: .*or leave push_to_hub"):
        start(PUSHED, model="no/such-model")
    online.close()
    with pytest.raises(UserError, match=r"the Hub does not answer as it should \(ConnectError: "):
        start(PUSHED, model="no/such-model")


def test_pushing_needs_a_login_and_a_connection(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="OfflineModeIsEnabled"):
        start(PUSHED, model="no/such-model")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UserError, match="push_to_hub=True needs a login: run `hf auth login`"):
        start({"push_to_hub": True}, model="no/such-model")


def test_refused_or_not_the_users_tokenizer_and_data_stay_as_they_were(made: tuple[Any, Any], start: Any) -> None:
    tokenizer = copy.deepcopy(made[1])
    for bad in ({"model": None}, {"eval_dataset": EMPTY}):
        with pytest.raises(ValueError):
            start({"eos_token": "<pad>"}, processing_class=tokenizer, **bad)
    start({"eos_token": "<pad>"}, processing_class=tokenizer)
    assert tokenizer.special_tokens_map == made[1].special_tokens_map
    assert PAIRS.column_names == ["prompt", "chosen", "rejected"]


# ---- token ids of streams and of data given later


def test_a_streams_token_ids_are_checked_as_it_is_read(start: Any) -> None:
    trainer = start({"max_steps": 1}, train_dataset=stream([*token_rows(9) * 20, *token_rows(500)]))
    rows = iter(trainer.train_dataset)
    assert [next(rows)["rejected_ids"] for _ in range(3)] == [[5, 8], [5, 8], [5, 9]]
    with pytest.raises(ValueError, match="Row 62 of the train dataset: `rejected_ids` holds the token id 500"):
        list(rows)


def test_row_numbers_count_the_rows_as_they_came(start: Any) -> None:
    rows = [{"chosen_ids": [5] * 50, "rejected_ids": [5]}, *token_rows(500)]
    for dataset in (Dataset.from_list(rows), stream(rows)):
        with pytest.raises(ValueError, match="Row 3 of the train dataset"):
            list(start({"max_steps": 1, "max_length": 10}, train_dataset=dataset).train_dataset)
    many = Dataset.from_list([token_rows()[0]] * 10_001 + token_rows(500))
    with pytest.raises(ValueError, match="Row 10003 of the train dataset"):
        start(train_dataset=many)


def test_token_ids_that_are_given_to_evaluate_and_predict_are_checked(start: Any) -> None:
    trainer = start()
    for call, name in ((trainer.evaluate, "eval"), (trainer.predict, "test")):
        with pytest.raises(ValueError, match=f"Row 2 of the {name} dataset: .*the token id 304.*304 rows"):
            call(Dataset.from_list(token_rows(304)))


def test_the_largest_id_that_the_model_has_is_good(start: Any) -> None:
    assert start(train_dataset=Dataset.from_list(token_rows(303, 0))).train_dataset[2]["rejected_ids"] == [5, 303, 0]


# ---- a pad token that is the eos token


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("layout", ["preference", "pair rows", "old, right", "old, left"])
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
        pairs = [
            {
                **{f"input_ids_{half}": row[f"{half}_ids"] for half in ("chosen", "rejected")},
                **{f"attention_mask_{half}": [1] * len(row[f"{half}_ids"]) for half in ("chosen", "rejected")},
            }
            for row in pairs
        ]
        collate = RewardDataCollatorWithPadding(tokenizer)
    elif layout == "pair rows":
        collate = PairRows(collate, 4, eos)
    with caplog.at_level(logging.WARNING, logger="trl_tpu"):
        trainer = start({"max_steps": 2}, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer)
    assert "The pad token is the eos token ('<eos>')" in caplog.text
    assert "2 of 3 dialogues end in it" in caplog.text
    assert "Set own_pad_token=True" in caplog.text

    trainer.train()
    trainer.model.eval()
    batch = trainer._prepare_inputs(collate(pairs))
    with torch.no_grad():
        _, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    trained = trainer.rewards_of(outputs, batch)[:3].flatten().cpu()

    trainer.save_model(str(tmp_path / "saved"))
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", num_labels=1)
    assert saved.config.pad_token_id == eos
    with torch.no_grad():
        scored = torch.tensor([saved(torch.tensor([ids])).logits.item() for ids in dialogues])
    torch.testing.assert_close(trained, scored, atol=1e-6, rtol=1e-6)
