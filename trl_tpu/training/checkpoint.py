"""The part of a checkpoint beside the model: optimizer, scheduler, and what the metrics have counted."""

import json
import os
from typing import Any

import torch
from torch.optim import Optimizer

from ..runtime import Runtime
from .metrics import RewardMetrics

OPTIMIZER_FILE = "optimizer.pt"  # transformers' names
SCHEDULER_FILE = "scheduler.pt"
PROGRESS_FILE = "reward_metrics.json"


def save_optimizer(optimizer: Any, scheduler: Any, folder: str, runtime: Runtime, writes: bool) -> None:
    """Write the optimizer's and the scheduler's state to ``folder``, in the format of plain torch.

    All processes take part, and those that have ``writes`` write.
    """
    state = optimizer.state_dict()
    tensors = {
        f"{index}.{name}": value
        for index, values in state["state"].items()
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }
    host = runtime.to_host(tensors)
    if not writes:
        return
    moments = {
        index: {name: host.get(f"{index}.{name}", value) for name, value in values.items()}
        for index, values in state["state"].items()
    }
    # the option is the device's, not the run's: plain torch on a CPU could not load it switched on
    groups = [group | ({"capturable": False} if "capturable" in group else {}) for group in state["param_groups"]]
    torch.save({"state": moments, "param_groups": groups}, os.path.join(folder, OPTIMIZER_FILE))
    torch.save(scheduler.state_dict(), os.path.join(folder, SCHEDULER_FILE))


def load_optimizer(optimizer: Optimizer, scheduler: Any, folder: str, runtime: Runtime) -> None:
    """Read what `save_optimizer` wrote into existing state, which keeps its sharding; nothing when there is none."""
    path = os.path.join(folder, OPTIMIZER_FILE)
    if not os.path.isfile(path):
        return
    saved = torch.load(path, map_location="cpu", weights_only=True)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with torch.no_grad():
        for index, values in saved["state"].items():
            own = optimizer.state[parameters[index]]
            for name, value in values.items():
                if isinstance(own.get(name), torch.Tensor):
                    own[name].copy_(value)
                else:
                    own[name] = value
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in saved_group.items() if key not in ("params", "capturable")})
    scheduler_state = torch.load(os.path.join(folder, SCHEDULER_FILE), map_location="cpu", weights_only=True)
    scheduler.load_state_dict(scheduler_state)
    runtime.step_boundary()


def save_progress(metrics: RewardMetrics, folder: str, writes: bool) -> None:
    """Write the metrics' open sums and token count, so that a resumed run logs what an uninterrupted one would.

    All processes take part, since the sums are on all devices, and those that have ``writes`` write.
    """
    state = metrics.state_dict()
    if not writes:
        return
    with open(os.path.join(folder, PROGRESS_FILE), "w", encoding="utf-8") as file:
        json.dump(state, file)


def load_progress(metrics: RewardMetrics, folder: str) -> None:
    """Read what `save_progress` wrote; a checkpoint of another trainer has none, and counting starts anew."""
    path = os.path.join(folder, PROGRESS_FILE)
    if os.path.isfile(path):
        with open(path, encoding="utf-8") as file:
            metrics.load_state_dict(json.load(file))
