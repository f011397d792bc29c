"""Logged reward metrics equal numpy over all real pairs of all processes, also after a resume.

Rates follow from a clock and counts, and operations per step equal torch's count for real models. The recompile guard
warns at the right step; tests/xla/test_progress_on_xla.py checks its message.
"""

import inspect
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import subprocesses
import tiny
import torch
from fake_hosts import AllGather
from hypothesis import example, given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from preference_rows import dataset_of
from torch.utils.flop_counter import FlopCounterMode
from training import trained
from transformers import AutoConfig, AutoModelForSequenceClassification

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.config.reward_config import REWARD_METRICS
from trl_tpu.data.collate import ComparisonRule, Labels, compare, pairs_of
from trl_tpu.data.kinds import Pairs, Rankings
from trl_tpu.evaluation.evaluate import RewardSums, sums_on_host
from trl_tpu.modeling.heads import model_without_weights
from trl_tpu.modeling.model_shape import flops_per_row, model_shape_of, training_flops
from trl_tpu.packing.shapes import RowLengths
from trl_tpu.parallel.mesh import CHIPS
from trl_tpu.runtime import current
from trl_tpu.runtime.native import Runtime, peak_resident_bytes
from trl_tpu.training import statistics
from trl_tpu.training.progress import RecompileGuard
from trl_tpu.training.statistics import StepCounts, StepStatistics, scale_of

Row = tuple[float, float, bool]  # chosen, rejected, is real

CPU = torch.device("cpu")
# multiples of 1/4 sum exactly in float32, so any difference is a bug
reward = st.integers(-40, 40).map(lambda number: number / 4)
ONE_PAIR = compare(pairs_of(1), ComparisonRule()).map_tensors(torch.from_numpy)
pairs = st.lists(st.tuples(reward, reward, st.booleans()), min_size=1, max_size=6)
batches = st.lists(pairs, min_size=1, max_size=4)


def new_metrics(index: int = 0, count: int = 1, **settings: Any) -> StepStatistics:
    """Return the statistics of one process among several that accelerate counts."""
    accelerator: Any = SimpleNamespace(process_index=index, num_processes=count, scaler=None)
    return StepStatistics(Runtime(), CPU, accelerator, **settings)


def close_log(*processes: StepStatistics) -> dict[str, float]:
    """Return the metrics that the first process logs for all processes."""
    all_gather = AllGather(len(processes))

    def log(index: int) -> dict[str, float]:
        return processes[index].close(None, 1, 1)[0]

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(processes)) as pool:
        patch.setattr(statistics, "over_processes", lambda own, value: all_gather.gather(own.process_index, value))
        logs, *_ = pool.map(log, range(len(processes)))
    return {name: value for name, value in logs.items() if name in ("num_tokens", *REWARD_METRICS)}


def update(metrics: StepStatistics, *batches: list[Row], tokens: int = 5, labels: Any = None) -> StepStatistics:
    """Add pairs with this number of tokens per answer; padding pairs go into a second micro-batch."""
    for rows in batches:
        here_P = np.array([row[2] for row in rows])
        kind = Rankings() if labels and "grades" in labels[0] else Pairs()
        table = compare(Labels.of(labels or [{}] * len(rows), kind, 2), ComparisonRule()).among(here_P)
        tokens_S = torch.tensor(here_P.repeat(2) * tokens, dtype=torch.int32)
        rewards_SA = torch.tensor([row[:2] for row in rows]).reshape(-1, 1)
        metrics.update(rewards_SA, tokens_S, table.map_tensors(torch.from_numpy))
    return metrics


def host_sums(rewards_P2: Any) -> RewardSums:
    rewards_PAK = torch.as_tensor(rewards_P2).reshape(-1, 1, 2)
    return sums_on_host(rewards_PAK, pairs_of(len(rewards_PAK)))


