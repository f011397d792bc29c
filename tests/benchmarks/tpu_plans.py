"""Table of packed rows and TRL's padded rows on TPUs, by the TPU's own compiler; see examples/guides/plan.md.

python -m tests.benchmarks.tpu_plans --folder plans

It needs `make setup-tpu`, but no TPU. Each row's numbers are kept in the folder, and compiled only once.
"""

import json
import os
import resource
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from preference_rows import dataset_of
from real_pairs import drawn_lengths
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.benchmarks.harness import in_a_process, options
from trl_tpu import RewardConfig
from trl_tpu.data.length_stats import length_stats
from trl_tpu.modeling.heads import model_without_weights
from trl_tpu.packing.shapes import BatchShape, round_up
from trl_tpu.parallel.mesh import GiB, parse_mesh, parse_topology
from trl_tpu.plan import layouts

PAIRS_PER_CHIP, PAIRS = 8, 2048
SIZES = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
MODELS = {
    "Qwen3-0.6B": ("qwen3", 128, [1024, 3072, 28, 16, 8]),
    "Qwen3-4B": ("qwen3", 128, [2560, 9728, 36, 32, 8]),
    "Qwen3-8B": ("qwen3", 128, [4096, 12288, 36, 32, 8]),
    "Qwen3.5-4B": ("qwen3_5_text", 256, [2560, 9216, 32, 16, 4]),
}
CELLS = [("Qwen3-0.6B", "v6e:1x1"), *((model, "v6e:2x4") for model in MODELS)]


def run(model: str, topology: str, data: str, rows: str) -> dict[str, float | str]:
    """Compile the usual micro-batch of one row of the table; return its numbers, times in milliseconds per pair."""
    (model_type, head, sizes), packing, chips = MODELS[model], str(rows == "packed").lower(), parse_topology(topology)
    config = CONFIG_MAPPING[model_type](**dict(zip(SIZES, sizes, strict=True)), head_dim=head, pad_token_id=0)
    args = RewardConfig("unused", report_to="none", packing=packing, per_device_train_batch_size=PAIRS_PER_CHIP)
    pairs, chooser = list[tuple[list[int], list[int]]](), np.random.default_rng(0)
    while len(pairs) < PAIRS:
        # medians of UltraFeedback by https://github.com/frankxwang/dpo-prefix-sharing
        draw = chooser.lognormal(np.log([112, 268, 268]), [0.9, 0.6, 0.6]).astype(int) + 1
        same, better, worse = drawn_lengths(chooser) if data == "HH-RLHF" else draw
        if same + max(better, worse) <= 1024:
            number = 3 * len(pairs)
            pairs.append(([number] * same + [number + 1] * better, [number] * same + [number + 2] * worse))
    tokens = dataset_of(pairs)
    module, lengths = model_without_weights(config, "float32"), length_stats(tokens).lengths
    mesh, remat = parse_mesh("fsdp=-1", chips.chips), args.remat_policy
    layout = layouts.Layout(module, args, lengths, tokens, chips, mesh, remat, PAIRS_PER_CHIP)
    usual, programs = layout.usual, len(layout.plan.shapes)
    if rows == "padded":  # TRL pads each batch to its longest sequence
        longest_B = np.random.default_rng(0).choice(lengths.longest_N, (1000, layout.batch_size)).max(axis=1)
        usual = BatchShape(usual.rows, int(round_up(longest_B.mean(), 64)))
        programs = len(set(longest_B.tolist()))
    depths = layouts.depths_of(config)
    compile_one = partial(layouts.compile_layout, arguments={"packing": packing}, peft_config=None, depths=depths)
    tried = layouts.attempt(replace(layout, given_shape=usual), compile_one)
    times = {name: round(1000 * seconds / layout.batch_size, 2) for name, seconds in tried.seconds.items()}
    memory = tried.error or round(tried.program.peak / GiB, 1)
    cpu_seconds = round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime)  # of compiling, in processes of its own
    numbers = {"tokens": usual.rows * usual.length / layout.batch_size} | times
    return numbers | {"GiB": memory, "programs": programs, "CPU seconds": cpu_seconds}


if __name__ == "__main__":
    folder = Path(options(run, folder="plans").folder)
    folder.mkdir(exist_ok=True)
    os.environ |= {"PJRT_DEVICE": "CPU", "USE_TORCH_XLA": "1"}
    for (model, topology), data, rows in product(CELLS, ["HH-RLHF", "UltraFeedback"], ["packed", "padded"]):
        file = folder / f"{model} {topology} {data} {rows}.json"
        if not file.exists():
            file.write_text(json.dumps(in_a_process("tpu_plans", model, topology, data, rows)))
        numbers = json.loads(file.read_text())
        print(
            model, topology, data, rows, *(f"{name} {value}" for name, value in numbers.items()), sep=" | ", flush=True
        )
