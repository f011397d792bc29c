"""On TorchTPU the loss of every step equals plain torch's, with few programs, all compiled early.

The tolerance is 1e-6 for losses, as on other devices, and 5e-6 for statistics; measured are 1.2e-7 and 7e-7. float32
sums have another order, and Adam is the fused kernel here.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import real_pairs
import subprocesses
import tiny
from environment import SUPPORT

STEPS, MORE, OF_TRL = 50, 30, 6
# a schedule that does not depend on the number of steps
DATA = {"max_length": 200, "per_device_train_batch_size": 8, "lr_scheduler_type": "constant_with_warmup"}
PLAIN_TRL = ("trajectory.py", "trl", {"TRL": DATA | {"max_steps": STEPS, "data": "."}})
OURS = (
    "torchtpu_run.py",
    "trl_tpu",
    {layout: DATA | {"max_steps": STEPS + MORE, "packing": layout == "packed"} for layout in ("packed", "padded")},
)
TRL = (
    "torchtpu_run.py",
    "trl",
    # TRL's defaults except for features missing in the CPU plugin: pinned memory, and the TPU's sdpa kernel
    {
        "TRL on TorchTPU": DATA
        | {"max_steps": OF_TRL, "dataloader_pin_memory": False}
        | {"model_init_kwargs": {"attn_implementation": "eager"}}
    },
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the logs and numbers of programs of all runs, with one process per package and device."""
    folder = tmp_path_factory.mktemp("runs")
    pairs = real_pairs.made_up_dialogues(700)
    tiny.save_tiny(folder / "model", [*pairs["chosen"], *pairs["rejected"]])
    pairs.to_json(folder / "pairs.jsonl")

    def run(script: str, package: str, settings: dict[str, Any]) -> dict[str, Any]:
        out = folder / f"{package} {script}.json"
        words = [package, str(folder), str(out), json.dumps(settings)]
        # accelerate's device: set explicitly for TRL on TorchTPU, unset for plain torch
        environment = {name: value for name, value in os.environ.items() if name != "ACCELERATE_TORCH_DEVICE"}
        if (script, package) == ("torchtpu_run.py", "trl"):
            environment["ACCELERATE_TORCH_DEVICE"] = "tpu:0"
        subprocesses.run_without_server(str(SUPPORT / script), *words, environment=environment)
        return json.loads(out.read_text())

    with ThreadPoolExecutor(2) as pool:
        every = pool.map(lambda each: run(*each), (OURS, TRL, PLAIN_TRL))
    return {name: found if "logs" in found else {"logs": found} for each in every for name, found in each.items()}


def logged(run: dict[str, Any], name: str, steps: int = STEPS) -> list[float]:
    return [logs[name] for logs in run["logs"] if name in logs][:steps]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_fifty_steps_equal_trl_in_plain_torch(layout: str, runs: dict[str, dict[str, Any]]) -> None:
    for name, tolerance in {"loss": 1e-6, "learning_rate": 1e-12, "grad_norm": 5e-6, "mean_reward": 5e-6}.items():
        expected = logged(runs["TRL"], name)
        assert len(expected) == STEPS and logged(runs[layout], name) == pytest.approx(expected, rel=0, abs=tolerance)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_thirty_more_steps_compile_nothing(layout: str, runs: dict[str, dict[str, Any]]) -> None:
    after = runs[layout]["programs"]
    assert len(after) == STEPS + MORE and after[-1] == after[STEPS - 1] < 100, (after, runs[layout]["batches"])


def test_trl_compiles_more_programs(runs: dict[str, dict[str, Any]]) -> None:
    """Print one line per run, for comparison with TRL."""
    trl = runs["TRL on TorchTPU"]
    assert logged(trl, "loss", OF_TRL) == pytest.approx(logged(runs["TRL"], "loss", OF_TRL), rel=0, abs=1e-6)
    for name, run in runs.items():
        if "programs" in run:
            print(f"{name}: {len(run['programs'])} steps, {run['programs'][-1]} programs, {run['seconds']:.0f} s")
    assert trl["programs"][-1] > 3 * runs["packed"]["programs"][-1]
