"""A training step is one program and one execution, without reads from the device between logs.

Packed training compiles one program per planned shape for any batches, and evaluation compiles no more.
"""

from pathlib import Path
from typing import Any

import numpy as np
import own_loop
import pytest
import tiny
import torch
from counters import CountAtSteps, Counts, count
from datasets import Dataset
from training import losses, trained
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from trl_tpu import RewardDataCollatorWithPadding, RewardTrainer, runtime
from trl_tpu.compat.old_trl import _tokenize
from trl_tpu.packing.shapes import BatchShape, ShapePlan


@pytest.mark.parametrize(
    ("packing", "accumulation", "norms"), [pytest.param(True, 3, False, marks=pytest.mark.eight), (False, 1, True)]
)
def test_ten_steps_are_ten_executions_and_two_reads(
    config: Any, model_folder: str, packing: bool, accumulation: int, norms: bool
) -> None:
    """The 10 steps include a learning rate of exactly 0, an epoch's end, and its last update of one short batch.

    The step before them compiles the program. As the first of the warm-up it also has a rate of 0.
    """
    schedule = {"warmup_steps": 2, "lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 1}}
    batches = {"gradient_accumulation_steps": accumulation, "packing": packing, "max_shapes": 1}
    batches["log_grad_norms"] = norms
    args = config(max_steps=12, logging_steps=5, **schedule, **batches)
    counter = CountAtSteps()
    pairs = tiny.made_up_pairs(8 * (6 * accumulation + 1) - 5)
    trained(RewardTrainer(model_folder, args, train_dataset=pairs, callbacks=[counter]))

    over_10 = counter.between(1, 11)
    executions_a_step = 1 if accumulation == 1 else accumulation + 1  # one per micro-batch, and one for the update
    assert over_10.compiles == 0
    assert over_10.executions == 10 * executions_a_step - (accumulation - 1)
    assert over_10.device_to_host == 2 + 2 * norms  # logs at steps 5 and 10: one read each, and one for norms
    assert counter.between(1, 4) == Counts(0, 3 * executions_a_step, 0)
    assert counter.rates[0] == counter.rates[7] == 0.0 < counter.rates[6]


@pytest.mark.eight
@pytest.mark.parametrize("packing", [True, False])
def test_evaluation_compiles_once_for_all_batches(config: Any, model_folder: str, packing: bool) -> None:
    """21 pairs in batches of 8: the short last batch uses the same program; a second evaluation compiles nothing."""
    args = config(packing=packing, max_shapes=1)
    trainer = RewardTrainer(model_folder, args, train_dataset=tiny.made_up_pairs(8))
    held_out = tiny.made_up_pairs(21, seed=1)
    before = count()
    first = trainer.evaluate(held_out)
    between = count()
    with torch.inference_mode():
        second = trainer.evaluate(held_out)
    after = count()
    assert between.compiles - before.compiles <= 2  # the forward, and slices of earlier results
    assert after.compiles == between.compiles
    assert after.device_to_host - between.device_to_host <= 13  # 3 batches of 4 tensors, and the token count
    assert first["eval_loss"] == second["eval_loss"]


WITH_SPARE = [
    {"packing": False, "gradient_accumulation_steps": 2},
    {"packing": True},  # in several micro-batches
    {"packing": False, "scan_layers": True, "pad_to_multiple_of": 64, "gradient_accumulation_steps": 2},
]


@pytest.mark.parametrize("settings", WITH_SPARE)
def test_unused_parameters_do_not_decay(config: Any, model_folder: str, settings: dict[str, Any]) -> None:
    """torch's optimizers also leave parameters without a gradient unchanged."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1)
    for module in (model, *model.model.layers):
        module.register_parameter("spare", torch.nn.Parameter(torch.ones(8, 8)))
    args = config(weight_decay=0.5, learning_rate=1e-2, max_steps=4, **settings)
    shape = BatchShape(1, 192)
    fixed = ShapePlan((shape,), (shape,)) if settings["packing"] else None
    trainer_class = type("ShortRows", (RewardTrainer,), {"fixed_shapes": fixed})
    counter = CountAtSteps()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    data = tiny.uneven_pairs(64)
    trainer = trainer_class(model, args, train_dataset=data, processing_class=tokenizer, callbacks=[counter])
    assert trainer.batch_plan.layout.accumulates == settings["packing"]
    before = model.score.weight.detach().cpu().clone()
    trainer.train()
    weights = {name: weight.detach().cpu() for name, weight in trainer.model.named_parameters()}
    assert not torch.equal(weights["score.weight"], before)
    spare = [weight for name, weight in weights.items() if name.endswith("spare")]
    assert len(spare) == 3 and all(weight.eq(1).all() for weight in spare)
    assert counter.between(2, 3).compiles == 0 or settings["packing"]


@pytest.mark.eight
def test_own_loop_compiles_nothing_after_its_first_evaluation(config: Any, model_folder: str, tmp_path: Path) -> None:
    """There are two shapes. On one device some batches need several micro-batches."""
    compiled = own_loop.compare(config, model_folder, tmp_path)
    assert compiled[4] - compiled[0] <= 1 and len(set(compiled[5:])) == 1


# ---- packed rows


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
