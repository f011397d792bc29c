"""RewardConfig: TRL 1.16's fields and defaults, plus the mesh; what a device cannot honor is refused here."""

import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.utils import is_torch_bf16_gpu_available

from .. import runtime
from ..checkpoint.remote import is_url, staging_folder
from ..errors import UserError
from ..parallel.mesh import MeshShape, parse_mesh
from ..parallel.rules import Rules
from ..runtime import Remat
from ..training.stops import parse_duration
from .field_docs import with_field_docs
from .limits import check_choices, check_ranges, check_remat, check_xla_limits
from .packing_option import Packing


@with_field_docs
@dataclass
class RewardConfig(TrainingArguments):
    """Settings of a [`RewardTrainer`]: those of `trl.RewardConfig`, and those of the mesh, the rows and the saves.

    Only what is special to reward models is described here; everything else is
    [`~transformers.TrainingArguments`]'. `per_device_train_batch_size` counts pairs on each device of the mesh.

    Raises:
        UserError: For a mesh that the devices do not fill, and for settings that cannot be meant or that XLA cannot
            honor.
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]

    # defaults that differ from TrainingArguments', as in TRL
    learning_rate: float = field(default=1e-4, metadata={"help": "The initial learning rate for AdamW."})
    logging_steps: float = field(
        default=10,
        metadata={"help": "Log every this many steps; below 1, as a fraction of all training steps."},
    )
    gradient_checkpointing: bool = field(
        default=True, metadata={"help": "Recompute activations in the backward pass to save memory."}
    )
    bf16: bool | None = field(  # type: ignore[assignment]  # TRL's type: None is "not set" until __post_init__
        default=None,
        metadata={
            "help": "Compute matrix products in bfloat16 over float32 weights. Unset, it is on unless `fp16` is; on a "
            "CPU with plain torch, where it only costs, it is off."
        },
    )
    lr_scheduler_kwargs: dict | str | None = field(
        default=None, metadata={"help": "Extra parameters of the learning rate scheduler, such as {'num_cycles': 1}."}
    )
    # differs from TRL: transformers' default is a fused kernel, which XLA does not have
    optim: str = field(
        default="adamw_torch", metadata={"help": "The optimizer: a name of transformers' OptimizerNames."}
    )

    # the model
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Arguments of `AutoModelForSequenceClassification.from_pretrained`, when the trainer's `model` is "
            "a name; `dtype` defaults to float32. On a command line: JSON."
        },
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Whether models and tokenizers may bring their own Python code from the Hub."}
    )
    chat_template_path: str | None = field(
        default=None,
        metadata={"help": "A .jinja file, or a tokenizer's folder or Hub id, whose chat template to use."},
    )
    disable_dropout: bool = field(
        default=True, metadata={"help": "Whether to set every dropout probability of the model to 0."}
    )

    # the data
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Worker processes that tokenize."})
    eos_token: str | None = field(
        default=None, metadata={"help": "The end-of-sequence token; the tokenizer's own by default."}
    )
    max_length: int | None = field(
        default=1024,
        metadata={
            "help": "Pairs with a longer dialogue, in tokens, are left out, and counted in the log; nothing is "
            "truncated. None keeps all pairs."
        },
    )
    pad_to_multiple_of: int | str | None = field(
        default="auto",
        metadata={
            "help": "Round the lengths of padded batches up to a multiple of this. 'auto' does not round on plain "
            "torch; on XLA, where each length is compiled once, it pads to one of a few lengths that fit the data."
        },
    )

    # the training
    center_rewards_coefficient: float | None = field(
        default=None,
        metadata={
            "help": "Pulls rewards towards mean zero (https://huggingface.co/papers/2312.09244, eq. 2). Recommended "
            "value: 0.01."
        },
    )
    training_time_limit: str | None = field(
        default=None,
        metadata={
            "help": "How long train() may take: '2h30m', '1d' or '90m', for example. At the end of the step in which "
            "that is over, training saves a checkpoint, whatever save_strategy says, and stops; `trainer.stopped_by` "
            "and the checkpoint's trainer_state.json say so, and the command ends with status 75, which asks to be "
            "started again with resume_from_checkpoint. A SIGTERM does the same, and train() raises `Unfinished`."
        },
    )
    save_interval_minutes: float | None = field(
        default=None,
        metadata={
            "help": "Save also when this many minutes have passed since training began or last saved, whatever "
            "save_strategy says."
        },
    )
    nonfinite_limit: int = field(
        default=3,
        metadata={
            "help": "How many steps in a row may have a NaN or infinite loss or gradient before the run stops, at the "
            "next log, with the first of them named and its batch saved in output_dir. Such a step takes no update, "
            "is counted as `nonfinite` in the logs, and is no part of the logged loss. 0 neither skips nor stops. Not "
            "with fp16, whose loss scale skips steps by itself."
        },
    )
    activation_offloading: bool = field(
        default=False, metadata={"help": "Not supported; activations are recomputed instead."}
    )

    # the rows
    packing: str = field(  # or a bool
        default="auto",
        metadata={
            "help": "Whether to compute the tokens that a pair's two dialogues share, and those that pairs of a batch "
            "share, once: the same losses at a fraction of the work. 'auto' packs where that is exact and possible, "
            "and else says why not: causal decoders with a `score` head, TRL's own columns, collator and loss. true "
            "insists, false pads."
        },
    )
    row_length: int | None = field(
        default=None,
        metadata={
            "help": "The length of packed rows on XLA, at least the tokens of the largest pair; by default lengths "
            "are chosen from the data. Plain torch needs none."
        },
    )
    packed_attention: str = field(
        default="auto",
        metadata={
            "help": "How packed rows attend on XLA: 'masks' builds a mask for each query and key; 'expanded' moves "
            "queries, keys and values to rows of whole dialogues and runs a fused kernel there, which long rows need; "
            "'auto' expands on a TPU, where rows are of 2,048 tokens or more and the model allows it."
        },
    )
    max_shapes: int = field(
        default=4,
        metadata={"help": "How many shapes batches may have on XLA, packed or padded; each is compiled once."},
    )

    # the devices
    mesh: str = field(
        default="fsdp=-1",
        metadata={
            "help": "How the devices are arranged: axis sizes separated by commas, such as 'data=2,fsdp=4', -1 "
            "meaning what is left. fsdp splits weights and batch, data only the batch, tensor weights and the work on "
            "each row. TPU slices that a slower network joins are the outer part of data: 'slices=2', on its own "
            "found out by itself. With plain torch there is one device."
        },
    )
    sharding_plan: str | None = field(
        default=None,
        metadata={
            "help": "A YAML file of patterns of parameter names and the mesh axes that each dimension goes over, "
            "which overrules the model's own plan; '\"*\": auto' keeps the rest. See `trl_tpu.parallel.rules`."
        },
    )
    remat: str | None = field(
        default=None,
        metadata={
            "help": "What each layer's backward computes again, to save memory: 'full' all of the layer, which is "
            "what gradient_checkpointing means; 'dots' all but the matrix products, scores of attention masks among "
            "them, whose results are kept; 'none' nothing, which turns gradient_checkpointing off."
        },
    )
    scan_layers: bool = field(
        default=False,
        metadata={
            "help": "Whether to run the decoder's layers as a loop on XLA: the program holds one layer, and while "
            "training the layers' weights are held as one of each kind, so compiling takes as long for deep models as "
            "for shallow ones. The layers have to be all alike, remat 'full' or 'dots', and the optimizer one that "
            "updates each number on its own, such as Adam."
        },
    )
    output_url: str | None = field(
        default=None,
        metadata={
            "help": "Where checkpoints and the model are kept, on any file system of fsspec (gs://bucket/run); "
            "output_dir is then the folder through which they pass. A URL as output_dir means the same, with a folder "
            "below TMPDIR."
        },
    )

    # deprecated
    pad_token: str | None = field(
        default=None, metadata={"help": "Deprecated. Set the tokenizer's own `pad_token` instead."}
    )
    evaluation_strategy: str | None = field(default=None, metadata={"help": "Deprecated. Use `eval_strategy`."})

    def __post_init__(self) -> None:
        if self.output_dir is not None and is_url(self.output_dir):
            self.output_url, self.output_dir = self.output_dir, staging_folder(self.output_dir)
        self._take_old_names()
        self._fit_to_runtime()
        self.pad_to_multiple_of = _multiple(self.pad_to_multiple_of)
        self.packing = Packing.parse(self.packing)
        check_ranges(self)
        check_choices(self)
        if self.remat == Remat.NONE and not self.activation_checkpointing:
            self.gradient_checkpointing = False  # its True is only TRL's default
        with warnings.catch_warnings():
            # our own default is spelled the way TRL spells it
            warnings.filterwarnings(
                "ignore", message="`gradient_checkpointing.*` is deprecated", category=FutureWarning
            )
            super().__post_init__()
        check_remat(self)
        chosen = runtime.current()
        self.mesh_shape = parse_mesh(self.mesh, chosen.device_count(), chosen.slice_count())
        self.sharding_rules = None if self.sharding_plan is None else Rules.read(self.sharding_plan)

    def _take_old_names(self) -> None:
        if self.evaluation_strategy is not None:
            warnings.warn("`evaluation_strategy` is deprecated: use `eval_strategy`.", FutureWarning, stacklevel=4)
            self.eval_strategy = self.evaluation_strategy
        if self.pad_token is not None:
            warnings.warn(
                "`pad_token` is deprecated and will be removed in v2.0.0: set `tokenizer.pad_token` and pass the "
                "tokenizer as `processing_class`.",
                FutureWarning,
                stacklevel=4,
            )

    def _fit_to_runtime(self) -> None:
        """Start the runtime, before transformers looks for the device, and settle what depends on it."""
        chosen = runtime.current()
        chosen.start()
        if chosen.shares_mesh:
            check_xla_limits(self, chosen.process_count())
        if self.bf16 is None:
            can_compute_bf16 = chosen.compiles or self.use_cpu or is_torch_bf16_gpu_available()
            self.bf16 = can_compute_bf16 and not self.fp16

    @property
    def remat_policy(self) -> Remat:
        """What `remat` says, and where it says nothing `gradient_checkpointing`."""
        if self.remat is not None:
            return Remat.parse(self.remat)
        return Remat.FULL if self.activation_checkpointing else Remat.NONE

    @property
    def time_limit(self) -> timedelta | None:
        """After which `train()` saves and stops."""
        return None if self.training_time_limit is None else parse_duration(self.training_time_limit)

    @property
    def save_interval(self) -> timedelta | None:
        """After which to save again."""
        return None if self.save_interval_minutes is None else timedelta(minutes=self.save_interval_minutes)

    def __copy__(self) -> "RewardConfig":
        made = object.__new__(type(self))
        vars(made).update(vars(self))  # with the Hub's token, which `__getstate__` leaves out
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Without the Hub's token: `training_args.bin`, a pickle of this, is pushed beside the model."""
        return vars(self) | {"hub_token": None}

    @property
    def process_index(self) -> int:
        """Which host of the mesh this is. accelerate takes each for the only one, and all would write and push."""
        return runtime.current().process_index() if runtime.current().shares_mesh else super().process_index

    @property
    def local_process_index(self) -> int:
        """As `process_index` on XLA, so that one host logs for all."""
        return self.process_index if runtime.current().shares_mesh else super().local_process_index

    @property
    def should_save(self) -> bool:
        """Whether this process writes: the first, or with `save_on_each_node` that of every host."""
        return (runtime.current().shares_mesh and self.save_on_each_node) or super().should_save

    @property
    def train_batch_size(self) -> int:
        """Pairs in a training batch, over all devices of the mesh."""
        return self._over_mesh(self.per_device_train_batch_size, super().train_batch_size)

    @property
    def eval_batch_size(self) -> int:
        """Pairs in an evaluation batch, over all devices of the mesh."""
        return self._over_mesh(self.per_device_eval_batch_size, super().eval_batch_size)

    def _over_mesh(self, per_device: int, native: int) -> int:
        if not runtime.current().shares_mesh:
            return native
        shards = self.mesh_shape.batch_shards
        config = cast(AcceleratorConfig, self.accelerator_config)  # __post_init__ has read its other forms
        if not config.split_batches:
            return per_device * shards
        if per_device % shards:
            raise UserError(
                f"With split_batches the batch of {per_device} pairs is divided over the mesh {self.mesh_shape}, but "
                f"{per_device} / {shards} is no whole number. Choose a batch of "
                f"{per_device + -per_device % shards} pairs."
            )
        return per_device


def _multiple(value: int | str | None) -> int | None:
    if not isinstance(value, str):
        return value
    if value.lower() in ("auto", "none", "null"):
        return None
    if not value.isdecimal():
        raise UserError(f"pad_to_multiple_of must be 'auto' or a whole number of at least 1, got {value!r}.")
    return int(value)


__all__ = ["MeshShape", "RewardConfig"]
