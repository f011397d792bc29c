"""Build the trainer's inputs: a reward model with its tokenizer, and datasets of tokenized rows."""

import copy
import logging
import math
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import runtime
from ..compat.old_trl import OLD_NAMES, OldPairs, with_current_names
from ..config.checks import unused_settings
from ..config.reward_config import RewardConfig
from ..data.checks import OLD_KEYS, column_names
from ..data.formats import convert_row
from ..data.kinds import Pairs, RowKind, answers_of, kinds_for
from ..data.kinds.solutions import tokenize_solution
from ..data.length_stats import is_prepared
from ..data.tokenize import prepare_preference_dataset
from ..errors import UserError, UserTypeError
from ..parallel.shard import of_first_process, place_model, plan_model
from . import adapters, head_spec, load
from .head_spec import HeadSpec, is_peft_model, without_adapters
from .heads import remove_offload_hooks
from .model_shape import learned_positions

logger = logging.getLogger(__name__)

_SAMPLED_ANSWERS = 100  # answers whose last tokens are checked before training


def default_folder(model: Any) -> str:
    """Name the folder that a trainer without `args` writes to: ``{model name}-Reward``, as in TRL."""
    name = model if isinstance(model, str) else load.get_config_model_id(getattr(model, "config", None))
    return "-".join(part for part in (name.rstrip("/").split("/")[-1], "Reward") if part)


def check_arguments(model: Any, model_init: Any, train_dataset: Any) -> None:
    """Reject trainer arguments that are missing or exclude each other.

    Raises:
        UserTypeError: `train_dataset` is missing, or several datasets.
        UserError: Not exactly one of `model` and `model_init` is given.
    """
    if (model is None) == (model_init is None):
        raise UserError("The trainer needs either `model` or `model_init`, and not both.")
    if train_dataset is None:
        raise UserTypeError("`train_dataset` is required: pass a `Dataset` or `IterableDataset`.")
    if not isinstance(train_dataset, Dataset | IterableDataset):
        kind = type(train_dataset).__name__
        raise UserTypeError(f"`train_dataset` must be a `Dataset` or `IterableDataset`, got `{kind}`.")


