"""Compare training of a model of a published form with TRL: time per pair, memory and losses.

Weights are random: speed depends on shapes only. Both systems train the same model on the same pairs, alternating: all
weights if they fit with AdamW's state in float32, else LoRA adapters.
"""

import gc
import sys
from typing import Any

import numpy as np
import real_pairs
import tiny
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForSequenceClassification, set_seed, utils

from tests.benchmarks import harness
from tests.benchmarks.bench_real_model import measured
from trl_tpu.runtime import current

from . import IS_DRY, row

#: Types of configs, values of `SIZES`, and pairs per step.
FORMS = {
    "SmolLM2-135M": ("llama", (576, 1536, 30, 9, 3, 64, 49152), 32),
    "Qwen3-0.6B": ("qwen3", (1024, 3072, 28, 16, 8, 128, 151936), 16),
    "Qwen3-4B": ("qwen3", (2560, 9728, 36, 32, 8, 128, 151936), 8),
}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SIZES += ("head_dim", "vocab_size")
STEPS, WARM, RUNS, LONGEST = (3, 1, 1, 128) if IS_DRY else (11, 3, 2, 1024)
MEMORY = float("inf") if IS_DRY else torch.cuda.get_device_properties(0).total_memory
COLUMNS = {"s per pair": ".4f", "GiB": ".1f"}


def pairs_of(data: str, count: int) -> Dataset:
    """Return pairs of random token ids, no longer than TRL's default `max_length`.

    UltraFeedback's pairs have 409 tokens, and their prompts 0.42 of an answer's (medians, by
    https://github.com/frankxwang/dpo-prefix-sharing).
    """
    chooser, rows = np.random.default_rng(0), list[dict[str, list[int]]]()
    while len(rows) < count:
        sizes = real_pairs.drawn_lengths(chooser)
        if data == "UltraFeedback":
            sizes = [*map(round, chooser.lognormal(np.log([112, 268, 268]), [0.9, 0.6, 0.6]))]
        prompt, chosen, rejected = (chooser.integers(3, 300, 1 + size).tolist() for size in sizes)
        if max(len(prompt + chosen), len(prompt + rejected)) <= LONGEST:
            rows.append({"chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected})
    return Dataset.from_list(rows)


def compare(form: str, data: str, implementation: str) -> None:
    (kind, values, batch), device = FORMS[form], current().device
    sizes: dict[str, Any] = dict(zip(SIZES, values, strict=True)) | {"num_labels": 1}
    if IS_DRY:
        small = {"hidden_size": 8 * sizes["num_attention_heads"], "intermediate_size": 64, "num_hidden_layers": 2}
        batch, sizes = 2, sizes | small | {"vocab_size": 304}
    tokenizer, pairs = tiny.tiny_tokenizer(["a"], 300), pairs_of(data, batch * STEPS)
    config = AutoConfig.for_model(kind, **sizes, **tiny.special_tokens(tokenizer))

    def run(system: str) -> dict[str, Any]:
        gc.collect()
        if not IS_DRY:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        set_seed(0)
        with device:
            auto, how = AutoModelForSequenceClassification, {"attn_implementation": implementation}
            model: Any = auto.from_config(config, dtype=torch.float32, **how)
        weights = "all" if 16 * model.num_parameters() < 0.6 * MEMORY else "adapters"
        given: Any = {"bf16": True, "use_cpu": IS_DRY, "logging_steps": 2, "processing_class": tokenizer}
        return measured(system, model, pairs, weights, batch, STEPS, WARM, **given) | {"weights": weights}

    title, systems = f"{form}, {data}-like, {implementation}, {batch} pairs per step", (harness.TRL, "trl_tpu")
    theirs, ours = harness.compare_systems(title, RUNS, systems, run, COLUMNS, shares=["s per pair"]).values()
    difference = max(abs(one - other) for one, other in zip(ours[0]["losses"], theirs[0]["losses"], strict=True))
    mine, reference = (
        ", ".join(f"{harness.median(runs, name):{format_}} {name}" for name, format_ in COLUMNS.items())
        for runs in (ours, theirs)
    )
    share = f"**{harness.ratio(ours, theirs, 's per pair'):.2f}** of TRL's time"
    said = f"{share}: {mine}; TRL: {reference}; losses differ by {difference:.0e}"
    row(f"{title}, {ours[0]['weights']} weights", said, difference <= 3e-2)


if __name__ == "__main__":
    fast = [f"flash_attention_{n}" for n in (4, 3, 2) if getattr(utils, f"is_flash_attn_{n}_available")()][:1]
    if not fast:
        row(f"{sys.argv[1]}, flash attention", "not installed")
    for data in ("UltraFeedback", "HH"):
        for implementation in ("sdpa", *fast):
            compare(sys.argv[1], data, implementation)
