"""Runs on TorchTPU read from the device only at logs, and skip steps, save, resume, evaluate and score."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import label_formats
import nonfinite_runs
import numpy as np
import pytest
import subprocesses
import tiny
import torch
from environment import ROOT, SUPPORT
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training import QUIET, losses
from transformers import TrainerCallback

from trl_tpu import RewardConfig, RewardTrainer, cli, runtime
from trl_tpu.errors import UserError

PAIRS = tiny.made_up_pairs(120)
SETTINGS: dict[str, Any] = QUIET | {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "save_strategy": "no"}
SETTINGS |= {"logging_steps": 6, "max_steps": 6, "max_shapes": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save_tiny(tmp_path_factory.mktemp("model"), PAIRS, layers=1)


@pytest.fixture
def make(model: str, tmp_path: Path) -> Callable[..., RewardTrainer]:
    def make(
        callbacks: Any = None, peft_config: Any = None, train_dataset: Any = PAIRS, **settings: Any
    ) -> RewardTrainer:
        args = RewardConfig(**{"output_dir": str(tmp_path / "run")} | SETTINGS | settings)
        data = {"train_dataset": train_dataset, "eval_dataset": PAIRS}
        return RewardTrainer(model, args, callbacks=callbacks, peft_config=peft_config, **data)

    return make


def run_on_cpu(*words: str) -> str:
    """Return the last word printed by a process that uses the CPU."""
    return subprocesses.run_without_server(*words, ACCELERATE_USE_CPU="1", PYTHONPATH=f"{ROOT}:{SUPPORT}").split()[-1]


#: Trains 3 steps, or 3 more after those of an earlier run.
RESUMES = """
import sys, torchtpu_device, tiny
from pathlib import Path
from trl_tpu import RewardConfig, RewardTrainer
model, folder = sys.argv[1:]
steps = 6 if Path(folder, "checkpoint-3").exists() else 3
args = RewardConfig(folder, max_steps=steps, save_steps=3, max_shapes=1, report_to="none")
trainer = RewardTrainer(model, args, train_dataset=tiny.made_up_pairs(120))
trainer.train(resume_from_checkpoint=steps == 6)
assert trainer.state.global_step == steps
"""


def test_tpu_is_chosen_and_described(make: Any) -> None:
    assert runtime.choice().name == "torchtpu"
    trainer = make()
    assert trainer.args.device.type == trainer.accelerator.device.type == trainer.model.device.type == "tpu"
    assert "through TorchTPU: torch's accelerator is a TPU" in trainer.describe()
    assert torch.get_float32_matmul_precision() == "highest"
    with pytest.raises(UserError, match="ACCELERATE_USE_CPU=1"):
        make(use_cpu=True)
    asked = "from trl_tpu import runtime; print(runtime.choice().name)"
    assert run_on_cpu("-c", f"import torchtpu_device; {asked}") == "native"


class Reads(TorchDispatchMode):
    """Records reads from the device in steps without a log, after all compilation."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **kwargs or {})
        given, found = (_devices(each) for each in ((args, kwargs), result))
        if "tpu" in given and "tpu" not in found and found:
            self.read.append(f"{operation}\n{''.join(traceback.format_stack(limit=8))}")
        return result


def _devices(values: Any) -> set[str]:
    """Return the devices of tensors; numbers are on the host."""
    return {
        each.device.type if isinstance(each, torch.Tensor) else "host"
        for each in tree_leaves(values)
        if each is not None
    }


@pytest.mark.parametrize("packing", [True, False])
def test_steps_read_nothing_from_the_device(packing: bool, make: Any) -> None:
    reads = Reads()

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 3:
                reads.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 5:
                reads.__exit__(None, None, None)

    make([Watch()], packing=packing).train()
    assert reads.read == []


def test_nonfinite_step_is_skipped(tmp_path: Path) -> None:
    folder = nonfinite_runs.save_model(tmp_path / "model")
    skipped = nonfinite_runs.train(folder, tmp_path / "run", [0, 3], 6)
    without = nonfinite_runs.train(folder, tmp_path / "run", [], 6, left_out=[0, 3])
    nonfinite_runs.check_skipped(skipped, without, 2)


