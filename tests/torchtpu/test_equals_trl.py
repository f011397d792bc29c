"""On TorchTPU the loss of every step equals plain torch's, with few programs, all compiled early.

The tolerance is 1e-6 for losses, as on other devices, and 5e-6 for statistics; measured are 1.2e-7 and 7e-7. float32
sums have another order, and Adam is the fused kernel here.
"""

import json
import os
from typing import Any, NamedTuple

import pytest
import real_pairs
import subprocesses
import tiny
import torch
from environment import SUPPORT
from training import trained
from trajectory import DEFAULTS
from transformers import TrainerCallback

from trl_tpu import RewardConfig, RewardTrainer

STEPS, MORE = 50, 30
# a schedule that does not depend on the number of steps
DATA = {"max_length": 200, "per_device_train_batch_size": 8, "lr_scheduler_type": "constant_with_warmup"}


class Programs(TrainerCallback):
    """Counts the compiled programs after each step, by torch_tpu's own count."""

    def __init__(self) -> None:
        self.after: list[int] = []
        self.before = torch.tpu._get_cache_misses()

    def on_step_end(self, *args: Any, **_: Any) -> None:
        torch.accelerator.synchronize()
        self.after.append(torch.tpu._get_cache_misses() - self.before)


class Run(NamedTuple):
    logs: list[dict[str, float]]
    programs: list[int]

    def logged(self, name: str) -> list[float]:
        return [log[name] for log in self.logs if name in log][:STEPS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Return the runs of both layouts here, and TRL's in plain torch in another process."""
    folder = tmp_path_factory.mktemp("runs")
    pairs = real_pairs.made_up_dialogues(700)
    tiny.save_tiny(folder / "model", [*pairs["chosen"], *pairs["rejected"]])
    pairs.to_json(folder / "pairs.jsonl")
    settings = {"TRL": DATA | {"max_steps": STEPS, "data": "."}}
    words = ["trl", str(folder), str(folder / "trl.json"), json.dumps(settings)]
    environment = {name: value for name, value in os.environ.items() if name != "ACCELERATE_TORCH_DEVICE"}
    subprocesses.run_without_server(str(SUPPORT / "trajectory.py"), *words, environment=environment)
    found = {"TRL": Run(json.loads((folder / "trl.json").read_text())["TRL"], [])}
    for layout in ("packed", "padded"):
        more = DATA | {"max_steps": STEPS + MORE, "packing": layout == "packed"}
        args, programs = RewardConfig(str(folder / layout), **DEFAULTS | more), Programs()
        trainer = RewardTrainer(str(folder / "model"), args, train_dataset=pairs, callbacks=[programs])
        found[layout] = Run(trained(trainer).state.log_history, programs.after)
    return found


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_fifty_steps_equal_trl_in_plain_torch(layout: str, runs: dict[str, Run]) -> None:
    for name, tolerance in {"loss": 1e-6, "learning_rate": 1e-12, "grad_norm": 5e-6, "mean_reward": 5e-6}.items():
        expected = runs["TRL"].logged(name)
        assert len(expected) == STEPS and runs[layout].logged(name) == pytest.approx(expected, rel=0, abs=tolerance)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_thirty_more_steps_compile_nothing(layout: str, runs: dict[str, Run]) -> None:
    after = runs[layout].programs
    assert len(after) == STEPS + MORE and after[-1] == after[STEPS - 1] < 100, after
