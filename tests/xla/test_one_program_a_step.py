"""A training step is one program and one execution, and nothing is read from the device between logs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import own_loop
import pytest
import tiny
import torch
from counters import CountAtSteps, Counts, count
from training import trained
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from trl_tpu import RewardTrainer
from trl_tpu.packing.shapes import RowPlan, RowShape


@pytest.mark.parametrize(
    ("packing", "accumulation", "norms"), [pytest.param(True, 3, False, marks=pytest.mark.eight), (False, 1, True)]
)
def test_counters_over_10_steps(
    config: Callable[..., Any], model_folder: str, packing: bool, accumulation: int, norms: bool
) -> None:
    """Decay to a rate of exactly 0 and up again, an epoch's end and a short last batch are within the 10 steps.

    The step before them, which compiles the program, is the first of the warm-up, at a rate of 0 too.
    """
    schedule = {"warmup_steps": 2, "lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": 1}}
    batches = {"gradient_accumulation_steps": accumulation, "packing": packing, "max_shapes": 1}
    batches["log_grad_norms"] = norms
    args = config(max_steps=12, logging_steps=5, **schedule, **batches)
    counter = CountAtSteps()
    pairs = tiny.made_up_pairs(7 * 8 * accumulation - 5)
    trained(RewardTrainer(model_folder, args, train_dataset=pairs, callbacks=[counter]))

    over_10 = counter.between(1, 11)
    executions_a_step = 1 if accumulation == 1 else accumulation + 1  # one a micro-batch, and one for the update
    assert over_10.compiles == 0
    assert over_10.executions == 10 * executions_a_step
    assert over_10.device_to_host == 2 + 2 * norms  # steps 5 and 10 log, one read each, and one of norms
    assert counter.between(1, 4) == Counts(0, 3 * executions_a_step, 0)
    assert counter.rates[0] == counter.rates[7] == 0.0 < counter.rates[6]


@pytest.mark.eight
@pytest.mark.parametrize("packing", [True, False])
def test_evaluation_compiles_once_for_all_batches(
    config: Callable[..., Any], model_folder: str, packing: bool
) -> None:
    """21 pairs in batches of 8: the short last batch is the same program, and a second evaluation is none at all."""
    args = config(packing=packing, max_shapes=1)
    trainer = RewardTrainer(model_folder, args, train_dataset=tiny.made_up_pairs(8))
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


@pytest.mark.parametrize(
    "settings",
    [
        {"packing": False, "gradient_accumulation_steps": 2},
        {"packing": True},  # in several micro-batches
        {"packing": False, "scan_layers": True, "pad_to_multiple_of": 64, "gradient_accumulation_steps": 2},
    ],
)
def test_what_no_forward_uses_does_not_decay(
    config: Callable[..., Any], model_folder: str, settings: dict[str, Any]
) -> None:
    """As in torch, whose optimizers leave parameters alone that have no gradient."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1)
    for module in (model, *model.model.layers):
        module.register_parameter("spare", torch.nn.Parameter(torch.ones(8, 8)))
    args = config(weight_decay=0.5, learning_rate=1e-2, max_steps=4, **settings)
    shape = RowShape(1, 192)
    fixed = RowPlan((shape,), (shape,)) if settings["packing"] else None
    trainer_class = type("ShortRows", (RewardTrainer,), {"fixed_rows": fixed})
    counter = CountAtSteps()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    data = tiny.uneven_pairs(64)
    trainer = trainer_class(model, args, train_dataset=data, processing_class=tokenizer, callbacks=[counter])
    assert trainer.batch_plan.accumulates == settings["packing"]
    before = model.score.weight.detach().cpu().clone()
    trainer.train()
    weights = {name: weight.detach().cpu() for name, weight in trainer.model.named_parameters()}
    assert not torch.equal(weights["score.weight"], before)
    spare = [weight for name, weight in weights.items() if name.endswith("spare")]
    assert len(spare) == 3 and all(weight.eq(1).all() for weight in spare)
    assert counter.between(2, 3).compiles == 0 or settings["packing"]


@pytest.mark.eight
def test_a_loop_of_ones_own_compiles_nothing_more_once_it_has_evaluated(
    config: Callable[..., Any], model_folder: str, tmp_path: Path
) -> None:
    """Two shapes; on one device some batches take several micro-batches."""
    compiled = own_loop.compare(config, model_folder, tmp_path)
    assert compiled[4] - compiled[0] <= 1 and len(set(compiled[5:])) == 1