def resumed(*parts: StepStatistics, index: int = 0, count: int = 1) -> StepStatistics:
    metrics = new_metrics(index, count)
    metrics.start(1, json.loads(json.dumps([part.state()[0] for part in parts])))
    return metrics


def by_numpy(rows: list[Row]) -> dict[str, float]:
    real = np.array([row[:2] for row in rows if row[2]])
    if not len(real):
        return {}
    chosen, rejected = real.T
    found = {"min_reward": real.min(), "mean_reward": real.mean(), "max_reward": real.max()}
    found |= {"margin": np.mean(chosen - rejected), "tie_rate": np.mean(chosen == rejected)}
    return found | {"accuracy": np.mean(chosen > rejected)}


@given(batches, batches)
def test_metrics_cover_all_pairs_of_all_processes(given: list[list[Row]], others: list[list[Row]]) -> None:
    first, second = update(new_metrics(0, 2), *given), update(new_metrics(1, 2), *others)
    every = [row for rows in given + others for row in rows]
    tokens = {"num_tokens": 10 * sum(row[2] for row in every)} if any(row[2] for row in every) else {}
    assert close_log(first, second) == pytest.approx(tokens | by_numpy(every))
    assert close_log(first, second) == tokens  # closing resets the sums: nothing is counted twice


@given(batches, batches, st.integers(1, 3))
def test_resumed_run_logs_equal_metrics(given: list[list[Row]], others: list[list[Row]], count: int) -> None:
    logged = [(1.0, 0.0, True)]  # before the checkpoint
    whole, parts = update(new_metrics(), logged * 2), [update(new_metrics(index, 2), logged) for index in range(2)]
    close_log(whole)
    close_log(*parts)
    update(whole, *given, *others)
    for metrics, own in zip(parts, (given, others), strict=True):
        update(metrics, *own)
    logs = close_log(*(resumed(*parts, index=index, count=count) for index in range(count)))
    assert logs == close_log(whole)


@given(batches)
def test_reward_scale_covers_all_real_pairs_on_device_and_host(given: list[list[Row]]) -> None:
    metrics, logged, on_host = new_metrics(), new_metrics(), RewardSums()
    for rows in given:
        update(metrics, rows)
        update(logged, rows)
        close_log(logged)
        on_host = on_host + host_sums([row[:2] for row in rows if row[2]])
    on_device = metrics.read()
    on_host.tokens = on_device.tokens
    assert vars(on_host) == pytest.approx(vars(on_device), rel=1e-6, abs=1e-4)
    real = np.array([row[:2] for rows in given for row in rows if row[2]])
    scale = logged.scale
    if not len(real) or not real.std() > 0:
        assert scale is None
        return
    assert scale is not None and scale.rewards == real.size
    assert (scale.mean, scale.std) == pytest.approx((real.mean(), real.std()), rel=1e-5)


def test_reward_scale_comes_from_an_evaluation_or_the_last_pairs() -> None:
    metrics = new_metrics()
    for level in (100.0, 0.0, 1.0):
        update(metrics, [(level, level + 1, True)] * 300)
        close_log(metrics)
    assert metrics.scale is not None
    assert metrics.scale.rewards == 1200 and metrics.scale.mean == 1.0  # the last two logs hold 512 pairs together
    evaluated = RewardSums(answers=2, reward=2.0, deviations=2.0, lowest=0.0, highest=2.0)
    metrics.evaluated = scale_of(evaluated, "the evaluation set")
    assert (metrics.scale.mean, metrics.scale.std) == (1.0, 1.0)
    for sums in (RewardSums(), host_sums(torch.ones(3, 2)), host_sums([[1.0, np.inf]])):
        assert scale_of(sums, "what cannot be divided by") is None


