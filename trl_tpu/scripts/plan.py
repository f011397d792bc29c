"""Plan a training on TPUs without one: ``trl-tpu plan``.

The arguments of the training itself, from flags or its YAML file, and the slice to plan for. The training step is
traced and given to the TPU's own compiler; see `trl_tpu.preflight`.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trl_tpu.runtime.device_choice import settle
from trl_tpu.scripts.config_file import take_config

# nothing heavy at the top: how many devices torch_xla pretends to have is settled before it is imported
if TYPE_CHECKING:
    from trl_tpu.parallel.mesh import MeshShape
    from trl_tpu.preflight.chips import Topology
    from trl_tpu.preflight.job import Job
    from trl_tpu.preflight.search import CompileStep
    from trl_tpu.scripts.parser import TrlParser
    from trl_tpu.scripts.utils import DatasetMixtureConfig, ScriptArguments
    from trl_tpu.trainer.model_config import ModelConfig
    from trl_tpu.trainer.reward_config import RewardConfig


@dataclass
class PlanArguments:
    """What to plan for, beside the arguments of the training."""

    topology: str = field(metadata={"help": "The slice: chip and shape, such as v5e:2x4, v5p:2x2x4 or v6e:4x4."})
    rows: int | None = field(
        default=None,
        metadata={"help": "Packed rows of a batch, over all chips. By default as many as pairs of `max_length` need."},
    )
    pairs_in_dataset: int | None = field(
        default=None, metadata={"help": "Pairs to train on, for the hours. By default those of the dataset, if named."}
    )
    price_per_chip_hour: float | None = field(
        default=None, metadata={"help": "What an hour of a chip costs you, in any currency, for the cost."}
    )
    search: bool = field(
        default=False, metadata={"help": "Look for the best mesh, remat policy and batch size for the slice."}
    )
    compiles: int = field(
        default=6, metadata={"help": "How many programs a search, or a way that does not fit, may compile."}
    )
    all_layers: bool = field(
        default=False,
        metadata={"help": "Compile all layers of a deep model, which takes long, and not two depths of it."},
    )
    json: bool = field(default=False, metadata={"help": "Print JSON: bytes, operations and seconds."})
    plot: str | None = field(
        default=None, metadata={"help": "A file (.png, .svg, .pdf) for a picture of memory and speed."}
    )


@dataclass(frozen=True)
class Asked:
    """The parsed arguments; ``given`` are those of `RewardConfig` that were not left at their defaults."""

    plan: PlanArguments
    script: "ScriptArguments"
    training: "RewardConfig"
    model: "ModelConfig"
    data: "DatasetMixtureConfig"
    given: dict[str, Any]


def main(asked: Asked, compile_step: "CompileStep | None" = None) -> int:
    """Plan, and print what was found.

    Args:
        compile_step: What compiles; by default the TPU's own compiler.

    Returns:
        The exit status: 0 if it fits, or of a search anything does, else 1.

    Raises:
        ValueError: No model, a mesh that the slice or the model does not fit, several slices.
        RuntimeError: The compiler fails for another reason than memory.
    """
    from trl_tpu.preflight.chips import parse_topology
    from trl_tpu.preflight.plot import check_plot
    from trl_tpu.scripts.plan_job import compiler, job_of

    topology = parse_topology(asked.plan.topology)
    mesh = asked.training.mesh_shape
    if mesh.slices > 1:
        raise ValueError(f"mesh '{mesh}': {topology} is one slice. Plan for one slice; `data` goes over several.")
    if asked.plan.plot is not None:
        check_plot(asked.plan.plot)
    with tempfile.TemporaryDirectory() as folder:
        job, pairs_in_dataset = job_of(asked, folder)
    compile_step = compile_step or compiler(asked, job)
    if asked.plan.search:
        return _search(asked, job, topology, compile_step)
    return _plan(asked, job, topology, mesh, compile_step, asked.plan.pairs_in_dataset or pairs_in_dataset)


def _plan(
    asked: Asked,
    job: "Job",
    topology: "Topology",
    mesh: "MeshShape",
    compile_step: "CompileStep",
    pairs_in_dataset: int | None,
) -> int:
    from trl_tpu.preflight.plot import plot_report
    from trl_tpu.preflight.report import Report, Training
    from trl_tpu.preflight.search import attempt, try_remedies
    from trl_tpu.preflight.text import refusal_text, remedies_text, text_of

    args = asked.training
    case = job.case(topology, mesh, args.remat_policy, args.per_device_train_batch_size)
    _say(f"Compiling for {topology}: {case} ...")
    first = attempt(case, compile_step)
    epochs = args.num_train_epochs
    if args.max_steps > 0:
        pairs_in_dataset, epochs = args.max_steps * case.pairs * case.accumulation, 1.0
    training = Training(pairs_in_dataset, epochs, asked.plan.price_per_chip_hour)
    report = None
    if first.program is not None:
        report = Report(case, first.program, training, str(job.batching), job.notes)
    tried = [] if first.fits else try_remedies(job, case, _watched(compile_step), asked.plan.compiles)
    if asked.plan.json:
        said = report.as_json() if report is not None else first.as_json()
        print(json.dumps(said | {"tried": [each.as_json() for each in tried]}, indent=2))
    else:
        print(text_of(report) if report is not None else refusal_text(first))
        if not first.fits:
            print(f"\n{remedies_text(tried)}")
    if asked.plan.plot is not None and report is not None:
        plot_report(report, asked.plan.plot)
        _say(f"Picture: {asked.plan.plot}")
    return 0 if first.fits else 1


def _search(asked: Asked, job: "Job", topology: "Topology", compile_step: "CompileStep") -> int:
    from trl_tpu.preflight.search import search
    from trl_tpu.preflight.text import found_text

    found = search(job, topology, _watched(compile_step), asked.plan.compiles)
    if asked.plan.json:
        attempts = [each.as_json() for each in found.attempts]
        print(json.dumps({"attempts": attempts, "too_large": found.too_large, "not_compiled": found.left}, indent=2))
    else:
        print(found_text(found, topology, str(job.batching)))
    return 0 if any(each.fits for each in found.attempts) else 1


def _watched(compile_step: "CompileStep") -> "CompileStep":
    def say_and_compile(case: Any) -> Any:
        _say(f"Compiling for {case.topology}: {case} ...")
        return compile_step(case)

    return say_and_compile


def _say(line: str) -> None:
    """What is going on, apart from what is printed: programs take minutes to compile."""
    print(line, file=sys.stderr, flush=True)


def make_parser() -> "TrlParser":
    """The parser: the flags of ``trl-tpu reward`` and those of planning."""
    from trl_tpu.scripts.parser import TrlParser
    from trl_tpu.scripts.utils import DatasetMixtureConfig, ScriptArguments
    from trl_tpu.trainer.model_config import ModelConfig
    from trl_tpu.trainer.reward_config import RewardConfig

    types = (PlanArguments, ScriptArguments, RewardConfig, ModelConfig, DatasetMixtureConfig)
    return TrlParser(types, prog="trl-tpu plan")


def parse(parser: "TrlParser", argv: list[str]) -> Asked:
    """The arguments, checked as the training would, for as many devices as the slice has chips.

    Raises:
        ValueError: Unknown arguments, and what the training itself would refuse.
    """
    from trl_tpu.trainer.reward_config import RewardConfig

    plan, script, training, model, data = parser.parse_args_and_config(argv)
    words = parser.parse_known_args(take_config(argv)[1])[0]
    given = {
        each.name: getattr(words, each.name)
        for each in dataclasses.fields(RewardConfig)
        if each.init and getattr(words, each.name) != _default(each)
    }
    return Asked(plan, script, training, model, data, given)


def _default(each: dataclasses.Field) -> Any:
    return each.default if each.default_factory is dataclasses.MISSING else each.default_factory()


def pretend_devices(chips: int) -> None:
    """Let torch_xla have ``chips`` virtual devices, which compute nothing: the training's own checks count them.

    Raises:
        ValueError: torch_xla is not installed.
    """
    if importlib.util.find_spec("torch_xla") is None:
        raise ValueError(
            "Planning traces the training step with PyTorch/XLA, which is not installed: its wheels are for Linux on "
            "x86-64. There: pip install 'trl-tpu[tpu]'."
        )
    os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(chips), "USE_TORCH_XLA": "1"}
    settle()


def _chips(argv: list[str]) -> int:
    """Of the slice that is asked for; 1 where none is, since the parser will say so."""
    from trl_tpu.preflight.chips import parse_topology

    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--topology")
    values, words = take_config(argv)
    topology = finder.parse_known_args(words)[0].topology or values.get("topology")
    return parse_topology(topology).chips if topology else 1


def run(argv: list[str]) -> int:
    """The command ``trl-tpu plan``; returns the exit status."""
    pretend_devices(_chips(argv))
    asked = parse(make_parser(), argv)
    try:
        return main(asked)
    except RuntimeError as error:  # of the processes that trace and compile, which say what failed
        print(f"trl-tpu plan: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    from trl_tpu.cli import main as command

    raise SystemExit(command(["plan", *sys.argv[1:]]))
