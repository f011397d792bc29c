"""The loss of every step, and all that is logged with it, equals trl.RewardTrainer's in plain torch.

A process holds one runtime, so each setting's runs are made in a process of their own.

Losses are held to 1e-6, statistics to 2e-5; seen are 3e-7 and 7e-6. In plain torch only the order of sums differs:
4e-7 of any number, and 3e-7 is what TRL's own float32 is from its float64. On XLA torch's "capturable" Adam computes
1 - beta ** step in float32, which makes the first updates smaller by 6e-6, and `grad_norm` other by as much. The
learning rate is three times TRL's default: at ten times it, training is unstable, and TRL's own `grad_norm` changes
by 6e-5 with the last digits of the first weights, so that nothing tighter could be asked.
"""

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import apart
import pytest
import real_pairs
import tiny
from chosen import chosen

XLA = {"USE_TORCH_XLA": "1", "PJRT_DEVICE": "CPU", "XLA_FLAGS": ""}  # programs as users have them
SETTINGS: dict[str, tuple[dict[str, str], int]] = {
    "TRL": ({"USE_TORCH_XLA": "0"}, 8),
    "plain torch": ({"USE_TORCH_XLA": "0"}, 8),
    "two processes": ({"USE_TORCH_XLA": "0", "ACCELERATE_USE_CPU": "1", "WORLD_SIZE": "2"}, 4),
    "XLA, 1 device": (XLA | {"CPU_NUM_DEVICES": "1"}, 8),
    "XLA, 8 devices": (XLA | {"CPU_NUM_DEVICES": "8"}, 1),
}
STATISTICS = ("grad_norm", "accuracy", "margin", "min_reward", "mean_reward", "max_reward")
TOLERANCES = {"loss": 1e-6, "learning_rate": 1e-12} | dict.fromkeys(STATISTICS, 2e-5)
# what is compared; where there is accumulation, TRL averages what its micro-batches say, and we weigh every pair alike
COMPARED = dict.fromkeys(("margins", "settings"), ("loss", "grad_norm", "learning_rate"))
LEFT_THERE = ("error", "twice", "eval_loss", "eval_error")  # by what the six overrides do
DATA: dict[str, dict[str, Any]] = {
    # pairs of real lengths; both leave out those that are longer than this, a twelfth of them
    **{source: {"max_steps": 50, "max_length": 400} for source in real_pairs.SOURCES},
    # margins, centering, accumulation, two epochs and a last batch that is short in pairs and in micro-batches
    "margins": {"gradient_accumulation_steps": 3, "center_rewards_coefficient": 0.01, "num_train_epochs": 2},
    # a subclass that overrides six methods, on real pairs, or made-up ones where those are not there
    "overridden": {"max_steps": 10, "max_length": 256, "pad_to_multiple_of": 256, "six_overrides": True}
    | {"eval_strategy": "steps", "eval_steps": 5},
}
# settings of ours, and what TRL does under other names
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
    packing: bool | None  # None: TRL knows none

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
    """What the runs of the tests that were chosen logged, and TRL's on the same data; where one failed, how."""
    own = chosen(request, "run")
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
    """What a process that makes the runs of a setting logs."""
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
    for process in apart.at_once(*commands, timeout=3000, CI="1", **environment):  # the long suite's take minutes
        assert process.returncode == 0, process.stderr[-4000:]
    return {own[name]: logs for name, logs in json.loads(out.read_text()).items()}


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_every_step_is_trls(logged: dict[Run, Logs | str], run: Run) -> None:
    """In packed rows what pairs share is computed once; the loss of every step stays TRL's."""
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
