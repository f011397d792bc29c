"""One epoch to the end, by TRL 1.16 and here from the same weights, pairs and seed: what each model is worth.

python -m tests.benchmarks.run_one_epoch --output_dir runs/one_epoch [--model FOLDER] [--table runs.md]

SmolLM2-135M (or the model of a folder) learns those of 1,800 pairs of HH-RLHF that have at most 384 tokens, in plain
torch, and is judged on the next 512 pairs by `trl_tpu.evaluation`: accuracy with its interval, calibration, and what
the length alone would reach. Beside the two stand the untrained model and "the shorter answer wins". Both runs' curves
are in one picture, training.png, and the rows in Markdown, which `--table` appends to the table of runs. In bfloat16
by autocast, TRL's default. TRL does without gradient checkpointing, which changes no number, and would take it a third
longer. Takes an hour and a half on two cores, most of it TRL's; a system whose folder is there already is not trained
again. What a pair takes is the time of all cores, which other work on the machine changes little.
"""

import os

os.environ["USE_TORCH_XLA"] = "0"  # before transformers is imported
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars

import trl_tpu
from trl_tpu.data.comparisons import pairs_of
from trl_tpu.data.measure import read_row
from trl_tpu.evaluation.judge import judge_rows
from trl_tpu.evaluation.verdict import Verdict
from trl_tpu.report.pages import RunHistory, pictures_of, read_run

from .bench_real_model import package_of, tokens_in

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import real_pairs  # noqa: E402
import smollm2  # noqa: E402

FOLDERS = {"trl_tpu": "trl_tpu", "TRL 1.16": "trl"}
MEASURED = "measured.json"
SHORTER = "the shorter answer wins"
COLUMNS = ("model", "data", "what", "accuracy (95 % interval)", "calibration error", "length alone", "CPU s a pair")
HEAD = "| " + " | ".join([*COLUMNS, "tokens a real one", "commit"]) + " |\n|---|---|---|---|---:|---:|---:|---:|---|\n"


