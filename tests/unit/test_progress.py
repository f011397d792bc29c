"""What a user sees while it trains: a bar and lines, memory, and rates that are arithmetic on a clock and counts."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tokenized import dataset_of
from transformers import AutoConfig, AutoModelForSequenceClassification, PrinterCallback, ProgressCallback

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.data.comparisons import ComparisonRule, compare, pairs_of
from trl_tpu.evaluation.judge import RewardSums
from trl_tpu.modeling.model_shape import needed_flops, read_model, work_of_a_pair
from trl_tpu.packing.shapes import PairLengths
from trl_tpu.parallel.mesh import peak_flops_of
from trl_tpu.runtime import current
from trl_tpu.runtime.native import Runtime
from trl_tpu.training.progress import Progress
from trl_tpu.training.statistics import StepCounts, StepStatistics

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


# ---- a run


@pytest.fixture(scope="module")
def make_trainer(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RewardTrainer]:
    folder, pairs = tmp_path_factory.mktemp("progress"), tiny.made_up_pairs(24)
    model = tiny.save_tiny(folder / "model", [text for row in pairs for text in row.values()])

    def make(**settings: Any) -> RewardTrainer:
        defaults = {"max_steps": 4, "logging_steps": 2, "per_device_train_batch_size": 4, "bf16": False}
        defaults |= {"report_to": "none", "eval_strategy": "steps", "eval_steps": 4, "save_steps": 2}
        args = RewardConfig(str(folder / "out"), **defaults | settings)
        return RewardTrainer(model, args, train_dataset=pairs, eval_dataset=pairs.select(range(8)))

    return make


@pytest.fixture(scope="module")
def trained(make_trainer: Callable[..., RewardTrainer]) -> RewardTrainer:
    trainer = make_trainer(disable_tqdm=True)
    trainer.train()
    return trainer


def test_logs_have_rates_and_memory(trained: RewardTrainer) -> None:
    first, second, *_ = trained.state.log_history
    expected = work_of_a_pair(trained.model, trained.train_dataset)
    assert expected is not None
    seconds = 8 / second["pairs_per_second"]
    assert second["tokens_per_second"] * seconds == pytest.approx(second["num_tokens"] - first["num_tokens"])
    assert second["model_tflops_per_second"] * 1e12 * seconds == pytest.approx(8 * expected)
    if current().chip() is None:
        assert "mfu" not in second
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**30 if sys.platform == "linux" else 0.1
    assert 0.5 * resident < second["memory_gib"] < 100 and first["memory_gib"] <= second["memory_gib"]


def test_the_bar_goes_on_from_a_resume_and_lines_leave_out_what_is_for_trackers(
    trained: RewardTrainer, make_trainer: Callable[..., RewardTrainer], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer()
    trainer.train(resume_from_checkpoint=f"{trained.args.output_dir}/checkpoint-2")
    shown = capsys.readouterr()
    (line,) = (line for line in (shown.out + shown.err).splitlines() if "'loss'" in line)
    assert "'accuracy'" in line and "'pairs_per_second'" in line
    assert not {name for name in ("grad_norm", "memory_gib", "min_reward") if name in line}
    assert "50%" in shown.err and "\r 25%" not in shown.err
    assert "'eval_accuracy'" in shown.out + shown.err
    with_bar, without = ({type(each) for each in run.callback_handler.callbacks} for run in (trainer, trained))
    assert Progress in with_bar and PrinterCallback in without and not without & {ProgressCallback, Progress}


# ---- rates


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def model_of(model_type: str, **more: Any) -> Any:
    config = AutoConfig.for_model(model_type, num_labels=1, pad_token_id=0, vocab_size=64, **SIZES | more)
    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(config)


def test_rates_leave_out_pauses_and_what_was_done_before_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, runtime = Clock(), Runtime()
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(runtime, "chip", lambda: "v5litepod")
    peak = peak_flops_of("v5litepod")
    assert peak is not None
    statistics = StepStatistics(runtime, torch.device("cpu"), work_of_a_pair=peak / 4)

    def rates(pairs: int, tokens: int, step: int) -> dict[str, float]:
        table = compare(pairs_of(pairs), ComparisonRule()).map_tensors(torch.from_numpy)
        tokens_S = torch.full((2 * pairs,), tokens // (2 * pairs), dtype=torch.int32)
        statistics.update(torch.zeros(2 * pairs, 1), tokens_S, table)
        logs, *_ = statistics.close(torch.zeros(1), None, 0.0, step, 1)
        return {name: value for name, value in logs.items() if name in ("mfu", "seconds_per_step") or "_per_" in name}

    saved = {"metrics": {"num_tokens": 100, "open": vars(RewardSums(pairs=10, tokens=100))}, "open_loss": 0.0}
    statistics.start(3, [saved | {"nonfinite": vars(StepCounts())}])
    clock.now += 4
    statistics.pause()
    clock.now += 1000  # an evaluation
    statistics.resume()
    clock.now += 1
    assert rates(10, 200, step=5) == {
        "pairs_per_second": 2.0,
        "tokens_per_second": 40.0,
        "seconds_per_step": 2.5,
        "model_tflops_per_second": peak / 2 / 1e12,
        "mfu": 0.5,
    }
    clock.now += 2
    assert rates(20, 400, step=6)["pairs_per_second"] == 10.0
    assert rates(20, 400, step=6) == {}  # no time has passed


def test_the_work_of_an_average_pair_counts_once_what_its_dialogues_share() -> None:
    """It is unknown of streams, of encoders and recurrent layers, and of other columns."""
    model, dataset = model_of("llama"), dataset_of([([1, 2, 3, 4], [1, 2, 5]), ([1], [2, 3])])
    expected = needed_flops(read_model(model), PairLengths.of([(2, 2, 1), (0, 1, 2)])) / 2
    assert work_of_a_pair(model, dataset) == expected > 0
    for model_type in ("gpt2", "qwen3", "gemma2", "phi3"):
        assert work_of_a_pair(model_of(model_type), dataset), model_type
    assert work_of_a_pair(model, dataset.to_iterable_dataset()) is None
    assert work_of_a_pair(model, dataset.rename_column("chosen_ids", "other")) is None
    for unknown in (model_of("bert"), model_of("jamba", num_hidden_layers=8)):
        assert work_of_a_pair(unknown, dataset) is None


def test_peak_memory_is_not_that_of_the_process_that_started_this_one() -> None:
    held = b"1" * 2**30
    code = "from trl_tpu.runtime.native import peak_resident_bytes; print(peak_resident_bytes())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 2**26 < int(child.stdout) < len(held)
