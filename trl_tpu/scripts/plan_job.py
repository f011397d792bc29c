"""What ``trl-tpu plan`` does, once torch_xla has as many devices as the slice has chips."""

import dataclasses
import json
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset
from transformers import AutoConfig, AutoTokenizer

from trl_tpu.data.measure import pair_sizes, shared_prefix_length
from trl_tpu.errors import UserError
from trl_tpu.modeling.adapters import add_adapters, get_peft_config, without_adapters
from trl_tpu.preflight.case import (
    LONG_ROW,
    Case,
    Job,
)
from trl_tpu.preflight.chips import parse_topology
from trl_tpu.preflight.compile import CompiledProgram, compile_for, missing
from trl_tpu.preflight.depth import compile_deep, depth_note, two_depths, with_layers
from trl_tpu.preflight.lengths import PairLengths
from trl_tpu.preflight.model_shape import model_without_weights
from trl_tpu.preflight.needs import least_memory
from trl_tpu.preflight.plot import check_plot, plot_report
from trl_tpu.preflight.search import CompileStep, attempt, remedies, search
from trl_tpu.preflight.text import found_text, refusal_text, text_of
from trl_tpu.preflight.trace import StepRequest, trace_step
from trl_tpu.runtime import Remat
from trl_tpu.scripts.config_file import take_config
from trl_tpu.scripts.datafiles import pick_split
from trl_tpu.scripts.parser import TrlParser
from trl_tpu.scripts.plan import PlanArguments
from trl_tpu.scripts.reward import load_data, local_model, model_init_kwargs
from trl_tpu.scripts.utils import DatasetMixtureConfig, ScriptArguments
from trl_tpu.trainer.builders import RewardModel, build_dataset, build_reward_model
from trl_tpu.trainer.model_config import ModelConfig
from trl_tpu.trainer.packing_option import Packing
from trl_tpu.trainer.planned_shapes import attention_crossover_length
from trl_tpu.trainer.reward_config import RewardConfig

# what `remat` says already, see `RewardConfig`
_DECIDED_BY_REMAT = {"gradient_checkpointing", "activation_checkpointing"}


@dataclass(frozen=True)
class PlanRequest:
    """The parsed arguments; ``words`` are those of `RewardConfig` as they were given, before it has read them."""

    plan: PlanArguments
    script: ScriptArguments
    training: RewardConfig
    model: ModelConfig
    data: DatasetMixtureConfig
    words: dict[str, Any]


def make_parser() -> TrlParser:
    """The parser: the flags of ``trl-tpu reward`` and those of planning."""
    types = (PlanArguments, ScriptArguments, RewardConfig, ModelConfig, DatasetMixtureConfig)
    return TrlParser(types, prog="trl-tpu plan")


def parse(parser: TrlParser, argv: list[str]) -> PlanRequest:
    """The arguments, checked as the training would, for as many devices as the slice has chips.

    Raises:
        UserError: Unknown arguments, and what the training itself would refuse.
    """
    plan, script, training, model, data = parser.parse_args_and_config(argv)
    words = parser.parse_known_args(take_config(argv)[1])[0]
    names = [
        each.name for each in dataclasses.fields(RewardConfig) if each.init and each.name not in _DECIDED_BY_REMAT
    ]
    return PlanRequest(plan, script, training, model, data, {name: getattr(words, name) for name in names})


def main(request: PlanRequest, compile_step: CompileStep | None = None) -> int:
    """Plan, and print what was found.

    Args:
        compile_step: What compiles; by default the TPU's own compiler.

    Returns:
        The exit status: 0 if it fits, or of a search anything does, else 1.

    Raises:
        UserError: No model, a mesh that the slice or the model does not fit, several slices.
        RuntimeError: The compiler fails for another reason than memory.
    """
    plan, topology, mesh = request.plan, parse_topology(request.plan.topology), request.training.mesh_shape
    if mesh.slices > 1:
        raise UserError(f"mesh '{mesh}': {topology} is one slice. Plan for one slice; `data` goes over several.")
    if plan.plot is not None:
        check_plot(plan.plot)
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(request, folder)
    compile_step = _announced(compile_step or compiler(request, job))
    if plan.search:
        best = search(job, topology, compile_step, plan.compiles)
        print(json.dumps(best.as_json(), indent=2) if plan.json else found_text(best))
        return 0 if any(each.fits for each in best.attempts) else 1
    case = Case(job, topology, mesh, request.training.remat_policy, request.training.per_device_train_batch_size)
    first = attempt(case, compile_step)
    found = None if first.fits else remedies(job, topology, compile_step, plan.compiles)
    report = first.report
    if report is not None:
        pairs = pairs_to_train(request, case)
        report = dataclasses.replace(report, pairs_to_train=pairs, price_per_chip_hour=plan.price_per_chip_hour)
    if plan.json:
        said = report.as_json() if report is not None else first.as_json()
        print(json.dumps(said | {"tried": found and found.as_json()}, indent=2))
    else:
        print(text_of(report) if report is not None else refusal_text(first))
        if found is not None:
            print(f"\nWhat would fit:\n\n{found_text(found)}")
    if plan.plot is not None and report is not None:
        plot_report(report, plan.plot)
    return 0 if first.fits else 1


def pairs_to_train(request: PlanRequest, case: Case) -> float | None:
    """The pairs of all steps; None if neither their number nor a dataset is known."""
    args = request.training
    if args.max_steps > 0:
        return args.max_steps * case.pairs * case.job.accumulation
    pairs = request.plan.pairs_in_dataset or (len(case.job.lengths) if _has_data(request) else None)
    return pairs and pairs * args.num_train_epochs


