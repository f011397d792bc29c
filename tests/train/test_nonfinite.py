"""Steps with a nonfinite loss or gradient are skipped and counted, and several in a row stop the run."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import nonfinite_runs as runs
import pytest
import torch
from peft import LoraConfig
from training import differing, state_of, trained
from transformers import TrainerCallback

from trl_tpu import RewardTrainer
from trl_tpu.checkpoint.folders import STAGING_FOLDER

Make = Callable[..., RewardTrainer]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return runs.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def train(folder: str, tmp_path: Path) -> Make:
    return partial(runs.train, folder, tmp_path)


@pytest.fixture
def make(folder: str, tmp_path: Path) -> Make:
    return partial(runs.make, folder, tmp_path)


class Spoil(TrainerCallback):
    """Multiplies the score head's gradient by infinity in the given steps (0-based); their losses stay finite."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        (weight,) = (parameter for name, parameter in model.named_parameters() if name.endswith("score.weight"))
        weight.register_hook(lambda grad: grad * float("inf") if state.global_step in self.steps else grad)


@pytest.mark.parametrize(
    ("optim", "packing", "accumulation"),
    [("adamw_torch_fused", True, 2), ("adamw_torch", False, 1), ("adafactor", True, 1)],
)
def test_skipped_steps_leave_weights_unchanged(train: Make, optim: str, packing: bool, accumulation: int) -> None:
    """The first and the fourth of 6 steps have one pair with a NaN."""
    settings = {"packing": packing, "gradient_accumulation_steps": accumulation, "optim": optim}
    skipped = train([0, 3], steps=6, **settings)
    without = train([], steps=6, left_out=[0, 3], **settings)
    runs.check_skipped(skipped, without, 2)


def test_infinite_gradient_of_a_finite_loss_is_skipped(train: Make) -> None:
    runs.check_skipped(train([], steps=4, callbacks=[Spoil(2)]), train([], steps=4, left_out=[2]), 1)


def test_only_steps_compute_with_zero_for_denormal_numbers(make: Make) -> None:
    found, trainer = list[float](), make([], steps=1)
    trainer.model.register_forward_hook(lambda *_: found.append((torch.tensor(1e-40) * 1).item()))
    trainer.train()
    trainer.evaluate(trainer.train_dataset)
    step, *evaluation = found
    assert step == 0 and min(evaluation) > 0


def test_log_without_a_finite_step_has_no_loss(train: Make) -> None:
    trainer = train([1], steps=3, logging_steps=1)
    first, second, third, _ = trainer.state.log_history
    assert [logs["nonfinite"] for logs in (first, second, third)] == [0, 1, 0]
    assert "loss" in first and "loss" in third
    assert "loss" not in second and "grad_norm" not in second
    assert all(math.isfinite(value) for logs in trainer.state.log_history for value in logs.values())


@pytest.mark.parametrize("logging_steps", [1, 4, 20])
def test_three_nonfinite_steps_in_a_row_stop_the_run(make: Make, logging_steps: int) -> None:
    """Steps 2, 4, 5 and 6 of 8 are nonfinite: step 4 is the first of three in a row, whichever log detects them."""
    settings = {"logging_steps": logging_steps, "train_sampling_strategy": "random"}
    order = make([], 8, **settings)  # determines the order of the pairs
    rows = [row for batch in order.get_train_dataloader().batch_sampler for row in batch]
    pairs = runs.pairs_of(8).to_list()
    for step in (1, 3, 4, 5):
        pairs[rows[step * runs.BATCH + 3]]["chosen"] += runs.POISON
    trainer = make([], 8, dataset=runs.Dataset.from_list(pairs), **settings)
    with pytest.raises(FloatingPointError, match=r"4 to 6, .*nonfinite_limit=3") as error:
        trainer.train()
    assert trainer.state.global_step == {1: 6, 4: 8, 20: 8}[logging_steps]
    bad_rows = rows[3 * runs.BATCH : 4 * runs.BATCH]
    assert f"rows of step 4 are {bad_rows}" in str(error.value)


def test_resumed_run_continues_the_count_except_after_a_stop(make: Make, tmp_path: Path) -> None:
    """Steps 2 and 3 before the checkpoint and step 4 after it are three in a row, also for a resumed run."""
    settings = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 4}
    for resume in (None, str(tmp_path / "checkpoint-3")):
        with pytest.raises(FloatingPointError, match="2 to 4,"):
            make([1, 2, 3, 4], 6, **settings).train(resume_from_checkpoint=resume)
    resumed = trained(make([1, 2, 3, 4], 6, **settings), resume=str(tmp_path / "checkpoint-4"))
    assert resumed.state.global_step == 6


