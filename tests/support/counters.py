"""Numbers of compiled programs, executions and reads from the device, by torch_xla's metrics."""

from typing import Any, NamedTuple

import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
from transformers import TrainerCallback

from trl_tpu import RewardTrainer


class Counts(NamedTuple):
    compiles: int
    executions: int
    device_to_host: int


def count() -> Counts:
    xm.wait_device_ops()  # executions count only after they have run

    def total(*metrics: str) -> int:
        return sum((met.metric_data(metric) or [0])[0] for metric in metrics)

    return Counts(total("CompileTime"), total("ExecuteTime", "ExecuteReplicatedTime"), total("TransferFromDeviceTime"))


class CountAtSteps(TrainerCallback):
    """Counts at the beginning of each step, when the previous step has just been executed."""

    def __init__(self) -> None:
        self.at: dict[int, Counts] = {}
        self.rates: dict[int, float] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, lr_scheduler: Any, **_: Any) -> None:
        self.at[state.global_step] = count()
        self.rates[state.global_step] = lr_scheduler.get_last_lr()[0]

    def between(self, first: int, last: int) -> Counts:
        return Counts(*(after - before for before, after in zip(self.at[first], self.at[last], strict=True)))


class CountSaves(RewardTrainer):
    """Counts the compilations of each save."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.compiles_of_saves: list[int] = []
        super().__init__(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.trl_tpu.runtime.step_boundary()
        before = self.trl_tpu.runtime.compile_count()
        super()._save_checkpoint(model, trial)
        self.compiles_of_saves.append(self.trl_tpu.runtime.compile_count() - before)
