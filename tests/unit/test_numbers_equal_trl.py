"""The loss of every step and everything logged with it equal trl.RewardTrainer's in plain torch.

A process holds one runtime, so the runs of each setting have their own process.

The tolerance is 1e-6 for losses and 2e-5 for statistics; measured are 3e-7 and 7e-6. In plain torch only the order of
sums differs: 4e-7 of any number. TRL's float32 differs from its own float64 by 3e-7. On XLA torch's "capturable" Adam
computes 1 - beta ** step in float32, which makes the first updates smaller by 6e-6 and changes `grad_norm` by as much.
The learning rate is three times TRL's default. At ten times it, training is unstable: TRL's `grad_norm` then changes
by 6e-5 with the last digits of the first weights, so a tighter tolerance is impossible.
"""

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import real_pairs
import subprocesses
import tiny
from subprocesses import selected_cases

XLA = {"USE_TORCH_XLA": "1", "PJRT_DEVICE": "CPU", "XLA_FLAGS": ""}  # optimized programs, as for users
SETTINGS: dict[str, tuple[dict[str, str], int]] = {
    "TRL": ({"USE_TORCH_XLA": "0"}, 8),
    "plain torch": ({"USE_TORCH_XLA": "0"}, 8),
    "two processes": ({"USE_TORCH_XLA": "0", "ACCELERATE_USE_CPU": "1", "WORLD_SIZE": "2"}, 4),
    "XLA, 1 device": (XLA | {"CPU_NUM_DEVICES": "1"}, 8),
    "XLA, 8 devices": (XLA | {"CPU_NUM_DEVICES": "8"}, 1),
}
STATISTICS = ("grad_norm", "accuracy", "margin", "min_reward", "mean_reward", "max_reward")
TOLERANCES = {"loss": 1e-6, "learning_rate": 1e-12} | dict.fromkeys(STATISTICS, 2e-5)
# compared metrics; with accumulation TRL averages over micro-batches, and this package weights every pair equally
COMPARED = dict.fromkeys(("margins", "settings"), ("loss", "grad_norm", "learning_rate"))
LEFT_THERE = ("error", "twice", "eval_loss", "eval_error")  # metrics of the six overrides that may differ
DATA: dict[str, dict[str, Any]] = {
    # pairs of real lengths; both packages drop longer ones, a twelfth of all
    **{source: {"max_steps": steps, "max_length": 400} for source, steps in (("made up", 24), ("real", 50))},
    # margins, centering, accumulation, two epochs, and a last batch with fewer pairs and micro-batches
    "margins": {"gradient_accumulation_steps": 3, "center_rewards_coefficient": 0.01, "num_train_epochs": 2},
    # a subclass with six overrides, on real pairs if available, else on made-up ones
    "overridden": {"max_steps": 10, "max_length": 256, "pad_to_multiple_of": 256, "six_overrides": True}
    | {"eval_strategy": "steps", "eval_steps": 5},
}
# settings of this package, and of TRL under other names
DATA["settings"] = {
    "max_steps": 8,
    "trl_tpu": {"learning_rate_end": 1e-4, "lr_scheduler_type": "cosine", "total_batch_size": 16}
    | {"frozen_parameters": "embed_tokens|layernorm"},
    "trl": {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-4}}
    | {"gradient_accumulation_steps": 2, "frozen": "embed_tokens|layernorm"},
}


class Run(NamedTuple):
    setting: str
    data: str
    packing: bool | None  # None: TRL has no packing

    def __str__(self) -> str:
        return f"{self.setting}, {self.data} pairs, {'packed' if self.packing else 'padded'}"


def run(setting: str, data: str, packing: bool | None = None, is_long: bool = False) -> Any:
    return pytest.param(Run(setting, data, packing), marks=[pytest.mark.long] * is_long)


