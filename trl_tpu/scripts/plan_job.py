"""From the arguments of ``trl-tpu plan`` to the job that is planned, and to what compiles it."""

from math import ceil
from typing import Any

from datasets import Dataset
from transformers import AutoConfig

from trl_tpu.batching.batch_plan import LONG_ROW
from trl_tpu.batching.planned_shapes import attention_crossover_length
from trl_tpu.config.packing_option import Packing
from trl_tpu.data.measure import measure
from trl_tpu.errors import UserError
from trl_tpu.modeling import broken
from trl_tpu.modeling.adapters import add_adapters, get_peft_config, without_adapters
from trl_tpu.modeling.build import build_dataset
from trl_tpu.modeling.chat_template import set_chat_template
from trl_tpu.modeling.load import load_tokenizer
from trl_tpu.modeling.model_shape import model_without_weights
from trl_tpu.modeling.special_tokens import set_eos_token, set_pad_token
from trl_tpu.packing.lengths import PairLengths
from trl_tpu.packing.shapes import round_up
from trl_tpu.plan.case import Case, Job
from trl_tpu.plan.compile import CompiledProgram, compile_for, missing
from trl_tpu.plan.depth import compile_deep, depth_note, two_depths, with_layers
from trl_tpu.plan.needs import least_memory
from trl_tpu.plan.search import CompileStep
from trl_tpu.plan.trace import StepRequest, trace_step
from trl_tpu.runtime import Remat
from trl_tpu.scripts.datafiles import pick_split
from trl_tpu.scripts.plan_request import PlanRequest
from trl_tpu.scripts.reward import load_data, local_model, model_init_kwargs


def job_of(request: PlanRequest, folder: str) -> Job:
    """The job that the arguments describe.

    Args:
        folder: Where a synthetic model may be made.

    Raises:
        UserError: No model, a stream, rows that the mesh does not divide, and what the trainer refuses in models and
            data.
    """
    if not request.model.model_name_or_path:
        raise UserError("Name a model with `--model_name_or_path`: a Hub id, or a folder with a config.json.")
    args, peft_config = request.training, get_peft_config(request.model)
    name = local_model(request.model.model_name_or_path, folder)
    kwargs = model_init_kwargs(request.model, args)
    loading = {key: kwargs[key] for key in ("revision", "trust_remote_code") if key in kwargs}
    with broken.explaining(name):
        config = AutoConfig.from_pretrained(name, **loading)
    dtype = kwargs.get("dtype") or "float32"
    model = model_without_weights(config, dtype if dtype != "auto" else config.dtype or "float32")
    if request.plan.rows is not None and (has_data(request) or args.packing == Packing.FALSE):
        raise UserError(
            "`rows` is how many packed rows a batch of made-up pairs has. Leave it out: with a dataset its pairs are "
            "packed, and without packing a dialogue is a row."
        )
    rows = {
        "max_shapes": args.max_shapes,
        "attention_crossover_length": attention_crossover_length(config.get_text_config().hidden_size),
        "row_length": args.row_length,
    }
    if has_data(request):
        tokenizer = load_tokenizer(name, **loading)
        lengths, rows["shared_prefix"] = _lengths_of_data(request, model, tokenizer)
        basis = (
            f"Lengths of {len(lengths):,} pairs of the dataset: {lengths.sizes_P.mean():,.0f} unique tokens on "
            f"average, {lengths.sizes_P.max():,} at most. Compiled is the largest of the shapes that they are packed "
            "in."
        )
    else:
        lengths, rows["row_length"], basis = _made_up_lengths(request)
    if peft_config is not None:
        model = add_adapters(model, peft_config, gradient_checkpointing=args.remat_policy != Remat.NONE)
    depths = depths_of(request, config)
    return Job(
        model,
        lengths,
        basis,
        () if depths is None else (depth_note(depths, config.num_hidden_layers),),
        is_packed=args.packing != Packing.FALSE,
        packed_attention=args.packed_attention,
        row_settings=rows,
        rules=args.sharding_rules,
        compute_bytes=2 if args.bf16 else 4,
        optim=str(getattr(args.optim, "value", args.optim)),
        accumulation=args.gradient_accumulation_steps,
    )


def has_data(request: PlanRequest) -> bool:
    return bool(request.script.dataset_name or request.data.datasets)


def _made_up_lengths(request: PlanRequest) -> tuple[PairLengths, int, str]:
    """A pair that stands for all, how long rows are, and this in words. Packed rows are full of as many as fit.

    Raises:
        UserError: `rows` do not go over the mesh.
    """
    args, rows, parts = request.training, request.plan.rows, request.training.mesh_shape.batch_shards
    if args.packing == Packing.FALSE:
        length = args.row_length or args.max_length or LONG_ROW
        answer = max(1, length // 4)
        basis = (
            f"Without packing, every dialogue is taken to have {length:,} tokens, three quarters of them prompt. "
            "The prompt is computed twice, but needed once."
        )
        return PairLengths.of([(length - answer, answer, answer)]), length, basis
    usual = args.max_length + args.max_length // 2 if args.max_length else LONG_ROW  # half of a dialogue is prompt
    length = args.row_length or int(round_up(usual, 128))
    if rows is not None and rows % parts:
        raise UserError(
            f"rows={rows} go over {parts} parts of the mesh '{args.mesh_shape}', but {rows} / {parts} is no whole "
            f"number. Choose a multiple of {parts}."
        )
    in_a_row = max(1, length // usual) if rows is None else ceil(args.per_device_train_batch_size * parts / rows)
    size = length // in_a_row
    basis = (
        f"No data is named: every pair is taken to have {size:,} unique tokens, half of them prompt and a quarter in "
        "each answer, and rows to be full."
    )
    return PairLengths.of_size(size), length, basis


def _lengths_of_data(request: PlanRequest, model: Any, tokenizer: Any) -> tuple[PairLengths, int]:
    """The lengths of the named dataset's pairs, and how many first tokens all dialogues share.

    Raises:
        UserError: A stream, and what the trainer refuses in data.
    """
    args = request.training
    what = "the mixture" if request.data.datasets else str(request.script.dataset_name)
    dataset = pick_split(load_data(request.script, request.data), request.script.dataset_train_split, what)
    if not isinstance(dataset, Dataset):
        raise UserError(f"{what} is a stream: its lengths are not known. Plan with --row_length instead.")
    tokenizer = set_eos_token(model, tokenizer, args.eos_token)
    _, tokenizer, _ = set_chat_template(model, tokenizer, args.chat_template_path)
    tokenizer = set_pad_token(model, tokenizer, args.pad_token, own=args.own_pad_token)
    measured = measure(build_dataset(dataset, model, tokenizer, args, "train", False))
    return measured.lengths, measured.shared_prefix


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
