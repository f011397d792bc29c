"""Packed training compiles one program per planned shape for any batches, and evaluation compiles no more."""

from typing import Any

import numpy as np
import pytest
import tiny
from counters import CountAtSteps, count
from datasets import Dataset
from training import losses, trained
from transformers import AutoTokenizer

from trl_tpu import RewardDataCollatorWithPadding, RewardTrainer, runtime
from trl_tpu.compat.old_columns import _tokenize
from trl_tpu.packing.shapes import BatchShape, ShapePlan


@pytest.mark.parametrize(
    ("accumulation", "attention"),
    [(1, "masks"), *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, "expanded"), (2, "masks")))],
)
def test_packed_training_compiles_one_program_per_planned_shape(
    config: Any, model_folder: str, accumulation: int, attention: str
) -> None:
    """One execution per micro-batch, no reads between logs. Evaluation also works in inference mode."""
    settings = {"num_train_epochs": 2, "logging_steps": 1000, "gradient_accumulation_steps": accumulation}
    devices = runtime.current().topology().devices
    # a small rate, since Adam turns rounding of gradients near 0 into full steps
    settings |= {"learning_rate": 1e-4, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8}
    settings["max_shapes"] = 2
    pairs, held_out = tiny.uneven_pairs(40 * devices - 3), tiny.uneven_pairs(19 * devices, seed=1)
    counter = CountAtSteps()
    args = config(packing=True, packed_attention=attention, **settings)
    # short rows, so that more batches need several micro-batches than with the trainer's own plan
    shape = BatchShape(devices, 192)
    trainer_class = type("ShortRows", (RewardTrainer,), {"fixed_shapes": ShapePlan((shape,), (shape,))})
    trainer = trainer_class(model_folder, args, train_dataset=pairs, callbacks=[counter])
    counts = [len(batch.parts) for batch in trainer.get_train_dataloader().batches]
    assert trainer.batch_plan.layout.shapes == 2
    assert trainer.batch_plan.layout.accumulates
    assert max(counts) > 1
    trainer.train()
    last = max(counter.at)
    steps = counter.between(0, last)
    assert steps.compiles <= 2 + (accumulation > 1)
    assert steps.executions > last * accumulation  # some batches need several micro-batches
    assert steps.device_to_host == 0

    before = count()
    packed = trainer.predict(held_out)
    assert count().compiles - before.compiles <= 2 + 1  # plus slices of earlier results
    between = count()
    trainer.predict(held_out)
    assert count().compiles == between.compiles

    padded_args = config(packing=False, **settings)
    reference = trained(RewardTrainer(model_folder, padded_args, train_dataset=pairs))
    padded = reference.predict(held_out)
    np.testing.assert_allclose(packed.predictions, padded.predictions, atol=2e-5)
    assert packed.metrics["test_loss"] == pytest.approx(padded.metrics["test_loss"], abs=1e-5)
    found, expected = (each.state.log_history[-1]["train_loss"] for each in (trainer, reference))
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_packed_streams_equal_padded_ones_in_few_programs(config: Any, model_folder: str) -> None:
    """The data is not read in advance: rows planned from the first pairs hold all pairs within `max_length`."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    collate = RewardDataCollatorWithPadding(tokenizer)

    def columns(pairs: Dataset) -> Any:
        texts = {half: [row["prompt"] + row[half] for row in pairs] for half in ("chosen", "rejected")}
        return Dataset.from_dict(_tokenize(texts, tokenizer)).to_iterable_dataset()

    train, held_out = columns(tiny.uneven_pairs(90)), columns(tiny.uneven_pairs(21, seed=1))
    evaluated, logged = [], []
    for packing in (True, False):
        counter = CountAtSteps()
        args = config(packing=packing, max_length=128, max_shapes=2, max_steps=11, logging_steps=1, learning_rate=1e-4)
        trainer = RewardTrainer(model_folder, args, collate, train, callbacks=[counter])
        trained(trainer)
        assert packing == (trainer.batch_plan.padding_reason is None)
        assert counter.between(0, 10).compiles <= (trainer.batch_plan.layout.shapes or 0)
        evaluated.append(trainer.evaluate(held_out)["eval_loss"])
        before = count().compiles
        assert trainer.evaluate(held_out)["eval_loss"] == evaluated[-1] and count().compiles == before
        logged.append(losses(trainer))
    np.testing.assert_allclose(*logged, atol=1e-6)
    np.testing.assert_allclose(*evaluated, atol=1e-6)