RUNS = [
    *(run("plain torch", "made up", True), run("plain torch", "made up", False, True)),
    run("XLA, 1 device", "made up", False, True),
    *(run("XLA, 8 devices", "made up", packing, True) for packing in (True, False)),
    *(run("plain torch", "margins", packing) for packing in (True, False)),
    *(run("XLA, 1 device", "margins", False), run("XLA, 1 device", "margins", True, True)),
    *(run("XLA, 8 devices", "margins", packing, True) for packing in (True, False)),
    *(run("plain torch", "settings", True), run("XLA, 8 devices", "settings", True)),
    run("XLA, 1 device", "settings", False, True),
    *(run(setting, "overridden") for setting in ("plain torch", "two processes", "XLA, 1 device")),
]
if "real" in real_pairs.SOURCES:
    RUNS += [run(*each, True) for each in (("plain torch", "real", True), ("plain torch", "real", False))]
    RUNS += [run("XLA, 1 device", "real", False, True)]
    RUNS += [run("XLA, 8 devices", "real", packing, True) for packing in (True, False)]

Logs = list[dict[str, float]]


@pytest.fixture(scope="module")
def logged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Run, Logs | str]:
    """Return the logs of the selected tests' runs and of TRL on the same data, or the traceback of a failed run."""
    own = selected_cases(request, "run")
    runs = dict.fromkeys([*(Run("TRL", run.data, None) for run in own), *own])
    folder = tmp_path_factory.mktemp("runs")
    for name in {run.data for run in runs}:
        source, made_up = real_pairs.SOURCES[-1] if name == "overridden" else name, name in ("margins", "settings")
        pairs = tiny.made_up_pairs(80, margin=True) if made_up else real_pairs.pairs_from(source, 600)
        columns = sorted({"prompt", "chosen", "rejected"} & set(pairs.column_names))
        tiny.save_tiny(folder / name / "model", [text for column in columns for text in pairs[column]])
        pairs.to_json(folder / name / "pairs.jsonl")
    with ThreadPoolExecutor(2) as pool:
        every = pool.map(lambda setting: train(folder, setting, runs), dict.fromkeys(run.setting for run in runs))
        return {run: logs for found in every for run, logs in found.items()}


def train(folder: Path, setting: str, runs: Iterable[Run]) -> dict[Run, Logs | str]:
    """Return the logs of a process that does the runs of a setting."""
    environment, pairs_per_device = SETTINGS[setting]
    out = folder / f"{setting}.json"
    own = {str(run): run for run in runs if run.setting == setting}
    arguments = {
        name: DATA[run.data]
        | {"data": run.data, "per_device_train_batch_size": pairs_per_device}
        | ({} if run.packing is None else {"packing": run.packing})
        for name, run in own.items()
    }
    package = "trl" if setting == "TRL" else "trl_tpu"
    words = [package, str(folder), str(out), json.dumps(arguments)]
    commands = [("trajectory.py", *words, rank) for rank in "01"[: int(environment.get("WORLD_SIZE", "1"))]]
    # runs of the long suite take minutes
    for process in subprocesses.run_ranks(*commands, timeout=3000, CI="1", **environment):
        assert process.returncode == 0, process.stderr[-4000:]
    return {own[name]: logs for name, logs in json.loads(out.read_text()).items()}


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_every_logged_value_equals_trls(logged: dict[Run, Logs | str], run: Run) -> None:
    """Packed rows compute shared tokens once; the loss of every step still equals TRL's."""
    found = {each: logged[each] for each in (run, Run("TRL", run.data, None))}
    failed = {each: logs for each, logs in found.items() if isinstance(logs, str)}
    assert not failed, failed
    ours, reference = ([entry for entry in logs if "loss" in entry] for logs in found.values())
    assert len(ours) == len(reference)
    for step, (entry, expected) in enumerate(zip(ours, reference, strict=True), start=1):
        for key in COMPARED.get(run.data, TOLERANCES):
            assert entry[key] == pytest.approx(expected[key], abs=TOLERANCES[key]), f"{key} at log {step}"
        assert entry["num_tokens"] == expected["num_tokens"], f"num_tokens at log {step}"
    for key in LEFT_THERE if run.data == "overridden" else ():
        left, expected = ([entry[key] for entry in logs if key in entry] for logs in found.values())  # type: ignore[index]
        assert len(expected) > 1 and left == pytest.approx(expected, abs=1e-6), key
