"""From the arguments of ``trl-tpu plan`` to the job that is planned, and to what compiles it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from trl_tpu.data.measure import pair_sizes, shared_prefix_length
from trl_tpu.data.tokenize import prepare_preference_dataset
from trl_tpu.errors import UserError
from trl_tpu.modeling.adapters import add_adapters, get_peft_config, without_adapters
from trl_tpu.modeling.chat_template import set_chat_template
from trl_tpu.modeling.load import set_eos_token, set_pad_token
from trl_tpu.packing.shapes import round_up
from trl_tpu.preflight.case import Case
from trl_tpu.preflight.depth import compile_deep, depth_note, two_depths, with_layers
from trl_tpu.preflight.job import LONG_ROW, Batching, DataRows, FullRows, Job, PaddedRows, attends_by_kernel
from trl_tpu.preflight.lengths import PairLengths
from trl_tpu.preflight.memory import least_memory
from trl_tpu.preflight.program import CompiledProgram
from trl_tpu.preflight.search import CompileStep
from trl_tpu.scripts.datafiles import pick_split
from trl_tpu.scripts.reward import load_data, local_model, model_init_kwargs
from trl_tpu.trainer.planned_shapes import attention_crossover_length

if TYPE_CHECKING:
    from trl_tpu.scripts.plan import Asked

# what `remat` says already, see `RewardConfig`
DECIDED_BY_REMAT = ("gradient_checkpointing", "activation_checkpointing")


def job_of(asked: "Asked", folder: str) -> tuple[Job, int | None]:
    """The job, and how many pairs its dataset has, if one is named.

    Args:
        folder: Where a synthetic model may be made.

    Raises:
        UserError: No model, or rows that the mesh does not divide.
    """
    if not asked.model.model_name_or_path:
        raise UserError("Name a model with `--model_name_or_path`: a Hub id, or a folder with a config.json.")
    args = asked.training
    name = local_model(asked.model.model_name_or_path, folder)
    kwargs = model_init_kwargs(asked.model, args)
    model = model_without_weights(name, kwargs)
    batching: Batching
    if asked.script.dataset_name or asked.data.datasets:
        batching = rows_of_data(asked, model, name, kwargs)
    else:
        batching = made_up_rows(asked)
    peft_config = get_peft_config(asked.model)
    if peft_config is not None:
        model = add_adapters(model, peft_config, gradient_checkpointing=args.remat_policy != "none")
    config = without_adapters(model).config
    depths = depths_of(asked, config)
    notes = [] if depths is None else [depth_note(depths, config.num_hidden_layers)]
    parts = args.mesh_shape.batch_shards
    _, length = batching.rows(args.per_device_train_batch_size * parts, parts)
    job = Job(
        model,
        batching,
        args.sharding_rules,
        compute_bytes=2 if args.bf16 else 4,
        optim=str(getattr(args.optim, "value", args.optim)),
        accumulation=args.gradient_accumulation_steps,
        masks=args.packing == "false" or not attends_by_kernel(args.packed_attention, length),
        notes=tuple(notes),
    )
    return job, len(batching.pairs) if isinstance(batching, DataRows) else None


def model_without_weights(name: str, kwargs: Mapping[str, Any]) -> Any:
    """A reward model on torch's meta device: its config is all that is read.

    Args:
        kwargs: As for ``from_pretrained``.
    """
    loading = {key: kwargs[key] for key in ("revision", "trust_remote_code") if key in kwargs}
    config = AutoConfig.from_pretrained(name, **loading)
    config.num_labels = 1
    dtype = kwargs.get("dtype") or "float32"
    if isinstance(dtype, str):
        dtype = getattr(config, "dtype", None) or torch.float32 if dtype == "auto" else getattr(torch, dtype)
    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(config, dtype=dtype)


def made_up_rows(asked: "Asked") -> FullRows | PaddedRows:
    """Full rows: `rows` of them of `row_length`, or as many as hold pairs of two dialogues of `max_length`.

    Raises:
        UserError: `rows` do not go over the mesh.
    """
    args, parts = asked.training, asked.training.mesh_shape.batch_shards
    if args.packing == "false":
        return PaddedRows(args.row_length or args.max_length or LONG_ROW)
    usual = args.max_length + args.max_length // 2 if args.max_length else LONG_ROW  # half of a dialogue is prompt
    length = args.row_length or int(round_up(usual, 128))
    if asked.plan.rows is None:
        return FullRows(length, max(1, length // usual))
    if asked.plan.rows % parts:
        raise UserError(
            f"rows={asked.plan.rows} go over {parts} parts of the mesh '{args.mesh_shape}', but "
            f"{asked.plan.rows} / {parts} is no whole number. Choose a multiple of {parts}."
        )
    return FullRows(length, args.per_device_train_batch_size * parts / asked.plan.rows)


def rows_of_data(asked: "Asked", model: Any, name: str, kwargs: Mapping[str, Any]) -> DataRows:
    """The rows that the trainer plans for the named dataset.

    Raises:
        UserError: A stream, and what the trainer refuses in data.
    """
    args = asked.training
    what = "the mixture" if asked.data.datasets else str(asked.script.dataset_name)
    dataset = pick_split(load_data(asked.script, asked.data), asked.script.dataset_train_split, what)
    if not isinstance(dataset, Dataset):
        raise UserError(f"{what} is a stream: its lengths are not known. Plan with --row_length instead.")
    loading = {key: kwargs[key] for key in ("revision", "trust_remote_code") if key in kwargs}
    tokenizer = set_eos_token(model, AutoTokenizer.from_pretrained(name, **loading), args.eos_token)
    _, tokenizer, _ = set_chat_template(model, tokenizer, args.chat_template_path)
    tokenizer = set_pad_token(model, tokenizer, args.pad_token)
    tokens = prepare_preference_dataset(
        dataset,
        tokenizer,
        num_embeddings=model.get_input_embeddings().weight.shape[0],
        max_length=args.max_length,
        num_proc=args.dataset_num_proc,
        name="train",
    )
    pairs, shared_prefix = lengths_of(tokens)
    settings = {
        "max_shapes": args.max_shapes,
        "shared_prefix": shared_prefix,
        "attention_crossover_length": attention_crossover_length(model.config.get_text_config().hidden_size),
        "row_length": args.row_length,
    }
    return DataRows(pairs, settings, args.packed_attention)


def lengths_of(tokens: Any) -> tuple[PairLengths, int]:
    """The lengths of tokenized pairs, and how many first tokens all dialogues share."""
    names = ["chosen_ids", "rejected_ids"]
    chunks = [chunk for chunk in tokens.with_format("arrow", columns=names).iter(batch_size=10_000) if len(chunk)]
    sizes_P = np.concatenate([pair_sizes(*(chunk[name] for name in names)) for chunk in chunks])
    chosen_P, rejected_P = (
        np.concatenate([pc.list_value_length(chunk[name]).to_numpy() for chunk in chunks]) for name in names
    )
    prefix_P = chosen_P + rejected_P - sizes_P
    shared_prefix = shared_prefix_length(chunk[name] for chunk in chunks for name in names)
    return PairLengths(prefix_P, chosen_P - prefix_P, rejected_P - prefix_P), shared_prefix


def depths_of(asked: "Asked", config: Any) -> tuple[int, int] | None:
    """The depths that are compiled in the place of all layers; None compiles all."""
    return None if asked.plan.all_layers or asked.training.scan_layers else two_depths(config)


def compiler(asked: "Asked", job: Job) -> CompileStep:
    """The trainer's own step, traced and given to the TPU's compiler."""
    from trl_tpu.preflight.compile import compile_for, missing
    from trl_tpu.preflight.trace import Rows, StepRequest, trace_step

    if (reason := missing()) is not None:
        raise UserError(reason)
    config, dtype = without_adapters(job.model).config, str(without_adapters(job.model).dtype).removeprefix("torch.")
    depths = depths_of(asked, config)
    peft_config = get_peft_config(asked.model)

    def compile_step(case: Case) -> CompiledProgram:
        sizes = ",".join(f"{axis}={size}" for axis, size in case.mesh.sizes.items())
        changed = {
            "mesh": sizes,
            "remat": case.remat,
            "per_device_train_batch_size": case.pairs // case.mesh.batch_shards,
        }
        kept = {name: value for name, value in asked.given.items() if name not in DECIDED_BY_REMAT}
        padded = isinstance(job.batching, PaddedRows)
        rows = Rows(case.pairs, case.length, None if padded else case.rows)

        def compile_layers(layers: int) -> CompiledProgram:
            model = with_layers(config, layers)
            request = StepRequest(model, case.topology.chips, rows, kept | changed, peft_config, dtype=dtype)
            return compile_for(trace_step(request), case.topology.compiled_as)

        if depths is None:
            return compile_layers(config.num_hidden_layers)
        return compile_deep(compile_layers, depths, config.num_hidden_layers, least_memory(case).bound)

    return compile_step
