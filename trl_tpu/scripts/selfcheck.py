"""Check a machine: ``trl-tpu selfcheck`` trains a tiny model on the devices and compares its losses with the CPU's.

Each group of runs is a child process: a TPU belongs to one process at a time, and platform and precision are chosen
once per process. This process itself uses no device.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from trl_tpu.parallel.mesh import CHIPS, TpuSlice

_STEPS, _LOGGING_STEPS, _SAVED_STEP, _KILLED_STEP, _BATCH_SIZE = 20, 5, 10, 13, 8
_GUIDE = "troubleshooting.md#selfcheck-"
# largest difference of a logged loss, by heading of the guide; two CPU platforms differ by less than 1e-6
_TOLERANCES = {"float32-losses": 1e-4, "bfloat16-losses": 3e-2, "meshes": 1e-4, "resuming": 1e-6}
_CPU = {"USE_TORCH_XLA": "0", "ACCELERATE_USE_CPU": "1", "CUDA_VISIBLE_DEVICES": ""}
_PACKAGES = (
    *("torch", "torch_xla", "torch_tpu", "libtpu", "transformers", "accelerate", "datasets", "peft", "safetensors"),
    *("flash-attn", "flash-attn-3", "flash-attn-4", "trl_tpu"),
)
_EAGER: dict[str, Any] = {"model_init_kwargs": {"attn_implementation": "eager"}}
# implementations of attention by the package that they need
_FLASH = {"flash-attn": "flash_attention_2", "flash-attn-3": "flash_attention_3", "flash-attn-4": "flash_attention_4"}


def package_versions() -> dict[str, str | None]:
    """Return the version of each package that matters for bug reports; None if it is not installed."""
    installed = {each.name.replace("_", "-"): each.version for each in distributions()}
    return {package: installed.get(package.replace("_", "-")) for package in _PACKAGES}


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        passed: None for a measurement without a limit.
        guide: The page and heading that help if the check fails.
    """

    check: str
    result: str
    passed: bool | None = None
    guide: str = ""

    def __str__(self) -> str:
        verdict = {True: "ok", False: "FAILED", None: ""}[self.passed]
        return f"{self.check:<48} {self.result:<24} {verdict}" + f" -> {self.guide}" * (self.passed is False)


# ---- in a child process


def train_group(file: Path) -> None:
    """Train the runs that a JSON file describes, one after another, and write their results next to it."""
    from trl_tpu.runtime import current

    group, results = json.loads(file.read_text()), dict[str, Any]()
    if group["precision"] == "float32":
        current().use_exact_products()
    for name, settings in group["runs"].items():
        results[name] = _train(file.with_name(name), settings, kills=group["kills"])
        file.with_suffix(".out").write_text(json.dumps(results))


def _train(folder: Path, settings: dict[str, Any], kills: bool) -> dict[str, Any]:
    """Train once, and return the logs, and the time and the counters after each step."""
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification, TrainerCallback

    from trl_tpu import RewardConfig, RewardTrainer
    from trl_tpu.runtime import current
    from trl_tpu.runtime.varlen import varlen_error
    from trl_tpu.scripts import synthetic
    from trl_tpu.training.batch_plan import Planned

    marks, runtime, is_long = list[tuple[float, int | None, int | None]](), current(), folder.name == "long"

    class Marks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                runtime.fetch([trainer.model.score.weight])  # waits for the first step
            marks.append((time.monotonic(), runtime.compile_count(), runtime.read_count()))
            if kills and state.global_step == _KILLED_STEP:
                trainer.trl_tpu.checkpointer.wait()
                os.kill(os.getpid(), signal.SIGKILL)

    defaults: dict[str, Any] = {"max_steps": _STEPS, "logging_steps": _LOGGING_STEPS, "total_batch_size": _BATCH_SIZE}
    defaults |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "bf16": False, "max_shapes": 1}
    defaults |= {"learning_rate": 1e-3, "use_cpu": runtime.device.type == "cpu"}  # bf16 needs `use_cpu` there
    args = RewardConfig(str(folder), **defaults | settings)
    rows, tokenizer = synthetic.load_dataset(synthetic.DATASET)["train"], synthetic.tiny_tokenizer()
    model: Any = synthetic.resolve_model(synthetic.MODEL, str(folder.parent))
    if is_long:  # 1.2 billion weights, and sequences of some 2,000 tokens
        sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
        sizes |= {"num_key_value_heads": 8, "max_position_embeddings": 4096, "vocab_size": 128256, "num_labels": 1}
        tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
        model = LlamaForSequenceClassification(LlamaConfig.from_dict({**sizes, **tokens}))
        rows = rows.map(lambda row: {"prompt": row["prompt"] * 200})
    start = time.monotonic()
    trainer: Any = RewardTrainer(model, args, train_dataset=rows, processing_class=tokenizer, callbacks=[Marks()])
    trainer.train()
    trainer.model.config.save_pretrained(folder / "config")  # for `trl-tpu plan`
    layout, topology = trainer.batch_plan.layout, runtime.topology()
    return {
        **{"logs": [log for log in trainer.state.log_history if "loss" in log], "marks": marks, "start": start},
        **{"batches": str(layout), "device": topology.description, "devices": topology.devices},
        **{"row_length": layout.plan.longest if isinstance(layout, Planned) else None},
        "attention_error": varlen_error(runtime.device, torch.bfloat16, 64) if runtime.name == "plain torch" else None,
        **{"chip": runtime.chip(), "is_spmd": runtime.is_spmd, "processes": topology.process_count},
    }


