"""One full epoch with TRL 1.16 and with this package, from the same weights, pairs and seed: quality of the models.

python -m tests.benchmarks.run_one_epoch --output_dir runs/one_epoch [--model FOLDER]

SmolLM2-135M, or the model of a folder, is trained in plain torch on those of 1,800 HH-RLHF pairs that have at most 384
tokens, and evaluated on the next 512 pairs by `trl_tpu.evaluation`: accuracy with its interval, calibration, and the
length-only baseline. The untrained model and the rule "the shorter answer wins" are included. It prints the rows of
`runs.md`, and draws the curves of both runs in one picture, training.png. Training uses bfloat16 autocast, TRL's
default. TRL runs without gradient checkpointing, which would take a third longer and changes no number. It takes an
hour and a half on two cores, most of it for TRL. A system whose folder exists is not trained again. Time per pair is
the time of all cores, which other work on the machine changes little.
"""

import argparse
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import real_pairs
from datasets import Dataset

import trl_tpu
from trl_tpu.report.pages import pictures_of, read_run
from trl_tpu.report.verdicts import read_scored

from . import harness

FOLDERS = {"trl_tpu": "trl_tpu", harness.TRL: "trl"}
SHORTER = "the shorter answer wins"
HEAD = "| model | data | training | accuracy (95 % interval) | calibration error | length alone | CPU s per pair "
HEAD += "| tokens per real token | commit |\n|---|---|---|---|---:|---:|---:|---:|---|"


def split(options: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """Return the training pairs and the held-out pairs."""
    pairs = real_pairs.best_pairs(options.pairs + options.held_out)
    return pairs.select(range(options.pairs)), pairs.select(range(options.pairs, len(pairs)))


def run(system: str, model: str, given: str) -> dict[str, Any]:
    """Train for an epoch, save the model and the log, and return the measurements."""
    options = argparse.Namespace(**json.loads(given))
    pairs, _ = split(options)
    trained = harness.train(
        system, model, pairs, bf16=True, num_train_epochs=1, per_device_train_batch_size=options.batch, max_length=384,
        learning_rate=options.learning_rate, lr_scheduler_type="cosine", warmup_steps=0.03,
        center_rewards_coefficient=0.01, gradient_checkpointing=system == "trl_tpu", logging_steps=0.02,
        seed=options.seed, use_cpu=True,
    )  # fmt: skip
    folder = Path(options.output_dir, FOLDERS[system])
    trained.trainer.save_model(str(folder))
    trained.trainer.state.save_to_json(str(folder / "trainer_state.json"))
    return {
        "pair": trained.cpu_seconds / len(trained.trainer.train_dataset),
        "tokens": trained.tokens() / trained.real_tokens(),
    }


def row(model: str, what: str, scored: Iterable[Any], options: argparse.Namespace, measured: dict[str, Any]) -> str:
    """Return a line of the table of runs: the quality of rewards on held-out pairs."""
    file = Path(options.output_dir, "scored.jsonl")
    file.write_text("".join(f"{json.dumps(each)}\n" for each in scored))
    verdict: Any = read_scored(file).verdict
    accuracy = verdict.accuracy
    share = f"{100 * accuracy.value:.1f} % ({100 * accuracy.low:.1f} to {100 * accuracy.high:.1f})"
    source = "HH-RLHF harmless" if real_pairs.SOURCES[-1] == "real" else "made-up pairs"
    data = f"{source}, {options.pairs:,} + {options.held_out}"
    length = f"{100 * verdict.length.length_only:.1f} %"
    speed = " | ".join(f"{measured[name]:.2f}" if name in measured else "-" for name in ("pair", "tokens"))
    calibration = "-" if what == SHORTER else f"{verdict.calibration.ece:.3f}"
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], stdout=subprocess.PIPE, text=True).stdout
    return f"| {model} | {data} | {what} | {share} | {calibration} | {length} | {speed} | {commit.strip()} |"


def main(options: argparse.Namespace) -> None:
    output = Path(options.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    model = options.model or str(output / "base")
    if not Path(model).is_dir():
        harness.save_smollm2(Path(model))
    name = Path(options.model).name if options.model else harness.SMOLLM2
    _, held_out = split(options)
    scored = list(trl_tpu.score(model, held_out))
    # the rewards of a rule express no confidence
    shorter = (
        pair | {f"reward_{half}": -pair[f"tokens_{half}"] for half in ("chosen", "rejected")} for pair in scored
    )
    rows = [row("-", SHORTER, shorter, options, {}), row(name, "untrained", scored, options, {})]
    rate = f"{options.learning_rate:g}, batches of {options.batch}, seed {options.seed}"
    for system, folder in FOLDERS.items():
        file = output / folder / "measured.json"
        if not file.is_file():
            measured = harness.in_a_process("run_one_epoch", system, model, json.dumps(vars(options)))
            file.write_text(json.dumps(measured))
        measured = json.loads(file.read_text())
        rewards = trl_tpu.score(str(output / folder), held_out)
        rows.append(row(name, f"{system}, 1 epoch, {rate}", rewards, options, measured))
    pictures = pictures_of({}, [read_run(output / folder, system) for system, folder in FOLDERS.items()])
    (output / "training.png").write_bytes(pictures["Training"])
    print("\n".join([HEAD, *rows]))


if __name__ == "__main__":
    defaults = {"pairs": 1800, "held_out": 512, "batch": 8, "learning_rate": 2e-5, "seed": 42}
    main(harness.options(run, output_dir="runs/one_epoch", model="", **defaults))