def test_weights_of_the_last_finite_step_are_saved(make: Make, tmp_path: Path, folder: str) -> None:
    """Also with accumulation and a NaN only in the second micro-batch of each step."""
    settings = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 100, "logging_steps": 1}
    pairs = runs.pairs_of(3, accumulation=2).to_list()
    for step in range(3):
        pairs[(2 * step + 1) * runs.BATCH]["rejected"] += runs.POISON
    trainer = make([], 3, dataset=runs.Dataset.from_list(pairs), **settings)
    with pytest.raises(FloatingPointError, match=r"checkpoint-3.* step 1 .*\[0, 1, 2, "):
        trainer.train()
    saved, first = (runs.make(each, tmp_path, [], 3).model for each in (str(tmp_path / "checkpoint-3"), folder))
    for one, other in zip(saved.parameters(), first.parameters(), strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def test_stop_that_cannot_save_says_so(make: Make, tmp_path: Path) -> None:
    (tmp_path / STAGING_FOLDER).write_text("a file in place of the staging folder")
    trainer = make([0, 1, 2], 4, save_strategy="steps", save_steps=100, logging_steps=1)
    with pytest.raises(FloatingPointError, match="not saved"):
        trainer.train()


class Scaled(RewardTrainer):
    """A trainer with accelerate's loss scaling, which accelerate itself offers only on accelerators."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.scaler, self.accelerator.native_amp = torch.amp.GradScaler("cpu"), True


@pytest.mark.parametrize("spoils_loss", [False, True])
def test_loss_scaler_skips_infinite_gradients_without_a_count(make: Make, folder: str, spoils_loss: bool) -> None:
    """The scaler causes and skips infinite gradients itself. A NaN in the loss is counted: no scale removes it."""
    args, callbacks = make([], 6, learning_rate=0.1, fp16=True, logging_steps=1).args, [Spoil(0, 1, 2, 3)]
    pairs = runs.pairs_of(6, [1, 2, 3] if spoils_loss else [])
    trainer = Scaled(folder, args, train_dataset=pairs, callbacks=[] if spoils_loss else callbacks)
    if spoils_loss:
        with pytest.raises(FloatingPointError, match="2 to 4,"):
            trainer.train()
    else:
        assert trained(trainer).state.global_step == 6
        assert runs.logged(trainer, "nonfinite") == [0] * 6
        assert trainer.accelerator.scaler.get_scale() < 2**16 and args.nonfinite_limit == 3  # the defaults
    assert all(math.isfinite(loss) and loss > 0 for loss in runs.logged(trainer, "loss"))
    assert not trainer.model.score.weight.isnan().any()


def test_float16_weights_train_as_float32_weights_and_resume_bitwise(tmp_path: Path, folder: str) -> None:
    """Updates in float16 turn weights into NaN. Rounding of weights to 11 bits changes losses by less than 1 %."""
    found = dict[str, RewardTrainer]()
    for name, dtype in (("float32", "float32"), ("float16", "float16"), ("resumed", "float16")):
        settings = {"model_init_kwargs": {"dtype": dtype}, "save_strategy": "steps", "save_steps": 3}
        found[name] = runs.make(folder, tmp_path / name, [], 6, logging_steps=1, **settings)
        trained(found[name], resume=str(tmp_path / "float16" / "checkpoint-3") if name == "resumed" else None)
    losses = {name: runs.logged(trainer, "loss") for name, trainer in found.items()}
    assert losses["float16"] == pytest.approx(losses["float32"], rel=0.01) and losses["float16"][0] > 0
    assert differing(found["float16"], found["resumed"]) == []
    assert found["float16"].model.score.weight.dtype == torch.float16


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("peft_config", [None, LoraConfig(task_type="SEQ_CLS", r=2)], ids=["full", "adapters"])
def test_nonfinite_steps_stop_the_run_in_every_dtype(make: Make, folder: str, dtype: str, peft_config: Any) -> None:
    args = make([], 5, logging_steps=1).args
    args.model_init_kwargs = {"dtype": dtype}
    for poisoned, stop in (([1, 3], None), ([1, 2, 3], "2 to 4,")):
        data = runs.pairs_of(5, poisoned)
        trainer = RewardTrainer(folder, args, train_dataset=data, peft_config=peft_config)
        assert any(parameter.dtype == getattr(torch, dtype) for parameter in trainer.model.parameters())
        if stop is None:
            assert runs.logged(trained(trainer), "nonfinite") == [0, 1, 0, 1, 0]
            assert len(runs.logged(trainer, "loss")) == 3 and min(runs.logged(trainer, "loss")) > 0
        else:
            with pytest.raises(FloatingPointError, match=stop):
                trainer.train()


def test_limit_zero_disables_skipping(train: Make) -> None:
    trainer = train([0], 3, nonfinite_limit=0)
    assert trainer.state.global_step == 3
    assert state_of(trainer)["score.weight"].isnan().all()  # as in TRL
    assert runs.logged(trainer, "nonfinite") == []


def test_finite_runs_are_bitwise_equal_with_and_without_limit(train: Make) -> None:
    settings = {"lr_scheduler_type": "linear", "logging_steps": 1}
    on, off = (train([], steps=5, nonfinite_limit=limit, **settings) for limit in (3, 0))
    assert differing(on, off) == []
    for name in ("loss", "grad_norm", "mean_reward", "train_loss"):
        assert runs.logged(on, name) == runs.logged(off, name)