@pytest.mark.parametrize("form", label_formats.LABEL_FORMATS)
def test_every_label_format_trains_as_on_the_cpu(form: str, model: str, tmp_path: Path) -> None:
    settings = SETTINGS | {"logging_steps": 2}
    found = [label_formats.losses(form, model, str(tmp_path), packing=each, **settings) for each in (True, False)]
    there = f"label_formats.losses({form!r}, {model!r}, {str(tmp_path)!r}, **{settings})"
    expected = run_on_cpu("-c", f"import label_formats; print(*{there}, sep=',')").split(",")
    assert len(expected) == 3
    for each in found:
        assert each == pytest.approx(list(map(float, expected)), abs=1e-6)


def test_checkpoint_resumes_in_plain_torch_and_back(make: Any, model: str, tmp_path: Path) -> None:
    """Losses equal to 1e-6, as in separate runs of the two."""
    data = tiny.made_up_pairs(39)
    whole = make(train_dataset=data, save_strategy="steps", save_steps=2)
    whole.train()
    resume = {"output_dir": str(tmp_path / "plain"), "resume": str(tmp_path / "run" / "checkpoint-2")}
    settings = SETTINGS | resume | {"max_steps": 4, "save_strategy": "steps", "save_steps": 4}
    run_on_cpu(str(SUPPORT / "saved_ranks.py"), model, json.dumps(settings))
    back = make(train_dataset=data, output_dir=str(tmp_path / "back"))
    back.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-4"))
    assert losses(back) == pytest.approx(losses(whole), rel=0, abs=1e-6)


def test_evaluate_predict_score_report_agree(make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make(eval_strategy="steps", eval_steps=3)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    metrics, rewards_N2 = trainer.evaluate(), trainer.predict(PAIRS).predictions
    assert rewards_N2.shape == (len(PAIRS), 2)
    assert metrics["eval_accuracy"] == pytest.approx(np.mean(rewards_N2[:, 0] > rewards_N2[:, 1]), abs=1e-6)
    PAIRS.to_json(tmp_path / "pairs.jsonl")
    run, scored = str(tmp_path / "run"), tmp_path / "scored.jsonl"
    words = ["--model_name_or_path", run, "--dataset_name", str(tmp_path / "pairs.jsonl"), "--output", str(scored)]
    assert cli.main(["score", *words]) == 0
    rows = [json.loads(line) for line in scored.read_text().splitlines()]
    by_score = np.array([[row["reward_chosen"], row["reward_rejected"]] for row in rows])
    assert by_score == pytest.approx(rewards_N2, rel=0, abs=1e-5)
    assert cli.main(["report", run, str(scored)]) == 0
    assert "Report written to" in capsys.readouterr().out


@pytest.mark.parametrize("remat", ["dots", "none"])
def test_bfloat16_adapters_train_with_recomputation(remat: str, make: Any) -> None:
    trainer = make(bf16=True, remat=remat, gradient_accumulation_steps=2, peft_config=LoraConfig(task_type="SEQ_CLS"))
    trainer.train()
    assert all(map(math.isfinite, losses(trainer)))


def test_resumed_run_compiles_no_program_of_the_first_run(model: str, tmp_path: Path) -> None:
    """With torch_tpu's own caches: each compiled program becomes a file, and the last lines of its log count them."""
    cache = tmp_path / "cache"
    cache.mkdir()
    # this one is in shared memory, where it outlives a test that was killed
    shared = uuid.uuid4().hex
    caches = {"TORCH_TPU_TIER2_COMPILATION_CACHE": shared, "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT": str(cache)}
    environment = {**os.environ, **caches, "PYTHONPATH": f"{ROOT}:{SUPPORT}", "TF_CPP_MIN_LOG_LEVEL": "0"}
    words, programs, counts = [sys.executable, "-c", RESUMES, model, str(tmp_path / "run")], [0], list[int]()
    for _ in range(2):
        process = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        counts.append(int(re.findall(r"num_compilations=(\d+)", process.stderr)[-1]))
        programs.append(len([*cache.rglob("*.bin")]))
    shutil.rmtree(f"/dev/shm/torch_tpu_cache/{shared}", ignore_errors=True)
    assert counts == [programs[1], programs[2] - programs[1]]  # resuming itself needs a few new programs
    assert counts[1] < counts[0] / 2
