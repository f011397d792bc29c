"""A stopped run on XLA goes on as if it had not been; and what torch_xla takes for a preemption is a SIGTERM."""

import os
from pathlib import Path
from typing import Any

import apart
import pytest
from stopping import STEPS, At, later, logged, make_trainer, sigterm

from trl_tpu.training.preemption import TIME_LIMIT, Unfinished


def test_a_run_that_was_stopped_in_an_evaluation_goes_on_without_it(model_folder: str, tmp_path: Path) -> None:
    """Twice: in the evaluation after the second step, and at the last step."""
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2}
    whole = make_trainer(model_folder, tmp_path / "whole", **settings)
    whole.train()
    for event, step in (("on_prediction_step", 2), ("on_step_begin", STEPS - 1)):
        stopped = make_trainer(model_folder, tmp_path / "stopped", At(event, step, sigterm), **settings)
        with pytest.raises(Unfinished):
            stopped.train(resume_from_checkpoint=True if step > 2 else None)
    resumed = make_trainer(model_folder, tmp_path / "stopped", **settings)
    resumed.train(resume_from_checkpoint=True)
    left_out = {2, STEPS}
    assert logged(resumed) == [log for log in logged(whole) if "eval_loss" not in log or log["step"] not in left_out]


def test_a_time_limit_stops_between_programs(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_trainer(model_folder, tmp_path / "whole")
    whole.train()
    forward = At("on_step_begin", 2, later(monkeypatch, 3601))
    trainer = make_trainer(model_folder, tmp_path, forward, training_time_limit="1h")
    assert trainer.train().global_step == 3
    assert trainer.stopped_by == TIME_LIMIT
    resumed = make_trainer(model_folder, tmp_path)
    resumed.train(resume_from_checkpoint=trainer.stop_checkpoint)
    assert logged(resumed) == logged(whole)


NOTICE = """
import os, signal, time
import torch_xla
xla = torch_xla._XLAC
caught = lambda: int(next(l for l in open("/proc/self/status") if l.startswith("SigCgt")).split()[1], 16)
xla._ensure_xla_coordinator_initialized(0, 1, "127.0.0.1", PORT)
before = caught()
xla._activate_preemption_sync_manager()
assert caught() ^ before == 1 << (signal.SIGTERM - 1), (before, caught())
assert not any(xla._sync_point_reached(step) for step in range(3))
os.kill(os.getpid(), signal.SIGTERM)
end = time.monotonic() + 60
step = 3
while not xla._sync_point_reached(step):
    assert time.monotonic() < end
    step += 1
    time.sleep(0.1)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(2)
print("noticed, and still there", flush=True)
os._exit(0)
"""


def test_torch_xlas_own_notice_is_a_sigterm_that_a_second_one_does_not_get_through(tmp_path: Path) -> None:
    """Why `preemption` handles the signal itself: the manager only sets a handler of SIGTERM."""
    code = NOTICE.replace("PORT", repr(apart.free_port()))
    done = apart.python("-c", code, environment=dict(os.environ))
    assert "noticed, and still there" in done.stdout, done.stderr
