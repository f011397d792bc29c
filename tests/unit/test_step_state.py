"""What every step finds on the device from the first on."""

import torch
from torch import nn

from trl_tpu.parallel.sharding_plan import Placement
from trl_tpu.runtime.native import Runtime
from trl_tpu.training.optimizer import StepState


def test_gradients_of_a_training_that_was_interrupted_do_not_enter_the_next() -> None:
    """Between two micro-batches, as by an error of a callback: the buffers that they add up in stay."""
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    placements = {"weight": Placement((None, None), "whole")}
    state = StepState(Runtime(), scanned=None)
    assert state.prepare(model, placements, optimizer, accumulates=True)
    state.attach_gradients()
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.tolist() == [[1, 1, 1]]
    assert not state.prepare(model, placements, optimizer, accumulates=True)
    assert model.weight.grad.tolist() == [[0, 0, 0]]
