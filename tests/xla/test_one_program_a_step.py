"""A training step is one program and one execution, and nothing is read from the device between logs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import tiny
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
from transformers import TrainerCallback

from trl_tpu import RewardTrainer


class Counts(NamedTuple):
    compiles: int
    executions: int
    device_to_host: int


def count() -> Counts:
    xm.wait_device_ops()  # executions are counted when they have run

    def total(*metrics: str) -> int:
        return sum((met.metric_data(metric) or [0])[0] for metric in metrics)

    return Counts(total("CompileTime"), total("ExecuteTime", "ExecuteReplicatedTime"), total("TransferFromDeviceTime"))


class CountAtSteps(TrainerCallback):
    """Counts when a step begins: the step before has just been executed."""

    def __init__(self) -> None:
        self.at: dict[int, Counts] = {}
        self.rates: dict[int, float] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, lr_scheduler: Any, **_: Any) -> None:
        self.at[state.global_step] = count()
        self.rates[state.global_step] = lr_scheduler.get_last_lr()[0]

    def between(self, first: int, last: int) -> Counts:
        return Counts(*(after - before for before, after in zip(self.at[first], self.at[last], strict=True)))


@pytest.mark.parametrize("accumulation", [1, 3])
def test_counters_over_20_steps(config: Callable[..., Any], model_folder: str, accumulation: int) -> None:
    """Decay to a rate of exactly 0 and up again, an epoch's end and a short last batch are within the 20 steps.

    The step before them, which compiles the program, is the first of the warm-up, at a rate of 0 too.
    """
    steps, logs_every = 22, 10
    args = config(
        max_steps=steps,
        warmup_steps=2,
        lr_scheduler_type="cosine",
        lr_scheduler_kwargs={"num_cycles": 1},
        logging_steps=logs_every,
        gradient_accumulation_steps=accumulation,
    )
    counter = CountAtSteps()
    pairs = tiny.made_up_pairs(15 * 8 * accumulation - 5)
    trainer = RewardTrainer(model_folder, args, train_dataset=pairs, callbacks=[counter])
    trainer.train()

    over_20 = counter.between(1, 21)
    executions_a_step = 1 if accumulation == 1 else accumulation + 1  # one a micro-batch, and one for the update
    assert over_20.compiles == 0
    assert over_20.executions == 20 * executions_a_step
    assert over_20.device_to_host == 2  # steps 10 and 20 log, one read each
    assert counter.between(1, 9) == Counts(0, 8 * executions_a_step, 0)
    assert counter.rates[0] == counter.rates[12] == 0.0 < counter.rates[11]


def test_packed_steps_are_as_many_programs_as_planned_shapes(config: Callable[..., Any], model_folder: str) -> None:
    """And evaluation, on pairs of its own, adds at most as many again; nothing is read between logs."""
    args = config(num_train_epochs=4, logging_steps=100, packing=True)
    counter = CountAtSteps()
    pairs, held_out = tiny.made_up_pairs(60), tiny.made_up_pairs(27, seed=1)
    trainer = RewardTrainer(model_folder, args, train_dataset=pairs, callbacks=[counter])
    trainer.train()
    planned = trainer.planned_shapes
    steps = counter.between(0, max(counter.at))
    assert planned is not None and 1 <= planned <= 4
    assert steps.compiles <= planned
    assert steps.executions == max(counter.at)
    assert steps.device_to_host == 0
    before = count()
    packed_rewards = trainer.predict(held_out).predictions
    assert count().compiles - before.compiles <= 4
    trainer.args.packing = False
    padded_rewards = trainer.predict(held_out).predictions
    np.testing.assert_allclose(packed_rewards, padded_rewards, atol=1e-5)


def test_evaluation_compiles_once_for_all_batches(config: Callable[..., Any], model_folder: str) -> None:
    """21 pairs in batches of 8: the short last batch is the same program, and a second evaluation is none at all."""
    trainer = RewardTrainer(model_folder, config(), train_dataset=tiny.made_up_pairs(8))
    held_out = tiny.made_up_pairs(21, seed=1)
    before = count()
    first = trainer.evaluate(held_out)
    between = count()
    second = trainer.evaluate(held_out)
    after = count()
    assert between.compiles - before.compiles <= 2  # the forward, and slicing of what came before it
    assert after.compiles == between.compiles
    assert after.device_to_host - between.device_to_host <= 13  # at the end: 3 batches of 4 tensors, the token count
    assert first["eval_loss"] == second["eval_loss"]
