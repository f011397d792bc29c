"""Learning rate schedules of short runs."""

import math
from typing import Any

import pytest
import torch
from transformers import SchedulerType
from transformers.optimization import get_scheduler

from trl_tpu import RewardConfig
from trl_tpu.errors import UserError
from trl_tpu.training.optimizer import create_schedule

#: Schedules that depend on the step alone.
OF_STEPS = sorted({kind.value for kind in SchedulerType} - {"reduce_lr_on_plateau", "greedy"})
ARGUMENTS: dict[str, Any] = {
    "cosine_with_min_lr": {"min_lr": 1e-5},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-5},
    "warmup_stable_decay": {"num_decay_steps": 1},
}


def rates(kind: str, steps: int, warmup: float, **settings: Any) -> list[float]:
    """Return the learning rate of each step, and the rate after the last one."""
    kwargs = ARGUMENTS.get(kind)
    args = RewardConfig("out", lr_scheduler_type=kind, warmup_steps=warmup, lr_scheduler_kwargs=kwargs, **settings)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    schedule, found = create_schedule(args, optimizer, steps), list[float]()
    for _ in range(steps + 1):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("kind", OF_STEPS)
def test_every_schedule_runs_for_any_number_of_steps_and_any_warmup(kind: str) -> None:
    """Rates equal transformers' where its own schedule does not divide by zero."""
    for steps in range(1, 6):
        for warmup in (0, 0.03, 1, steps, steps + 1):
            found = rates(kind, steps, warmup)
            assert all(0 <= rate <= 1e-4 for rate in found), (steps, warmup, found)
            count = math.ceil(steps * warmup) if warmup < 1 else int(warmup)
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-4)
            if kind != "polynomial" or count < steps:
                schedule: Any = get_scheduler(kind, optimizer, count, steps, ARGUMENTS.get(kind))
                expected = [1e-4 * schedule.lr_lambdas[0](step) for step in range(steps + 1)]
                assert found == pytest.approx(expected)


@pytest.mark.parametrize(("kind", "cycles"), [("linear", None), ("cosine", 0.5), ("cosine", 1)])
def test_rate_decays_to_its_end_unless_all_steps_warm_up(kind: str, cycles: float | None, monkeypatch: Any) -> None:
    monkeypatch.setitem(ARGUMENTS, kind, cycles and {"num_cycles": cycles})

    def share(done: float) -> float:
        return 1 - done if cycles is None else (1 + math.cos(2 * math.pi * cycles * done)) / 2

    for steps in range(1, 6):
        for warmup in range(steps + 1):
            found = rates(kind, steps, warmup, learning_rate_end=2e-5)
            decay = [2e-5 + 8e-5 * share(step / (steps - warmup)) for step in range(steps - warmup)]
            last = 2e-5 + 8e-5 * share(1) if warmup < steps else 1e-4
            assert found == pytest.approx([*(1e-4 * step / warmup for step in range(warmup)), *decay, last])


def test_schedule_that_cannot_compute_a_rate_is_rejected_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARGUMENTS, "polynomial", {"power": -1.0})  # the last rate divides by zero
    with pytest.raises(UserError, match="lr_scheduler_kwargs"):
        rates("polynomial", 3, 0)
