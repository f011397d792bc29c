"""Packed training compiles one program per planned shape for any batches, and evaluation compiles no more."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import real_pairs
import tiny
import torch
from counters import CountAtSteps, count
from datasets import Dataset
from label_formats import STEPS, by_transformers, load, save_model, settings, solutions
from training import losses, trained
from transformers import AutoTokenizer

from trl_tpu import RewardDataCollatorWithPadding, RewardTrainer, runtime
from trl_tpu.data.collators import _tokenize
from trl_tpu.experimental.prm import PRMTrainer
from trl_tpu.packing.shapes import RowPlan, RowShape


@pytest.mark.parametrize(
    ("accumulation", "attention"),
    [(1, "masks"), *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, "expanded"), (2, "masks")))],
)
def test_packed_training_compiles_one_program_per_planned_shape(
    config: Callable[..., Any], model_folder: str, accumulation: int, attention: str
) -> None:
    """One execution per micro-batch, no reads between logs. Evaluation also works in inference mode."""
    settings = {"num_train_epochs": 2, "logging_steps": 1000, "gradient_accumulation_steps": accumulation}
    devices = runtime.current().topology().devices
    settings |= {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8}
    pairs, held_out = tiny.uneven_pairs(64 * devices - 3), tiny.uneven_pairs(27 * devices, seed=1)
    counter = CountAtSteps()
    args = config(packing=True, packed_attention=attention, **settings)
    # short rows, so that more batches need several micro-batches than with the trainer's own plan
    shape = RowShape(devices, 192)
    trainer_class = type("ShortRows", (RewardTrainer,), {"fixed_rows": RowPlan((shape,), (shape,))})
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
    assert count().compiles - before.compiles <= 4 + 1  # plus slices of earlier results
    between = count()
    trainer.predict(held_out)
    assert count().compiles == between.compiles
    with torch.inference_mode():
        evaluated = trainer.evaluate(held_out)["eval_loss"]
    assert evaluated == pytest.approx(packed.metrics["test_loss"], abs=1e-6)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_packed_streams_equal_padded_ones_in_few_programs(config: Callable[..., Any], model_folder: str) -> None:
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
        given = config(
            packing=packing, max_length=128, max_shapes=2, max_steps=11, logging_steps=1, learning_rate=1e-4
        )
        trainer = RewardTrainer(model_folder, given, collate, train, callbacks=[counter])
        trained(trainer)
        assert packing == (trainer.batch_plan.padding_reason is None)
        assert counter.between(0, 10).compiles <= (trainer.batch_plan.layout.shapes or 0)
        evaluated.append(trainer.evaluate(held_out)["eval_loss"])
        before = count().compiles
        assert trainer.evaluate(held_out)["eval_loss"] == evaluated[-1] and count().compiles == before
        logged.append(losses(trainer))
    np.testing.assert_allclose(*logged, atol=1e-6)
    np.testing.assert_allclose(*evaluated, atol=1e-6)


@pytest.mark.parametrize(
    ("source", "count"),
    [("made up", 200), *(pytest.param(each, real_pairs.COUNT, marks=pytest.mark.long) for each in real_pairs.SOURCES)],
)
def test_epoch_of_real_lengths_compiles_only_planned_shapes(
    source: str, count: int, config: Callable[..., Any], tmp_path: Path
) -> None:
    """All pairs of up to 256 tokens, in batches of 32: one program per planned shape, no reads between logs."""
    pairs = real_pairs.pairs_from(source, count)
    # shapes that no other test has compiled
    hidden = 8 * (1 + real_pairs.SOURCES.index(source) + 2 * (count == real_pairs.COUNT))
    model = tiny.save_tiny(tmp_path / "model", [*pairs["chosen"][:300]], hidden=hidden, layers=1)
    counter = CountAtSteps()
    args = config(packing=True, num_train_epochs=1, logging_steps=1000, max_length=256)
    args.per_device_train_batch_size *= 4
    trainer = trained(RewardTrainer(model, args, train_dataset=pairs, callbacks=[counter]))
    last = max(counter.at)
    steps = counter.between(0, last)
    assert last == len(trainer.train_dataset) // 32 > count // 60
    loader = trainer.get_train_dataloader()
    loader.set_epoch(0)
    batches = [batch.parts for batch in loader.batches]
    used = {(part.input_ids_RL.shape, part is parts[-1]) for parts in batches for part in parts}
    planned = trainer.batch_plan.layout.shapes
    assert planned is not None and planned <= 4
    assert steps.compiles == len(used) <= planned
    assert steps.device_to_host == 0
    assert steps.executions >= last


@pytest.mark.parametrize("packing", [True, False])
def test_planned_process_reward_batches_equal_transformers(tmp_path: Path, packing: bool) -> None:
    model, counter = save_model(tmp_path / "model"), CountAtSteps()
    data = {"train_dataset": solutions(22), "eval_dataset": solutions(9, seed=1)}
    given = settings(tmp_path, logging_steps=STEPS, packing=packing)
    trainer = trained(PRMTrainer(load(model), given, **data, callbacks=[counter]))
    steps, shapes = counter.between(0, STEPS - 1), trainer.batch_plan.layout.shapes
    assert shapes is not None and steps.compiles <= shapes and steps.device_to_host == 0
    rows, held_out = trainer.train_dataset, trainer.eval_dataset
    losses, evaluated = by_transformers(model, rows, held_out)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(sum(losses) / STEPS, abs=1e-5)
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(evaluated, abs=1e-5) and 0 <= metrics["eval_accuracy"] <= 1