def _announced(compile_step: CompileStep) -> CompileStep:
    """Say what is going on, apart from what is printed: programs take minutes to compile."""

    def say_and_compile(case: Case) -> CompiledProgram:
        print(f"Compiling for {case.topology}: {case} ...", file=sys.stderr, flush=True)
        return compile_step(case)

    return say_and_compile


# ---- what is trained


def job_of(request: PlanRequest, folder: str) -> Job:
    """The job that the arguments describe.

    Args:
        folder: Where a synthetic model may be made.

    Raises:
        UserError: No model, a stream, and what the trainer refuses in models and data.
    """
    if not request.model.model_name_or_path:
        raise UserError("Name a model with `--model_name_or_path`: a Hub id, or a folder with a config.json.")
    args, peft_config = request.training, get_peft_config(request.model)
    name = local_model(request.model.model_name_or_path, folder)
    kwargs = model_init_kwargs(request.model, args)
    loading = {key: kwargs[key] for key in ("revision", "trust_remote_code") if key in kwargs}
    config = AutoConfig.from_pretrained(name, **loading)
    dtype = kwargs.get("dtype") or "float32"
    model = model_without_weights(config, dtype if dtype != "auto" else config.dtype or "float32")
    shared_prefix = 0
    if _has_data(request):
        built = build_reward_model(model, args, AutoTokenizer.from_pretrained(name, **loading), None, peft_config)
        model = built.model
        lengths, shared_prefix = _lengths_of_data(request, built)
        basis = (
            f"Lengths of {len(lengths):,} pairs of the dataset: {lengths.sizes_P.mean():,.0f} unique tokens on "
            f"average, {lengths.sizes_P.max():,} at most. Compiled is the largest shape that they are packed in."
        )
    else:
        if peft_config is not None:
            model = add_adapters(model, peft_config, gradient_checkpointing=args.remat_policy != Remat.NONE)
        size = args.max_length + args.max_length // 2 if args.max_length else LONG_ROW  # half of a dialogue is prompt
        lengths = PairLengths.of_size(min(size, args.row_length or size))
        basis = (
            f"No data is named: every pair is taken to have {lengths.tokens:,} unique tokens, a third of them prompt."
        )
    depths = depths_of(request, config)
    return Job(
        model,
        lengths,
        (basis, *([] if depths is None else [depth_note(depths, config.num_hidden_layers)])),
        is_packed=args.packing != Packing.FALSE,
        packed_attention=args.packed_attention,
        row_settings={
            "max_shapes": args.max_shapes,
            "shared_prefix": shared_prefix,
            "attention_crossover_length": attention_crossover_length(config.get_text_config().hidden_size),
            "row_length": args.row_length,
        },
        rules=args.sharding_rules,
        compute_bytes=2 if args.bf16 else 4,
        optim=str(getattr(args.optim, "value", args.optim)),
        accumulation=args.gradient_accumulation_steps,
    )


def _has_data(request: PlanRequest) -> bool:
    return bool(request.script.dataset_name or request.data.datasets)


def _lengths_of_data(request: PlanRequest, built: RewardModel) -> tuple[PairLengths, int]:
    """The lengths of the named dataset's pairs, and how many first tokens all dialogues share."""
    what = "the mixture" if request.data.datasets else str(request.script.dataset_name)
    dataset = pick_split(load_data(request.script, request.data), request.script.dataset_train_split, what)
    if not isinstance(dataset, Dataset):
        raise UserError(f"{what} is a stream: its lengths are not known. Plan with --row_length instead.")
    tokens = build_dataset(dataset, built.model, built.processing_class, request.training, "train", False)
    names = ["chosen_ids", "rejected_ids"]
    chunks = [chunk for chunk in tokens.with_format("arrow", columns=names).iter(batch_size=10_000) if len(chunk)]
    sizes_P = np.concatenate([pair_sizes(*(chunk[name] for name in names)) for chunk in chunks]).astype(np.int64)
    chosen_P, rejected_P = (
        np.concatenate([pc.list_value_length(chunk[name]).to_numpy() for chunk in chunks]) for name in names
    )
    prefix_P = chosen_P + rejected_P - sizes_P
    shared_prefix = shared_prefix_length(chunk[name] for chunk in chunks for name in names)
    return PairLengths(prefix_P, chosen_P - prefix_P, rejected_P - prefix_P), shared_prefix


# ---- what compiles it


def depths_of(request: PlanRequest, config: Any) -> tuple[int, int] | None:
    """The depths that are compiled in the place of all layers; None compiles all."""
    return None if request.plan.all_layers or request.training.scan_layers else two_depths(config)


def compiler(request: PlanRequest, job: Job) -> CompileStep:
    """The trainer's own step, traced and given to the TPU's compiler.

    Raises:
        UserError: The compiler is not installed.
    """
    if (reason := missing()) is not None:
        raise UserError(reason)
    base = without_adapters(job.module)
    depths, layers = depths_of(request, base.config), base.config.num_hidden_layers

    def compile_step(case: Case) -> CompiledProgram:
        rows, length = case.shape

        def compile_layers(layers: int) -> CompiledProgram:
            changed = {
                "mesh": ",".join(f"{axis}={size}" for axis, size in case.mesh.sizes.items()),
                "remat": case.remat,
                "per_device_train_batch_size": case.pairs_per_part,
            }
            step = StepRequest(
                with_layers(base.config, layers),
                case.topology.chips,
                case.pairs,
                length,
                rows if job.is_packed else None,
                request.words | changed,
                get_peft_config(request.model),
                str(base.dtype).removeprefix("torch."),
            )
            return compile_for(trace_step(step), case.topology.compiled_as)

        if depths is None:
            return compile_layers(layers)
        return compile_deep(compile_layers, depths, layers, least_memory(case).bound)

    return compile_step
