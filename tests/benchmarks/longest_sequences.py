"""Maximum sequence lengths by model and TPU slice: the table of `examples/guides/plan.md`.

python -m tests.benchmarks.longest_sequences [--models Qwen3-8B ...] [--slices v6e:2x4 ...] [--lengths 16384 ...]

`trl-tpu plan` compiles each training for the longest sequences that fit, and for sequences twice as long, which do not
fit. A row holds two sequences without shared tokens. A compilation takes minutes, in the environment of
`make setup-tpu`.
"""

import re
import subprocess
import sys
import tempfile
from typing import Any

from transformers import AutoConfig

from . import harness

# sizes from the models' published configs
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                     "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
                     "tie_word_embeddings": True, "max_position_embeddings": 131072},
    "Qwen3-8B": {"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                 "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
                 "max_position_embeddings": 40960},
}  # fmt: skip
SETTINGS = (
    "--per_device_train_batch_size 1 --scan_layers true --remat full --activation_offloading true --report_to none"
)
LONGEST = {
    ("Llama-3.2-1B", "v5e:2x4"): (32768, ""),
    ("Llama-3.2-1B", "v6e:2x4"): (65536, ""),
    ("Llama-3.2-1B", "v6e:4x4"): (65536, ""),
    ("Qwen3-8B", "v5e:2x4"): (16384, "--use_peft true"),
    ("Qwen3-8B", "v6e:2x4"): (16384, ""),
    ("Qwen3-8B", "v6e:4x4"): (32768, ""),
}  # lengths and additional settings


def verdict(model: str, topology: str, length: int, more: str) -> str:
    """Return the first line of the verdict of ``trl-tpu plan`` for sequences of ``length`` tokens."""
    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model(**MODELS[model]).save_pretrained(folder)
        words = f"--model_name_or_path {folder} --topology {topology} {SETTINGS} {more}".split()
        words += f"--max_length {length} --row_length {2 * length}".split()
        command = [sys.executable, "-m", "trl_tpu.cli", "plan", *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    found = re.search(r"^IT .*", done.stdout, re.MULTILINE)
    return "failed" if found is None else found[0]


if __name__ == "__main__":
    options = harness.options(models=MODELS, slices=["v5e:2x4", "v6e:2x4", "v6e:4x4"], lengths=[])
    for (model, topology), (longest, more) in LONGEST.items():
        if model in options.models and topology in options.slices:
            for length in map(int, options.lengths or [longest, 2 * longest]):
                print(model, topology, length, more, verdict(model, topology, length, more), sep=" | ", flush=True)