# ---- in the parent


class Selfcheck:
    """Runs groups of trainings in child processes, and collects their lines and results."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.lines, self.runs = folder, list[Line](), dict[str, Any]()

    def train(self, precision: str, runs: dict[str, Any], status: int = 0, environment: Any = ()) -> dict[str, Any]:
        """Train a group, and return the results that it wrote; a line reports an unexpected exit status.

        The run "long" trains the large model. A group of ``status`` -SIGKILL kills itself.
        """
        file = self._folder / f"{'-'.join(runs).replace(' ', '_')}.json"
        file.write_text(json.dumps({"precision": precision, "runs": runs, "kills": status == -signal.SIGKILL}))
        command = [sys.executable, "-m", "trl_tpu.scripts.selfcheck", str(file)]
        child = subprocess.run(command, env=os.environ | dict(environment), capture_output=True, text=True)
        output = file.with_suffix(".out")
        results = json.loads(output.read_text()) if output.exists() else {}
        if child.returncode != status:
            failed = next((name for name in runs if name not in results), precision)
            reason = (child.stderr.strip().splitlines() or ["no output"])[-1]
            self.lines.append(Line(f"{failed}: runs", reason, False, f"{_GUIDE}a-run-ends-early"))
        self.runs |= results
        return results

    def compare(self, results: dict[str, Any], reference: list[dict[str, Any]], heading: str) -> None:
        """Add a line per run: the largest difference of its losses from a reference's last losses."""
        for name, result in results.items():
            losses = [log["loss"] for log in result["logs"]]
            expected = [log["loss"] for log in reference[-len(losses) :]]
            difference = max(abs(loss - other) for loss, other in zip(losses, expected, strict=True))
            passed = difference <= _TOLERANCES[heading]
            self.lines.append(Line(f"{name}: losses", f"differ by {difference:.1e}", passed, f"{_GUIDE}{heading}"))

    def measure(self, name: str) -> None:
        """Add the lines of a run's counters and rates."""
        result = self.runs[name]
        times, programs, reads = zip(*result["marks"], strict=True)
        warm, last, log = _LOGGING_STEPS, 2 * _LOGGING_STEPS - 2, result["logs"][-1]
        add, guide = self.lines.append, f"{_GUIDE}programs-and-reads"
        if programs[0] is not None:
            add(Line(f"{name}: programs of the first steps", str(programs[warm])))
            late = programs[-1] - programs[warm]
            add(Line(f"{name}: programs after {warm + 1} steps", str(late), not late, guide))
        if reads[0] is not None:
            between = reads[last] - reads[warm]
            add(Line(f"{name}: reads between two logs", str(between), not between, guide))
        add(Line(f"{name}: seconds to the first step", f"{times[0] - result['start']:.1f}"))
        add(Line(f"{name}: seconds per step", f"{(times[-1] - times[warm]) / (len(times) - 1 - warm):.4f}"))
        for key, title in (("tokens_per_second", "tokens per second"), ("mfu", "MFU"), ("memory_gib", "highest GiB")):
            if key in log:
                add(Line(f"{name}: {title}", f"{log[key]:.4g}"))

    def plan(self, name: str, *words: str) -> None:
        """Add what ``trl-tpu plan`` predicts for the chips of a run, to compare with its lines."""
        result = self.runs[name]
        chip = CHIPS.get(result["chip"])
        slices = [TpuSlice(chip, shape) for shape in chip.shapes] if chip is not None else []
        topology = next((str(each) for each in slices if each.chips == result["devices"]), None)
        if topology is None:
            return
        command = [sys.executable, "-m", "trl_tpu.cli", "plan", "--report_to", "none", "--topology", topology, *words]
        batch_size, folder = max(1, _BATCH_SIZE // result["devices"]), self._folder / name / "config"
        command += ["--model_name_or_path", str(folder), "--row_length", str(result["row_length"])]
        command += ["--per_device_train_batch_size", str(batch_size)]
        for line in subprocess.run(command, capture_output=True, text=True).stdout.splitlines():
            if "FIT" in line or "At best" in line:
                self.lines.append(Line(f"{name}: predicted by trl-tpu plan", line.strip(" ,")))

    def run(self, is_long: bool) -> None:
        """Run all checks; with ``is_long``, also train the large model."""
        reference = self.train("float32", {"padded on the CPU": {"packing": False}}, environment=_CPU)
        if not reference:
            return
        expected = reference["padded on the CPU"]["logs"]
        checks = self.train("float32", {"packed": {}, "padded": {"packing": False}, "eager attention": _EAGER})
        self.compare(checks, expected, "float32-losses")
        if "packed" not in checks:
            return
        packed = checks["packed"]
        if packed["is_spmd"]:  # other platforms attend in packed rows through masks only
            expanded = self.train("float32", {"expanded attention": {"packed_attention": "expanded"}})
            self.compare(expanded, expected, "float32-losses")
        half: dict[str, Any] = {"packed in bfloat16": {"bf16": True}}
        for name in (name for package, name in _FLASH.items() if package_versions()[package]):
            half[name] = {"bf16": True, "model_init_kwargs": {"attn_implementation": name}}
            half[f"{name}, padded"] = half[name] | {"packing": False}
        self.compare(self.train("bfloat16", half), expected, "bfloat16-losses")
        if (error := packed["attention_error"]) is not None:  # infinite: masks are used, for lack of a kernel
            passed = error <= _TOLERANCES["bfloat16-losses"] or error == float("inf")
            self.lines.append(Line("attention in one call", f"error {error:.1e}", passed, f"{_GUIDE}bfloat16-losses"))
        if packed["devices"] > packed["processes"]:
            meshes = ["data=-1", "fsdp=-1", *["tensor=2,fsdp=-1"] * (packed["devices"] % 2 == 0)]
            sharded = self.train("float32", {f"mesh {mesh}": {"mesh": mesh} for mesh in meshes})
            self.compare(sharded, expected, "meshes")
        saving = {"save_strategy": "steps", "save_steps": _SAVED_STEP, "resume_from_checkpoint": "auto"}
        self.train("float32", {"resumed": saving}, status=-signal.SIGKILL)
        self.compare(self.train("float32", {"resumed": saving}), packed["logs"], "resuming")
        self.measure("packed")
        self.plan("packed", "--bf16", "false")
        long = {"long": {"bf16": True, "max_length": None, "gradient_checkpointing": True, "max_steps": 10}}
        if is_long and self.train("bfloat16", long):
            self.measure("long")
            self.plan("long", "--gradient_checkpointing", "true")


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="trl-tpu selfcheck",
        description="Train a tiny model on this machine's devices for some minutes, and compare it with the CPU. "
        "Attach the file that it writes to issue reports.",
        allow_abbrev=False,
    )
    parser.add_argument("--output", default="selfcheck.json", help="File of the results (default: %(default)s).")
    parser.add_argument("--long", action="store_true", help="Also train a model of 1.2 billion random weights.")
    return parser


def run(argv: list[str]) -> int:
    """Run the command ``trl-tpu selfcheck``; return the exit status, 1 if a check failed."""
    args = make_parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        check = Selfcheck(Path(folder))
        check.run(args.long)
    versions = {"python": platform.python_version(), **package_versions()}
    device = next((result["device"] for name, result in check.runs.items() if name == "packed"), "unknown")
    report = {"versions": versions, "device": device, "lines": [*map(asdict, check.lines)], "runs": check.runs}
    Path(args.output).write_text(json.dumps(report, indent=1), encoding="utf-8")
    failed = [line for line in check.lines if line.passed is False]
    print(f"{device}; {', '.join(f'{name} {value}' for name, value in versions.items() if value)}")
    print("\n".join(map(str, check.lines)))
    print(f"{len(failed)} of {len(check.lines)} lines failed. " if failed else "Passed. ", f"Results: {args.output}")
    return bool(failed)


if __name__ == "__main__":
    train_group(Path(sys.argv[1]))
