"""A stopped run on XLA goes on as if it had not been."""

from pathlib import Path
from typing import Any

import pytest
from stopping import STEPS, At, make_trainer, sigterm
from training import logged, trained

from trl_tpu.training.stopping import Unfinished


def test_a_run_that_was_stopped_in_an_evaluation_goes_on_without_it(model_folder: str, tmp_path: Path) -> None:
    """Twice: in the evaluation after the second step, and at the last step."""
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2}
    whole = trained(make_trainer(model_folder, tmp_path / "whole", **settings))
    for event, step in (("on_prediction_step", 2), ("on_step_begin", STEPS - 1)):
        stopped = make_trainer(model_folder, tmp_path / "stopped", At(event, step, sigterm), **settings)
        with pytest.raises(Unfinished):
            stopped.train(resume_from_checkpoint=True if step > 2 else None)
    resumed = trained(make_trainer(model_folder, tmp_path / "stopped", **settings), resume=True)
    left_out = {2, STEPS}
    assert logged(resumed) == [log for log in logged(whole) if "eval_loss" not in log or log["step"] not in left_out]