@given(st.lists(st.integers(0, 2**30), max_size=12), st.integers(0, 12))
@example([2**30] * 3, 1)
def test_token_counts_are_exact_beyond_int32_and_after_a_resume(counts: list[int], saved_at: int) -> None:
    metrics = new_metrics()
    for index, tokens in enumerate(counts):
        if index == saved_at:
            metrics = resumed(metrics)
        metrics.update(torch.zeros(2, 1), torch.tensor([tokens, 0], dtype=torch.int32), ONE_PAIR)
    assert close_log(metrics).get("num_tokens", 0) == sum(counts)


def test_standard_deviation_is_exact_far_from_zero() -> None:
    metrics, chooser = new_metrics(), np.random.default_rng(0)
    rewards_BP2 = (100 + 0.01 * chooser.standard_normal((20, 8, 2))).astype(np.float32)
    update(metrics, *([(*pair, True) for pair in rewards_P2] for rewards_P2 in rewards_BP2.tolist()))
    close_log(metrics)
    on_host_too = scale_of(host_sums(rewards_BP2), "rewards")
    assert metrics.scale is not None and on_host_too is not None
    assert metrics.scale.std == pytest.approx(rewards_BP2.std(dtype=np.float64), rel=0.01)
    assert on_host_too.std == pytest.approx(rewards_BP2.std(dtype=np.float64), rel=1e-9)


def test_more_probable_answer_counts_as_better() -> None:
    for probability, accuracy in ((0.9, 0.0), (0.1, 1.0)):
        labels = [{"chosen_probability": each} for each in (probability, 0.5)]
        logs = close_log(update(new_metrics(), [(0.0, 1.0, True), (5.0, 0.0, True)], labels=labels))
        assert (logs["accuracy"], logs["margin"], logs["mean_reward"]) == (accuracy, 2 * accuracy - 1, 1.5)
    metrics = update(new_metrics(), [(1.0, 2.0, True)], labels=[{"grades": [1.0, 1.0]}])
    assert close_log(metrics) == {"num_tokens": 10, "min_reward": 1.0, "mean_reward": 1.5, "max_reward": 2.0}


@pytest.mark.filterwarnings("error")
def test_nonfinite_rewards_are_logged_unless_steps_are_skipped() -> None:
    rows = [(float("nan"), 1.0, True), (2.0, 1.0, True)]
    kept, skipped = (update(new_metrics(nonfinite_limit=limit), rows) for limit in (0, 3))
    logs = close_log(kept)
    assert all(np.isnan(logs[name]) for name in ("mean_reward", "margin", "min_reward", "max_reward"))
    assert logs["accuracy"] == 0.5
    assert close_log(skipped) == {"num_tokens": 20} | by_numpy(rows[1:])


# ---- rates and operations


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"vocab_size": 64}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}


def test_logs_have_rates_and_memory(model_folder: str, config: Callable[..., RewardConfig]) -> None:
    args = config(max_steps=2, logging_steps=1, per_device_train_batch_size=4)
    trainer = trained(RewardTrainer(model_folder, args, train_dataset=tiny.made_up_pairs(16)))
    first, second, _ = trainer.state.log_history
    expected = flops_per_row(trainer.model, trainer.train_dataset)
    assert expected is not None
    seconds = 4 / second["pairs_per_second"]
    assert second["tokens_per_second"] * seconds == pytest.approx(second["num_tokens"] - first["num_tokens"])
    assert second["model_tflops_per_second"] * 1e12 * seconds == pytest.approx(4 * expected)
    if current().chip() is None:
        assert "mfu" not in second
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**30 if sys.platform == "linux" else 0.1
    assert 0.5 * resident < second["memory_gib"] < 100 and first["memory_gib"] <= second["memory_gib"]


def model_of(model_type: str, **more: Any) -> Any:
    config = AutoConfig.for_model(model_type, num_labels=1, pad_token_id=0, **SIZES | more)
    return model_without_weights(config, "float32")


