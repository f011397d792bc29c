"""Rates follow from a clock and counts, and operations per step equal torch's count for real models."""

import inspect
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import subprocesses
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from preference_rows import dataset_of
from torch.utils.flop_counter import FlopCounterMode
from training import trained
from transformers import AutoConfig, AutoModelForSequenceClassification

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.data.collate import ComparisonRule, compare, pairs_of
from trl_tpu.evaluation.evaluate import RewardSums
from trl_tpu.modeling.heads import model_without_weights
from trl_tpu.modeling.model_shape import flops_per_row, model_shape_of, training_flops
from trl_tpu.packing.shapes import RowLengths
from trl_tpu.parallel.mesh import peak_flops_of
from trl_tpu.runtime import current
from trl_tpu.runtime.native import Runtime, peak_resident_bytes
from trl_tpu.training.statistics import StepCounts, StepStatistics

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
    monkeypatch.setattr(runtime, "chip", lambda: "v5litepod")
    peak = peak_flops_of("v5litepod")
    assert peak is not None
    statistics = StepStatistics(runtime, torch.device("cpu"))
    statistics.flops_per_row = peak / 4

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
    clock.now += 1000  # a pause, for example an evaluation
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
    assert pairs.tokens == sum(map(sum, sizes))
