"""A step whose loss or gradient is not finite leaves no trace but a count, and several in a row stop the run."""

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nonfinite_runs as runs
import pytest
import torch
from transformers import TrainerCallback

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.training.replay import HeldBatches, load_batch, replay


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return runs.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def train(folder: str, tmp_path: Path) -> Callable[..., RewardTrainer]:
    def train(poisoned: Sequence[int], steps: int, **settings: Any) -> RewardTrainer:
        return runs.train(folder, tmp_path, poisoned, steps, **settings)

    return train


@pytest.fixture
def make(folder: str, tmp_path: Path) -> Callable[..., RewardTrainer]:
    def make(poisoned: Sequence[int], steps: int, **settings: Any) -> RewardTrainer:
        return runs.make(folder, tmp_path, poisoned, steps, **settings)

    return make


class Spoil(TrainerCallback):
    """Multiplies the score head's gradient by infinity in some steps (0-based); their losses are finite."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        (weight,) = (parameter for name, parameter in model.named_parameters() if name.endswith("score.weight"))
        weight.register_hook(lambda grad: grad * float("inf") if state.global_step in self.steps else grad)


@pytest.mark.parametrize(
    ("optim", "packing", "accumulation"),
    [
        ("adamw_torch", True, 1),
        ("adamw_torch", True, 2),
        ("adamw_torch", False, 1),
        ("sgd", True, 1),
        ("rmsprop", True, 1),
        ("adafactor", True, 1),
    ],
)
def test_weights_and_state_are_those_of_a_run_without_the_steps(
    train: Callable[..., RewardTrainer], optim: str, packing: bool, accumulation: int
) -> None:
    """The first and the fourth of 6 steps have one pair each with a NaN in it."""
    settings = {"packing": packing, "gradient_accumulation_steps": accumulation, "optim": optim}
    skipped = train([0, 3], steps=6, **settings)
    without = train([], steps=6, left_out=[0, 3], **settings)
    assert runs.differing(skipped, without) == []
    assert runs.logged(skipped, "nonfinite") == [2]
    assert runs.logged(without, "nonfinite") == [0]
    for name in ("loss", "train_loss", "grad_norm"):
        assert runs.logged(skipped, name) == runs.logged(without, name)
    for name in ("accuracy", "margin", "mean_reward", "min_reward", "max_reward"):
        assert math.isfinite(*runs.logged(skipped, name))


def test_an_infinite_gradient_of_a_finite_loss_is_one_too(train: Callable[..., RewardTrainer]) -> None:
    skipped = train([], steps=4, callbacks=[Spoil(2)])
    without = train([], steps=4, left_out=[2])
    assert runs.differing(skipped, without) == []
    assert runs.logged(skipped, "loss") == runs.logged(without, "loss")
    assert runs.logged(skipped, "nonfinite") == [1]


def test_the_learning_rate_follows_the_steps(train: Callable[..., RewardTrainer]) -> None:
    settings = {"lr_scheduler_type": "linear", "logging_steps": 1}
    rates = [runs.logged(train(poisoned, steps=4, **settings), "learning_rate") for poisoned in ([1], [])]
    assert rates[0] == rates[1]


def test_a_log_without_a_finite_step_has_no_loss(train: Callable[..., RewardTrainer]) -> None:
    trainer = train([1], steps=3, logging_steps=1)
    first, second, third, _ = trainer.state.log_history
    assert [logs["nonfinite"] for logs in (first, second, third)] == [0, 1, 0]
    assert "loss" in first and "loss" in third
    assert "loss" not in second and "grad_norm" not in second
    assert all(math.isfinite(value) for logs in trainer.state.log_history for value in logs.values())


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("logging_steps", [1, 2, 4, 20])
def test_three_in_a_row_stop_the_run(
    make: Callable[..., RewardTrainer], tmp_path: Path, packing: bool, logging_steps: int
) -> None:
    """Steps 2, 4, 5 and 6 of 8: the first of three in a row is step 4, whichever log sees it."""
    settings = {"packing": packing, "logging_steps": logging_steps, "train_sampling_strategy": "random"}
    order = make([], 8, **settings)  # learn the order first
    rows = [row for batch in order.get_train_dataloader().batch_sampler for row in batch]
    pairs = runs.pairs_of(8).to_list()
    for step in (1, 3, 4, 5):
        pairs[rows[step * runs.BATCH + 3]]["chosen"] += runs.POISON
    trainer = make([], 8, dataset=runs.Dataset.from_list(pairs), **settings)
    with pytest.raises(FloatingPointError, match=r"3 steps in a row, 4 to 6, .*\(nonfinite_limit=3\)") as error:
        trainer.train()
    assert trainer.state.global_step == {1: 6, 2: 6, 4: 8, 20: 8}[logging_steps]
    bad_rows = rows[3 * runs.BATCH : 4 * runs.BATCH]
    assert f"pairs of step 4 are the rows {', '.join(map(str, bad_rows))} of" in str(error.value)
    saved = tmp_path / "nonfinite-step-4"
    assert str(saved) in str(error.value)
    what = json.loads((saved / "replay.json").read_text())
    assert (what["step"], what["steps_in_a_row"], what["rows"]) == (4, 3, bad_rows)
    assert math.isnan(replay(trainer, saved)[0][0])


def test_the_saved_batch_and_checkpoint_reproduce_it(
    make: Callable[..., RewardTrainer], tmp_path: Path, folder: str
) -> None:
    """In a trainer made anew from the checkpoint; with accumulation the second micro-batch alone is at fault."""
    settings = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 100, "logging_steps": 1}
    pairs = runs.pairs_of(3, accumulation=2).to_list()
    for step in range(3):
        pairs[(2 * step + 1) * runs.BATCH]["rejected"] += runs.POISON
    trainer = make([], 3, dataset=runs.Dataset.from_list(pairs), **settings)
    with pytest.raises(FloatingPointError, match="in checkpoint-3"):
        trainer.train()
    again = runs.make(str(tmp_path / "checkpoint-3"), tmp_path, [], 3)
    (first, second), norm = replay(again, tmp_path / "nonfinite-step-1")
    assert math.isfinite(first) and math.isnan(second) and math.isnan(norm)
    assert first == pytest.approx(0.7, abs=0.2)  # ln 2: the model is untrained
    assert all(parameter.grad is None for parameter in again.model.parameters())


def test_a_resumed_run_counts_on(make: Callable[..., RewardTrainer], tmp_path: Path) -> None:
    """Steps 2 and 3 before the checkpoint and step 4 after it are three in a row; so they are for a resumed run."""
    settings = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 5}
    with pytest.raises(FloatingPointError, match="in a row, 2 to 4,"):
        make([1, 2, 3], 6, **settings).train()
    with pytest.raises(FloatingPointError, match="in a row, 2 to 4,"):
        make([1, 2, 3], 6, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_after_a_stop_a_resumed_run_begins_a_new_row(make: Callable[..., RewardTrainer], tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 100, "logging_steps": 1}
    with pytest.raises(FloatingPointError, match="1 to 3"):
        make([0, 1, 2, 3, 4], 6, **settings).train()
    resumed = make([0, 1, 2, 3, 4], 6, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.state.global_step == 6


def test_pairs_of_a_stream_are_named_by_their_tokens(make: Callable[..., RewardTrainer], tmp_path: Path) -> None:
    stream = runs.pairs_of(4, poisoned=[0, 1, 2]).to_iterable_dataset()
    trainer = make([], 4, dataset=stream)
    with pytest.raises(FloatingPointError) as error:
        trainer.train()
    (rows,) = load_batch(tmp_path / "nonfinite-step-1")
    first = [
        int(number) for number in re.search(r"tokens begin ([\d, ]+)", str(error.value))[1].split(", ")[:16] if number
    ]
    assert first == rows["packed"].input_ids_RL.flatten()[:16].tolist()
    assert json.loads((tmp_path / "nonfinite-step-1" / "replay.json").read_text())["rows"] is None
    assert math.isnan(replay(trainer, tmp_path / "nonfinite-step-1")[0][0])


def test_a_batch_too_long_ago_is_made_again_from_its_rows(
    make: Callable[..., RewardTrainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trl_tpu.training.replay._HELD_BYTES", 1)
    trainer = make([1, 2, 3], 8)
    with pytest.raises(FloatingPointError, match="rows 8, 9, 10,"):
        trainer.train()
    assert math.isnan(replay(trainer, tmp_path / "nonfinite-step-2")[0][0])
    assert "made again" in (tmp_path / "nonfinite-step-2" / "replay.json").read_text()


def test_rows_are_not_named_when_they_are_not_those_of_the_batch(make: Callable[..., RewardTrainer]) -> None:
    """A sampler without a seed gives another order when it is asked again."""
    trainer = make([0, 1, 2], 3)
    trainer._get_train_sampler = lambda dataset=None: torch.utils.data.WeightedRandomSampler([1.0] * 24, 24)  # type: ignore
    trainer.add_callback(Spoil(0, 1, 2))
    with pytest.raises(FloatingPointError, match="not known by their rows; their tokens begin"):
        trainer.train()


def test_the_saved_files_hold_no_text(make: Callable[..., RewardTrainer], tmp_path: Path) -> None:
    trainer = make([0, 1, 2], 3)
    with pytest.raises(FloatingPointError):
        trainer.train()
    assert sorted(path.name for path in (tmp_path / "nonfinite-step-1").iterdir()) == [
        "batch.safetensors",
        "replay.json",
    ]
    text = "".join(path.read_bytes().decode("latin-1") for path in (tmp_path / "nonfinite-step-1").iterdir())
    assert "Count on" not in text


def test_0_turns_it_off(make: Callable[..., RewardTrainer]) -> None:
    trainer = make([0], 3, nonfinite_limit=0)
    trainer.train()
    assert trainer.state.global_step == 3
    assert runs.state_of(trainer)["score.weight"].isnan().all()  # as in TRL
    assert runs.logged(trainer, "nonfinite") == []


def test_finite_runs_are_the_same_to_the_bit(train: Callable[..., RewardTrainer]) -> None:
    settings = {"lr_scheduler_type": "linear", "logging_steps": 1}
    on, off = (train([], steps=5, nonfinite_limit=limit, **settings) for limit in (3, 0))
    assert runs.differing(on, off) == []
    for name in ("loss", "grad_norm", "mean_reward", "train_loss"):
        assert runs.logged(on, name) == runs.logged(off, name)


def test_a_negative_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nonfinite_limit must be at least 0, got -1"):
        RewardConfig(str(tmp_path), nonfinite_limit=-1)


def test_of_the_oldest_steps_all_or_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_tpu.training.replay._HELD_BYTES", 100)
    held = HeldBatches()
    for step in (1, 1, 2, 2, 3):
        held.add(step, {"input_ids": torch.zeros(10, dtype=torch.int32)})
    assert [len(held.get(step) or []) for step in (1, 2, 3)] == [0, 0, 1]


def test_batches_are_held_until_a_log_has_found_them_finite(make: Callable[..., RewardTrainer]) -> None:
    trainer, held = make([], 12, logging_steps=2), []

    class Look(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            held.append([step for step in range(13) if trainer._held.get(step)])

    trainer.add_callback(Look())
    trainer.train()
    assert max(map(len, held)) == 2 + 3 - 1  # those since the log, and in which a row of 3 may have begun before it
    assert held[-1][-1] == 12