def build_reward_model(
    model: Any,
    args: RewardConfig,
    processing_class: PreTrainedTokenizerBase | None = None,
    quantization_config: Any | None = None,
    peft_config: Any | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load or check the model, set its special tokens and chat template, and add adapters.

    The order matters: the caller sets the seed; then come model, tokenizer, adapters, frozen parameters and dropout.

    Returns:
        The model, with its head specification in its config, and a tokenizer with the same special tokens.

    Raises:
        UserError, ImportError: A step failed. The message says what to do.
    """
    outputs = HeadSpec.for_settings(args)
    files: dict[str, Any] = {"trust_remote_code": args.trust_remote_code}
    name, in_files = model, False
    if isinstance(peft_config, Mapping):
        peft_config = adapters.read_peft_config(peft_config, outputs)
    if isinstance(name, str):
        init_kwargs: Any = args.model_init_kwargs or {}  # a dict: the config has parsed text
        kwargs = files | init_kwargs
        where = head_spec.hub_settings(kwargs)
        files = where | {"trust_remote_code": kwargs["trust_remote_code"]}
        if quantization_config is not None:
            if "quantization_config" in kwargs:
                raise UserError("`quantization_config` is set twice, as an argument and in `model_init_kwargs`.")
            kwargs["quantization_config"] = quantization_config
        # On an SPMD mesh, weights go straight from their files to their shards, unless adapters need them on the host.
        in_files = runtime.current().is_spmd and not adapters.reads_base_weights(peft_config)
        # Process 0 sends the others their shards, so that a host holds one copy. With a `tensor` axis all load: torch
        # splits the rows of a weight over two axes only from a whole weight.
        is_sharded = args.shards_over_processes and not kwargs.keys() & {"distributed_config", "quantization_config"}
        receives = is_sharded and args.process_index > 0 and args.mesh_shape.tensor == 1
        if receives and not adapters.reads_base_weights(peft_config):
            kwargs["device_map"] = "meta"
        mesh = args.mesh_shape if is_sharded else None
        model = load.load_model(name, outputs, in_files=in_files, mesh=mesh, **kwargs)
        if is_peft_model(model):  # `name` is a folder of saved adapters, possibly with a tokenizer
            in_files = False
            if processing_class is None and head_spec.find_file(name, "tokenizer_config.json", **where):
                processing_class = load.load_tokenizer(name, **files)
    else:
        ignored = {"model_init_kwargs": args.model_init_kwargs, "quantization_config": quantization_config}
        for setting, value in ignored.items():
            if value is not None:
                logger.warning(f"`{setting}` is ignored, since `model` is already instantiated.")
        if getattr(model, "_hf_peft_config_loaded", False):
            raise UserError(
                "Checkpoints do not support adapters that transformers added to a model (`add_adapter`). Pass "
                "`peft_config`, or the name of the folder of adapters as `model`."
            )
    base = without_adapters(model)
    head_spec.check_num_labels(base, outputs)
    if is_peft_model(model):  # adapters of earlier versions have the weights in their base's config only
        saved = HeadSpec.saved(name).attributes if isinstance(name, str) else {}
        if attribute_weights := adapters.read_attribute_weights(model) or saved:
            head_spec.write_head_spec(base.config, HeadSpec(attribute_weights))
    head_spec.write_head_spec(base.config, outputs, keeps_weights=args.attribute_weights is None)
    tokenizer = load.load_processing_class(model, processing_class, **files)
    tokenizer, added_tokens = load.set_special_tokens(model, tokenizer, args)
    unread: list[str] = []
    if not args.train_unread_towers:
        find = partial(load.unread_towers, base)
        unread = find() if in_files else of_first_process(find, base, args.shards_over_processes) or []
        load.freeze_towers(base, unread)
    if in_files:  # before the adapters: peft puts them on the device of the base weights
        place_model(model, plan_model(model, args.mesh_shape, args.sharding_rules), runtime.current(), args.device)
        remove_offload_hooks(model)
    if peft_config is not None:
        model = adapters.add_adapters(model, peft_config, added_tokens, excluded=unread)
    if is_peft_model(model):
        adapters.prepare_adapters(model, gradient_checkpointing=bool(args.activation_checkpointing))
        adapters.write_attribute_weights(model, HeadSpec.of(base.config).attributes)
        adapters.warn_if_head_is_frozen(model)
    load.freeze(model, args.frozen_parameters)
    if args.disable_dropout:
        load.disable_dropout_in_model(model)
    head_spec.set_inference_metadata(base.config)
    if args.shards_over_processes:  # only process 0 has drawn new weights
        torch.set_rng_state(of_first_process(torch.get_rng_state, base, shares=True))
    return model, tokenizer


def with_attribute_order(model: Any, args: RewardConfig) -> RewardConfig:
    """Return ``args`` with attributes in the order of the model's outputs."""
    names, order = args.attributes or [], [*HeadSpec.of(without_adapters(model).config).attributes]
    if order != names:
        args, places = copy.copy(args), [names.index(name) for name in order]
        for name in ("attributes", "attribute_weights", "attribute_loss_weights"):
            values = getattr(args, name)
            setattr(args, name, values and [values[place] for place in places])
    return args


def build_dataset(
    dataset: Any,
    model: PreTrainedModel,
    processing_class: PreTrainedTokenizerBase,
    args: RewardConfig,
    name: str,
    old_columns: bool = False,
    tokenize_row: Any = tokenize_solution,
) -> Any:
    """Convert a dataset in any accepted format to prepared rows for ``model``.

    Raises:
        UserError: The data cannot be trained on. The message names the dataset, the row and the fix.
    """

    def with_settings(kind: RowKind) -> RowKind:
        if unused := unused_settings(args, kind.name):
            raise UserError(
                f"{', '.join(unused)}: only rankings use these settings, and the {name} dataset has {kind.name}. "
                "Leave them out, or give `completions` with `scores` or `ranks`."
            )
        return kind.of(args, is_eval=name != "train", tokenize_row=tokenize_row)

    embeddings: Any = model.get_input_embeddings()
    columns = set(column_names(dataset, name))
    if columns >= {*OLD_NAMES} and not columns >= {*Pairs.columns}:
        dataset = with_current_names(dataset)
    kinds: Any = kinds_for(args)
    if (old_columns or columns & {*OLD_KEYS}) and not args.attributes:  # TRL's old columns hold no attribute grades
        kinds = (OldPairs(processing_class),)
    return prepare_preference_dataset(
        dataset,
        processing_class,
        num_embeddings=embeddings.weight.shape[0],
        num_positions=learned_positions(model) or math.inf,
        max_length=args.max_length,
        truncation_mode=args.truncation_mode,
        num_proc=args.dataset_num_proc,
        name=name,
        kinds=kinds,
        with_settings=with_settings,
    )


def warn_of_unscored_eos(tokenizer: PreTrainedTokenizerBase, rows: Any) -> None:
    """Warn if the pad token is the eos token, and answers of the first rows end in it, or are in a stream."""
    eos = tokenizer.eos_token_id
    if tokenizer.pad_token_id != eos:
        return
    if not is_prepared(rows) or any(list(answers_of(row)[0][-1:]) == [eos] for row in islice(rows, _SAMPLED_ANSWERS)):
        logger.warning(
            f"The pad token is the eos token ({tokenizer.eos_token!r}), and sequences end in it: training scores the "
            "token before it, as TRL and transformers do. Servers that score the very last token (vLLM, SGLang) "
            "give other rewards. Set own_pad_token=True to pad with another token."
        )


def first_chat(dataset: Any) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Yield the first row's chosen conversation and the row, if the row holds messages. Reads at most one row."""
    for row, _ in map(convert_row, islice(dataset, 1)):
        prompt, answer = row.get("prompt") or [], row.get("chosen") or next(iter(row.get("completions") or ()), None)
        if isinstance(answer, list) and isinstance(prompt, list):
            yield prompt + answer, row
