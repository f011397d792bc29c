"""Process rewards on XLA: planned shapes, and the numbers of transformers' own token classification."""

from pathlib import Path

import pytest
from counters import CountAtSteps
from stepwise import STEPS, by_transformers, load, save_model, settings, solutions
from training import trained

from trl_tpu.experimental.prm import PRMTrainer


@pytest.mark.parametrize("packing", [True, False])
def test_planned_batches_are_what_transformers_computes(tmp_path: Path, packing: bool) -> None:
    model, counter = save_model(tmp_path / "model"), CountAtSteps()
    data = {"train_dataset": solutions(22), "eval_dataset": solutions(9, seed=1)}
    given = settings(tmp_path, logging_steps=STEPS, packing=packing)
    trainer = trained(PRMTrainer(load(model), given, **data, callbacks=[counter]))
    steps, shapes = counter.between(0, STEPS - 1), trainer.batch_plan.shapes
    assert shapes is not None and steps.compiles <= shapes and steps.device_to_host == 0
    rows, held_out = trainer.train_dataset, trainer.eval_dataset
    losses, evaluated = by_transformers(model, rows, held_out)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(sum(losses) / STEPS, abs=1e-5)
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(evaluated, abs=1e-5) and 0 <= metrics["eval_accuracy"] <= 1