def test_rates_exclude_pauses_and_steps_before_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, runtime = SimpleNamespace(now=100.0), Runtime()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(runtime, "chip", lambda: "v5e")
    peak = CHIPS["v5e"].peak_flops
    statistics = StepStatistics(runtime, torch.device("cpu"))
    statistics.flops_per_row = peak / 4

    def rates(pairs: int, tokens: int, step: int) -> dict[str, float]:
        table = compare(pairs_of(pairs), ComparisonRule()).map_tensors(torch.from_numpy)
        tokens_S = torch.full((2 * pairs,), tokens // (2 * pairs), dtype=torch.int32)
        statistics.update(torch.zeros(2 * pairs, 1), tokens_S, table)
        logs, *_ = statistics.close(None, step, 1)
        return {name: value for name, value in logs.items() if name in ("mfu", "seconds_per_step") or "_per_" in name}

    saved = {"metrics": {"num_tokens": 100, "open": vars(RewardSums(pairs=10, tokens=100))}, "open_loss": 0.0}
    statistics.start(3, [saved | {"nonfinite": vars(StepCounts())}])
    clock.now += 4
    clock.now += 1000  # for example an evaluation
    statistics.exclude(1000)
    clock.now += 1
    expected = {"pairs_per_second": 2.0, "tokens_per_second": 40.0, "seconds_per_step": 2.5, "mfu": 0.5}
    assert rates(10, 200, step=5) == expected | {"model_tflops_per_second": peak / 2 / 1e12}
    clock.now += 2
    assert rates(20, 400, step=6)["pairs_per_second"] == 10.0
    assert rates(20, 400, step=6) == {}  # no time has passed


def test_operations_per_pair_count_shared_tokens_once() -> None:
    """The count is unknown for streams, encoders, recurrent layers and other columns."""
    model, dataset = model_of("llama"), dataset_of([([1, 2, 3, 4], [1, 2, 5]), ([1], [2, 3])])
    expected = training_flops(model_shape_of(model), RowLengths.of([(2, 2, 1), (0, 1, 2)])) / 2
    assert flops_per_row(model, dataset) == expected > 0
    for model_type in ("gpt2", "qwen3", "gemma2", "phi3"):
        assert flops_per_row(model_of(model_type), dataset), model_type
    assert flops_per_row(model, dataset.to_iterable_dataset()) is None
    assert flops_per_row(model, dataset.rename_column("chosen_ids", "other")) is None
    for unknown in (model_of("bert"), model_of("jamba", num_hidden_layers=8)):
        assert flops_per_row(unknown, dataset) is None


def test_peak_memory_excludes_the_parent_process() -> None:
    """The child imports no large module, whereas this process has imported torch."""
    imports = "import re, resource, sys\nfrom pathlib import Path"
    code = f"{imports}\n{inspect.getsource(peak_resident_bytes)}\nprint(peak_resident_bytes())"
    assert 2**20 < int(subprocesses.run_without_server("-c", code)) < 2**26 < peak_resident_bytes()


# ---- operations: equal to torch's count, to the last multiplication


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 16},
    "qwen3": {},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}
DIALOGUES, LENGTH = 4, 16


def eager(model_type: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, num_labels=1, pad_token_id=0, **SIZES | GROUPED | MODELS[model_type])
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    if model_type == "qwen3_moe":
        model.set_experts_implementation("eager")  # each expert computes only the tokens routed to it
    return model


