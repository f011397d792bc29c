"""The guard counts steps that are not finite on the device, and keeps them out of the sum of losses."""

import math
from unittest.mock import create_autospec

import torch
from accelerate import Accelerator

from trl_tpu.runtime.native import Runtime
from trl_tpu.training.nonfinite import Counted, NonfiniteGuard


def make_guard(limit: int = 3) -> NonfiniteGuard:
    accelerator = create_autospec(Accelerator, instance=True, num_processes=1)
    return NonfiniteGuard(limit, Runtime(), torch.device("cpu"), accelerator)


def take(guard: NonfiniteGuard, losses: list[list[float]], norms: list[float] | None = None) -> float:
    """Take a step for each list of micro-batch losses; returns the sum of losses."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter])
    loss_sum_1 = guard.start_loss_sum()
    for index, of_step in enumerate(losses):
        guard.begin(loss_sum_1)
        for loss in of_step:
            guard.see(torch.tensor(loss))
            loss_sum_1 += loss
        parameter.grad = torch.ones(1)
        loss_sum_1 = guard.end_step(1.0 if norms is None else norms[index], loss_sum_1, optimizer)
        finite = all(map(math.isfinite, of_step)) and (norms is None or math.isfinite(norms[index]))
        assert (parameter.grad is not None) == finite  # a step without a gradient does nothing
    return loss_sum_1.item()


def test_the_sum_of_losses_leaves_out_steps_that_are_not_finite() -> None:
    guard = make_guard()
    assert take(guard, [[1.0], [math.nan], [2.0, 4.0], [8.0, math.inf], [16.0]]) == 23
    assert guard.close(guard.device_counts) == Counted(taken=5, nonfinite=2, in_a_row=0, reached_at=0)
    assert guard.total == 2
    assert take(guard, [[1.0], [2.0]], norms=[math.inf, 1.0]) == 2


def test_the_step_at_which_the_limit_is_reached_is_known_at_a_later_log() -> None:
    guard = make_guard()
    take(guard, [[1.0], [math.nan], [math.nan], [math.nan], [1.0]])
    assert guard.close(guard.device_counts) == Counted(taken=5, nonfinite=3, in_a_row=0, reached_at=4)


def test_a_row_goes_on_over_a_log_and_over_a_resume() -> None:
    guard = make_guard()
    take(guard, [[math.nan], [math.nan]])
    resumed = make_guard()
    resumed.load_state_dict(guard.state_dict())
    guard.close(guard.device_counts)
    for each, reached_at in ((guard, 1), (resumed, 3)):
        take(each, [[math.nan]])
        assert each.close(each.device_counts).reached_at == reached_at
    assert resumed.total == 1  # those before the resume were another run's