def split(options: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """The pairs to train on, and those that are held out."""
    pairs = real_pairs.best_pairs(options.pairs + options.held_out)
    return pairs.select(range(options.pairs)), pairs.select(range(options.pairs, len(pairs)))


def train(system: str, model: str, options: argparse.Namespace) -> None:
    """Train for an epoch, and keep the model, the log, and what was measured."""
    package, settings = package_of(system)
    folder = Path(options.output_dir, FOLDERS[system])
    pairs, _ = split(options)
    args = package.RewardConfig(
        str(folder), bf16=True, num_train_epochs=1, per_device_train_batch_size=options.batch,
        max_length=384, learning_rate=options.learning_rate,
        lr_scheduler_type="cosine", warmup_steps=0.03, center_rewards_coefficient=0.01,
        gradient_checkpointing=system == "trl_tpu",
        logging_steps=0.02, save_strategy="no", report_to="none", disable_tqdm=True, seed=options.seed,
        **{"use_cpu": True, **settings},
    )  # fmt: skip
    trainer = package.RewardTrainer(model, args, train_dataset=pairs)
    began = time.process_time()
    trainer.train()
    seconds = time.process_time() - began
    trained = trainer.train_dataset
    real = sum(len(ids) for row in trained for ids in read_row(row)["answers"])
    tokens = tokens_in(trainer.get_train_dataloader()) / real
    measured = {"pair": seconds / len(trained), "tokens": tokens, "settings": settings_of(options)}
    trainer.save_model()
    trainer.save_state()
    (folder / MEASURED).write_text(json.dumps(measured))


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What a trained model depends on."""
    names = ("pairs", "held_out", "batch", "learning_rate", "seed")
    return {name: getattr(options, name) for name in names} | {"data": real_pairs.SOURCES[-1]}


def judged(model: Any, held_out: Dataset) -> Verdict:
    """Judge a saved model, or a rule that scores a row, on the held-out pairs."""
    rows = list(trl_tpu.score(model, held_out)) if isinstance(model, str) else list(map(model, held_out))
    both = np.array([[row[f"reward_{half}"] for half in ("chosen", "rejected")] for row in rows], dtype=np.float64)
    lengths = np.array([[row[f"tokens_{half}"] for half in ("chosen", "rejected")] for row in rows])
    return judge_rows(both, pairs_of(len(both)), lengths)


def row(model: str, what: str, verdict: Verdict, options: argparse.Namespace, measured: dict[str, Any]) -> str:
    """A line of the table of runs."""
    accuracy = verdict.accuracy
    share = f"{100 * accuracy.value:.1f} % ({100 * accuracy.low:.1f} to {100 * accuracy.high:.1f})"
    data = f"HH-RLHF harmless, {options.pairs:,} + {options.held_out}"
    if real_pairs.SOURCES[-1] != "real":
        data = data.replace("HH-RLHF harmless", "made-up pairs")
    length = "-" if verdict.length is None else f"{100 * verdict.length.length_only:.1f} %"
    speed = " | ".join(f"{measured[name]:.2f}" if name in measured else "-" for name in ("pair", "tokens"))
    calibration = "-" if what == SHORTER else f"{verdict.calibration.ece:.3f}"
    return f"| {model} | {data} | {what} | {share} | {calibration} | {length} | {speed} | {commit()} |"


def curves_of(folder: Path, system: str) -> RunHistory:
    """The loss and the accuracy that a run has logged; throughput, say, is not what is compared here."""
    run = read_run(folder, system)
    names = ("step", "loss", "accuracy")
    return replace(run, records=[{name: log[name] for name in names if name in log} for log in run.records])


def commit() -> str:
    said = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    return said.stdout.strip() or trl_tpu.__version__


def shorter_wins(scored: dict[str, Any]) -> dict[str, Any]:
    """The rule that the shorter answer is the better one; its rewards say nothing of how sure it is."""
    return scored | {f"reward_{half}": -float(scored[f"tokens_{half}"]) for half in ("chosen", "rejected")}


def main(options: argparse.Namespace) -> None:
    output = Path(options.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    model = options.model or str(output / "base")
    if not Path(model).is_dir():
        if not smollm2.is_installed():
            sys.exit(print(smollm2.MISSING))
        smollm2.save(Path(model))
    name = Path(options.model).name if options.model else smollm2.NAME
    _, held_out = split(options)
    scored = Dataset.from_list(list(trl_tpu.score(model, held_out)))
    rows = [
        row("-", SHORTER, judged(shorter_wins, scored), options, {}),
        row(name, "untrained", judged(lambda each: each, scored), options, {}),
    ]
    for system, folder in FOLDERS.items():
        if not (output / folder / MEASURED).is_file():
            command = [sys.executable, "-m", "tests.benchmarks.run_one_epoch", *sys.argv[1:]]
            subprocess.run([*command, "--train", system, "--model", model], check=True)
        measured = json.loads((output / folder / MEASURED).read_text())
        if measured["settings"] != settings_of(options):
            sys.exit(f"{output / folder} was trained with {measured['settings']}: name another --output_dir.")
        rate = f"{options.learning_rate:g}, batches of {options.batch}, seed {options.seed}"
        rows.append(row(name, f"{system}, 1 epoch, {rate}", judged(str(output / folder), held_out), options, measured))
    pictures = pictures_of({}, [curves_of(output / folder, system) for system, folder in FOLDERS.items()])
    (output / "training.png").write_bytes(pictures["Training"])
    print(HEAD + "\n".join(rows))
    print(", ".join(f"{library} {version(library)}" for library in ("torch", "transformers", "trl")))
    if options.table:
        table = Path(options.table)
        begun = table.read_text() if table.exists() else f"# Table of runs\n\nBy `run_one_epoch.py`.\n\n{HEAD}"
        table.write_text(begun + "\n".join(rows) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--model", help="folder of another model than SmolLM2")
    parser.add_argument("--pairs", type=int, default=1800)
    parser.add_argument("--held_out", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--table", help="Markdown file to which the rows are added")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(2)
    disable_progress_bars()
    if options.train:
        train(options.train, options.model, options)
    else:
        main(options)