def counted_by_torch(model: Any) -> float:
    """Return torch's count for forward and backward over unpacked sequences, minus that for rotary angles."""
    ids = torch.randint(1, 64, (DIALOGUES, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids).logits.sum().backward()
    by_module = counter.get_flop_counts().items()
    return counter.get_total_flops() - sum(sum(own.values()) for name, own in by_module if name.endswith("rotary_emb"))


def by_formula(model: Any) -> float:
    """Return the count by formula for eager attention: every query is multiplied with every key."""
    shape, pairs = model_shape_of(model), RowLengths.of([(0, LENGTH, LENGTH)] * (DIALOGUES // 2))
    attended = sum(DIALOGUES * LENGTH**2 - pairs.attended(window) for window in shape.windows)
    return training_flops(shape, pairs) + 3 * 2 * shape.attention * attended


@pytest.mark.parametrize("model_type", MODELS)
def test_operations_equal_torchs_count(model_type: str) -> None:
    model = eager(model_type)
    assert by_formula(model) == counted_by_torch(model)


def test_frozen_weights_pass_gradients_to_adapters() -> None:
    adapters = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    model = get_peft_model(eager("llama"), adapters)
    model.enable_input_require_grads()  # as in the trainer: gradients pass through the first layer
    assert by_formula(model) == counted_by_torch(model)
    shape = model_shape_of(model)
    assert shape.trained_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=3),
    st.none() | st.integers(1, 9),
)
def test_common_prefix_is_counted_once(sizes: list[tuple[int, int, int]], window: int | None) -> None:
    pairs = RowLengths.of(sizes)
    seen = 0
    for prefix, chosen, rejected in sizes:
        for tail in (chosen, rejected):
            at = np.arange(prefix + tail)
            mask = at[:, None] >= at
            if window is not None:
                mask &= at[:, None] - at < window
            seen += int(mask[prefix:].sum())
        seen += int(mask[:prefix].sum())
    assert pairs.attended(window) == seen
    assert pairs.sizes_N.sum() == sum(map(sum, sizes))


# ---- the recompile guard


BATCH = {"input_ids": torch.zeros(4, 2, 64), "attention_mask": torch.zeros(4, 2, 64), "name": "no tensor"}
OTHER = {"input_ids": torch.zeros(4, 2, 77)}


class Counting(Runtime):
    """Plain torch with a number of compiled programs that the test sets."""

    compiled = 100  # programs compiled before training do not count
    plans_shapes = True

    def compile_count(self) -> int:
        return self.compiled


def warned(guard: RecompileGuard, steps: list[tuple[dict, int]], caplog: pytest.LogCaptureFixture) -> list[int]:
    """Take steps that each compile a number of programs; return the 1-based steps at which the guard warned."""
    found, runtime = [], guard._runtime
    assert isinstance(runtime, Counting)
    for step, (batch, compiles) in enumerate(steps, start=1):
        caplog.clear()
        guard.see(batch)
        runtime.compiled += compiles
        guard.check(step)
        found += [step] * len(caplog.records)
    return found


ROUND = [(BATCH, 300), (BATCH, 20), (BATCH, 1), (OTHER, 9), (BATCH, 2), (OTHER, 1), (BATCH, 1)]


WARM_UPS = [
    (2, ROUND, []),  # no warning at the first two steps of each shape and the step after them
    (2, [*ROUND, (BATCH, 0), (OTHER, 1), (BATCH, 1)], [9]),  # one warning
    (2, [*ROUND, (OTHER, 0), ({"input_ids": torch.zeros(4, 2, 80)}, 1)], [9]),
    (None, [(BATCH, 1), (OTHER, 1), (OTHER, 1)], [3]),
    (None, [(BATCH, 1)] * 4, [4]),
]


@pytest.mark.parametrize(("planned", "steps", "at"), WARM_UPS)
def test_guard_warns_once_after_warm_up(planned: int | None, steps: Any, at: list[int], caplog: Any) -> None:
    assert warned(RecompileGuard(Counting(), print, planned), steps, caplog) == at


def test_guard_ignores_programs_compiled_outside_training(caplog: pytest.LogCaptureFixture) -> None:
    runtime = Counting()
    guard = RecompileGuard(runtime, print, 1)
    assert warned(guard, [(BATCH, 1)] * 3, caplog) == []
    for step in range(10):
        runtime.compiled += 50  # for example by an evaluation
        guard.exclude(50)
        guard.check(step)
    assert caplog.records == []
    assert warned(guard, [(BATCH, 1)], caplog) == [1]
