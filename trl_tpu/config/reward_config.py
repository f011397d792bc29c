"""`RewardConfig`: the settings of a training run."""

import copy
import dataclasses
import inspect
import re
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, cast, dataclass_transform

from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import SchedulerType

from .. import runtime
from ..compat.arguments import REMOVED, RemovedArguments, apply_removed_arguments
from ..errors import UserError
from ..parallel.mesh import Rules, parse_mesh
from ..runtime import Remat
from . import checks
from .launchers import apply_fsdp, launched_mesh, without_fsdp

T = TypeVar("T")


@dataclass_transform(field_specifiers=(dataclasses.field,))
def dataclass_with_help(cls: type[T]) -> type[T]:
    """Make a dataclass, and set the ``help`` of each field it declares to the field's entry in the class docstring."""
    docstring = inspect.cleandoc(cls.__doc__ or "")
    for field in dataclasses.fields(dataclasses.dataclass(cls)):  # type: ignore[arg-type]  # a dataclass
        entry = re.search(rf"^ {{4}}{field.name}(?: \(.*\))?:(.*(?:\n {{8}}.*)*)", docstring, re.MULTILINE)
        if entry and field.name in cls.__annotations__:
            text = " ".join(entry[1].split()).replace("%", "%%")  # argparse applies % formatting
            field.metadata = MappingProxyType({**field.metadata, "help": text})
    return cls


REWARD_METRICS = ("min_reward", "mean_reward", "max_reward", "accuracy", "margin", "tie_rate")
#: Metrics of a verdict that need pairs with longer chosen answers and pairs with shorter ones.
LENGTH_METRICS = ("length_only_accuracy", "length_controlled_accuracy")
#: Metrics that improve as they decrease.
ERRORS = ("ece", "brier", "squared_error")
#: Metrics of every evaluation. The second line has those of a verdict, and transformers computes the last three.
METRICS = (
    *("loss", "num_tokens", *REWARD_METRICS),
    *("accuracy_low", "accuracy_high", "ece", "brier", "runtime", "samples_per_second", "steps_per_second"),
)


#: Temporary folders that exist until the process exits.
_TEMPORARY_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def is_url(folder: str) -> bool:
    """Return whether ``folder`` is a URL and not a local path."""
    return "://" in folder


def private_folder(url: str) -> str:
    """Make a local folder for files on their way to or from ``url``.

    The folder is below TMPDIR, private to this process, and removed when the process exits.
    """
    _TEMPORARY_FOLDERS.append(tempfile.TemporaryDirectory(prefix="trl-tpu-", ignore_cleanup_errors=True))
    folder = Path(_TEMPORARY_FOLDERS[-1].name, url.rstrip("/").rpartition("/")[2])
    folder.mkdir(exist_ok=True)
    return str(folder)


#: For each schedule that ends at 0: transformers' schedule with a final learning rate, and that rate's argument.
_SCHEDULES_WITH_FINAL_RATE = {
    SchedulerType.LINEAR: (SchedulerType.POLYNOMIAL, "lr_end"),  # its default power of 1 is linear
    SchedulerType.COSINE: (SchedulerType.COSINE_WITH_MIN_LR, "min_lr"),
}


@dataclass_with_help
class RewardConfig(RemovedArguments, TrainingArguments):
    r"""Settings of a [`RewardTrainer`]: TRL's `RewardConfig`, plus settings for devices, batch layout and checkpoints.

    Only settings with a special meaning or default for reward models are described here. For all others, see
    [`~transformers.TrainingArguments`].

    Parameters:
        learning_rate (`float`, *optional*, defaults to `1e-4`):
            Initial learning rate for AdamW.
        logging_steps (`float`, *optional*, defaults to `10`):
            Number of steps between two logs. A value below 1 is a fraction of all training steps.
        gradient_checkpointing (`bool`, *optional*, defaults to `True`):
            Whether to recompute activations in the backward pass to save memory.
        bf16 (`bool`, *optional*):
            Whether to compute matrix products in bfloat16 over float32 weights. By default on, unless `fp16` is on. By
            default off on a CPU with plain torch, since bfloat16 only adds cost there. `use_cpu` turns it on, as in
            TRL.
        lr_scheduler_kwargs (`dict` or `str`, *optional*):
            Extra arguments for the learning rate scheduler, such as {'num_cycles': 1}.
        optim_state_dtype (`str`, *optional*):
            `"bfloat16"` stores Adam's first moments in bfloat16 between steps. This saves 2 bytes per trained float32
            parameter. Updates are still computed in the type of the weights. Second moments always have the type of
            the weights, because bfloat16 would round away their small changes. By default first moments have that type
            too.

        model_init_kwargs (`dict[str, Any]`, *optional*):
            Keyword arguments for `AutoModelForSequenceClassification.from_pretrained`, used when the trainer's `model`
            is a name. `dtype` defaults to float32. On the command line, write a JSON object.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Whether to allow models and tokenizers that define their own Python code on the Hub.
        chat_template_path (`str`, *optional*):
            Source of the chat template: a `.jinja` file, or a tokenizer's folder or Hub id. By default the tokenizer's
            own template is used.
        disable_dropout (`bool`, *optional*, defaults to `True`):
            Whether to set all dropout probabilities to 0.
        frozen_parameters (`str`, *optional*):
            Regular expression, such as `"embed_tokens|norm"`, for the parameters to freeze: those with a match
            anywhere in their name, adapter parameters included. Frozen parameters are saved like all others. By
            default this setting freezes nothing.
        train_unread_towers (`bool`, *optional*, defaults to `False`):
            Whether to train the parts of a multimodal model that text does not reach, such as its vision tower, and
            to add adapters to them. By default they are frozen, and saved unchanged.

        dataset_num_proc (`int`, *optional*):
            Number of worker processes for tokenization.
        eos_token (`str`, *optional*):
            End-of-sequence token. By default the tokenizer's own.
        max_length (`int`, *optional*, defaults to `1024`):
            Maximum length of a sequence in tokens. Rows with a longer sequence are dropped, and counted in the log,
            unless `truncation_mode` is set. `None` keeps all rows.
        truncation_mode (`str`, *optional*):
            How to truncate sequences to `max_length` tokens, with the names of `trl.DPOConfig`. `"keep_start"` removes
            tokens at the end, including the end-of-sequence token. `"keep_end"` removes tokens at the start, the same
            number from all sequences of a row. A row is dropped if truncation would empty a sequence, or make all
            equal. The log counts truncated and dropped rows. By default nothing is truncated. `trl-tpu score` never
            truncates: sequences above its `--max_length` get no reward.
        own_pad_token (`bool`, *optional*, defaults to `False`):
            Whether to choose a separate pad token if the pad token would be the end-of-sequence token. The choice is a
            token that the vocabulary reserves, or else a new one. A reward is read at the last non-padding token. With
            a separate pad token, this is the end-of-sequence token. Servers that read the very last token then return
            the same reward. By default the end-of-sequence token is also the pad token, as in TRL.
        pad_to_multiple_of (`int` or `str`, *optional*, defaults to `"auto"`):
            Round the lengths of padded batches up to a multiple of this number. `"auto"` does not round on plain
            torch. On XLA each length is compiled once, so `"auto"` pads batches to one of a few lengths chosen from
            the data.

        per_device_train_batch_size (`int`, *optional*, defaults to `8`):
            Number of rows in a training batch per device of the mesh.
        total_batch_size (`int`, *optional*):
            Number of rows per update, over all devices, processes and accumulated batches: the same on any number of
            chips. It sets `per_device_train_batch_size`, or `gradient_accumulation_steps` if
            `per_device_train_batch_size` is given. By default these two settings determine it.
        learning_rate_end (`float`, *optional*):
            Final learning rate of a `"linear"` or `"cosine"` schedule. By default 0. For other schedules, use
            `lr_scheduler_kwargs`.
        center_rewards_coefficient (`float`, *optional*):
            Coefficient of a loss term that pulls rewards towards mean zero (https://huggingface.co/papers/2312.09244,
            eq. 2); 0.01 is recommended. By default the term is left out.
        loss_type (`str`, *optional*, defaults to `"sigmoid"`):
            Loss of rankings. `"sigmoid"` is the mean pairwise loss over all comparisons of a prompt's answers
            (https://huggingface.co/papers/2203.02155). `"plackett_luce"` is the negative log-likelihood of their whole
            order. `"regression"` is the squared error between rewards and scores. For two answers, `"sigmoid"` and
            `"plackett_luce"` both equal the pairwise loss.
        average_over (`str`, *optional*, defaults to `"prompts"`):
            Unit of the mean in the loss of rankings: `"prompts"` gives each prompt of a batch the same weight,
            `"comparisons"` gives each comparison the same weight.
        ranking_top_k (`int`, *optional*):
            Number of best answers whose order counts in the loss with `loss_type="plackett_luce"`. By default all
            answers.
        margin_scale (`float`, *optional*):
            Scale of target margins for the comparisons of rankings: each margin is this number times the difference of
            the two answers' scores (https://huggingface.co/papers/2307.09288). By default rankings have no margins.
        label_smoothing (`float`, *optional*, defaults to `0.0`):
            Probability that the label of a pair or comparison is wrong. For pairs, the column `chosen_probability` can
            give the probability that the chosen answer is better, row by row.
        ties (`str`, *optional*):
            How to treat answers with equal scores or ranks. `"skip"` does not compare them. `"rao_kupper"`
            (https://doi.org/10.1080/01621459.1967.10482901) and `"davidson"`
            (https://doi.org/10.1080/01621459.1970.10481082) learn from them as ties. By default rows with such answers
            are rejected.
        tie_threshold (`float`, *optional*, defaults to `1.0`):
            Tie parameter of `ties="davidson"` and `ties="rao_kupper"`, above 0; ties become more likely as it grows.
            For Davidson it is nu. For Rao and Kupper it is the logarithm of theta, and acts as a margin that a win
            needs.
        attributes (`list[str]`, *optional*):
            Names of two or more attributes by which the answers of rankings are graded. `scores` must then hold a list
            of numbers for each name, or None where a row has no grades for it. The model gets one output per
            attribute. By default each answer has one grade.
        attribute_weights (`list[float]`, *optional*):
            Weight of each of the `attributes` in the reward. The reward is the weighted sum of the model's outputs.
            The weights are saved with the model. By default those saved in the model, or else equal weights.
        attribute_loss_weights (`list[float]`, *optional*):
            Positive weight of each of the `attributes` in the loss. The loss of a row is the weighted mean over the
            attributes for which the row has grades. By default all weights are equal.
        eval_by (`str`, *optional*):
            Column of the evaluation data that groups its rows, such as "source". Evaluation logs the accuracy of each
            group as `eval_accuracy/LABEL`, and the mean over groups as `eval_mean_accuracy_over_groups`. By default
            rows are not grouped.
        max_eval_steps (`int`, *optional*):
            Maximum number of batches per evaluation, taken from the start of the data. By default no limit. With a
            limit, the metric `eval_pairs` gives the number of evaluated rows. `predict` always takes all rows.
        training_time_limit (`str`, *optional*):
            Maximum duration of `train()`, such as "2h30m", "1d" or "90m". At the end of the step that exceeds it,
            training saves a checkpoint, whatever `save_strategy` says, and stops. `trainer.stopped_by` is then
            "training_time_limit", and the checkpoint's `trainer_state.json` records it. The command exits with status
            75, a request to start it again with `resume_from_checkpoint`. A SIGTERM saves and stops in the same way,
            and makes `train()` raise `Unfinished`. If uncaught, this ends a script with status 75 as well. A SIGTERM
            takes only the rest of one step and one save: an evaluation that is due is skipped, and the log says so. A
            second SIGTERM kills the process. By default no limit.
        resume_from_checkpoint (`str`, *optional*):
            `"auto"` resumes from the newest checkpoint in `output_dir`, or starts fresh if there is none. A checkpoint
            that is damaged, or belongs to other settings, data or models, is an error that lists old and new values.
            Other values are read by `trl-tpu reward`; a script passes them to `train()`, as with transformers.
            `"true"` resumes from the newest good checkpoint. A folder or URL names the checkpoint to resume from.
        save_interval_minutes (`float`, *optional*):
            Also save a checkpoint when this many minutes have passed since training began or last saved, whatever
            `save_strategy` says. By default time does not trigger saves.
        nonfinite_limit (`int`, *optional*, defaults to `3`):
            Number of consecutive steps with a NaN or infinite loss or gradient after which the run stops. It stops at
            the next log, with an error that names the first of these steps and its rows. Such a step does not update
            the weights, is counted as `nonfinite` in the logs, and is excluded from the logged loss. 0 trains on, as
            TRL does. With the loss scaling of `fp16`, only losses are checked: it causes infinite gradients and skips
            them itself.
        log_grad_norms (`bool`, *optional*, defaults to `False`):
            Whether to log the norm of each parameter's gradient before clipping, as `grad_norm/NAME`. All norms of a
            step are one vector on the device. They are read only when they are logged.
        progress (`str`, *optional*, defaults to `"bar"`):
            `"bar"` shows transformers' progress bar, or prints logs if `disable_tqdm` is on. By default, terminals and
            notebooks show bars, and files only the logs; `disable_tqdm=False` writes bars into files, too. `"json"`
            replaces all: each log becomes one line of standard output, a JSON object with `step` and all numbers of
            the log. Non-finite numbers become null.
        activation_offloading (`bool`, *optional*, defaults to `False`):
            Whether to keep activations for the backward pass in host memory: the inputs of layers that `remat`
            recomputes and, in plain torch, all saved activations of other layers. On XLA this requires `scan_layers`.
            On a CPU activations are in host memory anyway.

        packing (`str` or `bool`, *optional*, defaults to `"auto"`):
            Whether to compute shared tokens only once: tokens that the sequences of a row share, and tokens that
            rows of a batch share. Losses stay the same at a fraction of the work. `"auto"` packs where this is exact
            and possible, and otherwise logs the reason why not. It requires a causal decoder with a `score` head, and
            TRL's own columns, collator and loss. `True` raises an error where packing is impossible. `False` pads.
        row_length (`int`, *optional*):
            Length of packed rows in tokens, on XLA and TorchTPU. It must be at least the number of tokens of the
            largest row of the data, or for a stream twice `max_length`. By default lengths are chosen from the data.
            Plain torch does not need it.
        packed_attention (`str`, *optional*, defaults to `"auto"`):
            How packed rows attend on XLA. `"masks"` builds a mask with an entry for each query and key. `"expanded"`
            copies queries, keys and values to rows of whole sequences and runs a fused kernel there. Long packed rows
            need it. `"auto"` selects `"expanded"` on a TPU if packed rows have 2,048 tokens or more and the model
            supports it, and otherwise `"masks"`.
        max_shapes (`int`, *optional*, defaults to `4`):
            Maximum number of batch shapes on XLA and TorchTPU, packed or padded. Each shape is compiled once.
        group_by_prompt (`bool`, *optional*, defaults to `False`):
            Whether to put rows with the same prompt into one batch. A packed row then holds the prompt once, and an
            answer that several rows share once. The log reports how many tokens this saves. Prompts come in random
            order, a new one in each epoch.

        mesh (`str`, *optional*):
            Arrangement of the devices: axis sizes separated by commas, such as `"data=2,fsdp=4"`. A size of -1 takes
            all remaining devices. `fsdp` shards weights and batch. `data` shards only the batch. `tensor` shards
            weights and their work. TPU slices that are connected by a slower network form the outer part of
            `data`; their number is detected, and can be stated as `slices=2`. On XLA the default is `"fsdp=-1"`.
            Elsewhere `mesh` arranges the processes that torchrun starts, one per device, and transformers shards the
            model (FSDP2 and tensor parallelism). By default each process has the full model (DDP); with `fsdp`, or an
            FSDP config of `accelerate launch`, the default is `"fsdp=-1"`.
        sharding_plan (`str`, *optional*):
            YAML file that maps patterns of parameter names to the mesh axes of each dimension. It overrides the
            model's own plan; `"*": auto` keeps that plan for all other parameters. See
            `trl_tpu.parallel.mesh`. By default only the model's own plan is used.
        remat (`str`, *optional*):
            Operations that the backward pass recomputes in each layer to save memory. `"full"` recomputes the whole
            layer, like `gradient_checkpointing=True`. `"dots"` keeps the results of matrix products, including the
            attention scores of masked attention, and recomputes the rest. `"none"` recomputes nothing, and turns
            `gradient_checkpointing` off. By default `gradient_checkpointing` decides.
        scan_layers (`bool`, *optional*, defaults to `False`):
            Whether to run the decoder's layers as a loop on XLA. The program then holds one layer, so deep models
            compile as fast as shallow ones. During training each weight is stacked over all layers. All layers must
            have the same structure, `remat` must be "full" or "dots", and the optimizer must update each number
            independently, as Adam does.
        output_url (`str`, *optional*):
            URL where checkpoints and the model are stored, on any file system of fsspec (`gs://bucket/run`). Files
            pass through the local folder `output_dir`. A URL given as `output_dir` has the same effect, with a local
            folder below TMPDIR. By default everything stays in `output_dir`.

        pad_token (`str`, *optional*):
            Deprecated. Set the tokenizer's own `pad_token`.

    Raises:
        UserError: If the mesh does not match the number of devices, or if a setting has an invalid value, contradicts
            another one, or is not supported by the runtime, such as XLA.
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]
    # text after each step of a solution; None unless the trainer rewards steps
    step_separator: ClassVar[str | None] = None
    # settings that do not change a run; all others belong to its identity, also the fields of a subclass
    may_change_on_resume: ClassVar[frozenset[str]] = frozenset(REMOVED) | {
        name for name, setting in checks.SETTINGS.items() if not setting.changes_run
    }

    # TRL's defaults that differ from TrainingArguments'
    learning_rate: float = 1e-4
    logging_steps: float = 10
    gradient_checkpointing: bool = True
    bf16: bool | None = None  # type: ignore[assignment]  # TRL's type; None means "not set" until __post_init__
    lr_scheduler_kwargs: dict | str | None = None
    optim_state_dtype: str | None = None

    # model
    model_init_kwargs: dict[str, Any] | str | None = None
    trust_remote_code: bool = False
    chat_template_path: str | None = None
    disable_dropout: bool = True
    frozen_parameters: str | None = None
    train_unread_towers: bool = False

    # data
    dataset_num_proc: int | None = None
    eos_token: str | None = None
    own_pad_token: bool = False
    max_length: int | None = 1024
    truncation_mode: str | None = None
    pad_to_multiple_of: int | str | None = "auto"

    # training
    per_device_train_batch_size: int = None  # type: ignore[assignment]  # None means "not given" until __post_init__
    total_batch_size: int | None = None
    learning_rate_end: float | None = None
    center_rewards_coefficient: float | None = None
    loss_type: str = "sigmoid"
    average_over: str = "prompts"
    ranking_top_k: int | None = None
    margin_scale: float | None = None
    label_smoothing: float = 0.0
    ties: str | None = None
    tie_threshold: float = 1.0
    attributes: list[str] | None = None
    attribute_weights: list[float] | None = None
    attribute_loss_weights: list[float] | None = None
    eval_by: str | None = None
    max_eval_steps: int | None = None
    training_time_limit: str | None = None
    resume_from_checkpoint: str | None = None
    save_interval_minutes: float | None = None
    nonfinite_limit: int = 3
    log_grad_norms: bool = False
    progress: str = "bar"
    activation_offloading: bool = False

    # batch layout
    packing: str = "auto"  # or a bool
    row_length: int | None = None
    packed_attention: str = "auto"
    max_shapes: int = 4
    group_by_prompt: bool = False

    # devices
    mesh: str | None = None
    sharding_plan: str | None = None
    remat: str | None = None
    scan_layers: bool = False
    output_url: str | None = None

    # deprecated
    pad_token: str | None = None

    def __post_init__(self) -> None:
        if self.output_dir is not None and is_url(self.output_dir):
            if self.output_url not in (None, self.output_dir):
                raise UserError(
                    f"output_dir={self.output_dir!r} and output_url={self.output_url!r} are two URLs, but a run is "
                    "stored at one URL: leave one of them out."
                )
            self.output_url, self.output_dir = self.output_dir, private_folder(self.output_dir)
        if self.fsdp in ("no", "off"):  # YAML spellings of False
            self.fsdp = None
        apply_removed_arguments(self)
        if self.report_to is None:  # an old spelling of its default
            self.report_to = "none"
        if isinstance(multiple := self.pad_to_multiple_of, str):
            self.pad_to_multiple_of = None if multiple.lower() in ("auto", "none", "null") else int(multiple)
        word = str(self.packing).lower()  # booleans may be spelled as in other flags
        self.packing = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(word, word)
        checks.check_values(self)
        chosen = runtime.current()  # before transformers looks for the device; on XLA this has turned SPMD on
        checks.check_limits(self, runtime.choice().name)
        chosen.set_device_arguments(self)
        is_batch_given = self.per_device_train_batch_size is not None
        if not is_batch_given:
            self.per_device_train_batch_size = TrainingArguments.per_device_train_batch_size
        if self.remat == Remat.NONE and not self.activation_checkpointing:
            self.gradient_checkpointing = False  # remat overrides TRL's default of True
        if self.greater_is_better is None and (self.metric_for_best_model or "").endswith(ERRORS):
            self.greater_is_better = False  # transformers does this only for losses
        shows_no_bars, launched = self.disable_tqdm, launched_mesh(self.parallelism_config)
        with without_fsdp(), chosen.accelerate_context(), warnings.catch_warnings():
            # our default has TRL's name, and transformers deprecates it
            warnings.filterwarnings("ignore", "`gradient_checkpointing.*` is deprecated", FutureWarning)
            super().__post_init__()
            apply_fsdp(self, launched)
        if self.use_liger_kernel:  # Liger's loss would replace a classifier's forward by a language model's
            self.liger_kernel_config = {"fused_linear_cross_entropy": False} | (self.liger_kernel_config or {})
        if shows_no_bars is None and not self.disable_tqdm:
            self.disable_tqdm = None  # to tqdm: bars in terminals and notebooks only
        checks.warn_of_unmet_needs(self)
        # without `mesh`, on plain torch, the mesh has only this process's device (DDP); where shapes are planned it
        # has all processes: they must use the same shapes, but a DDP process knows only its own batches
        default, devices, slices = chosen.default_mesh(self.world_size, is_asked=self.mesh is not None)
        self.mesh_shape = parse_mesh(self.mesh or default, devices, slices)
        is_unscanned = chosen.is_spmd and not self.scan_layers
        circumstances = ["ranks"] * self.shards_over_processes + ["unscanned"] * is_unscanned
        checks.check_limits(self, runtime.choice().name, *circumstances)
        if self.total_batch_size is not None:
            self._divide_total_batch(self.total_batch_size, is_batch_given)
        self.sharding_rules = None if self.sharding_plan is None else Rules.read(self.sharding_plan)

    @property
    def shards_over_processes(self) -> bool:
        """True if the mesh consists of several processes with one device each.

        On XLA it does not: accelerate counts one process for all devices.
        """
        return self.mesh_shape.devices > 1 and self.world_size > 1

    @property
    def remat_policy(self) -> Remat:
        """Operations that each layer recomputes, by `remat`, or by `gradient_checkpointing` if `remat` is None."""
        if self.remat is not None:
            return Remat(self.remat)
        # transformers sets `activation_checkpointing` to its old name's value
        recomputes = self.activation_checkpointing
        return Remat.FULL if recomputes or (recomputes is None and self.gradient_checkpointing) else Remat.NONE

    @property
    def schedule(self) -> tuple[SchedulerType, dict[str, Any]]:
        """Name and arguments of transformers' learning rate schedule that ends at `learning_rate_end`."""
        name, arguments = SchedulerType(self.lr_scheduler_type), dict(cast(Any, self.lr_scheduler_kwargs) or {})
        if self.learning_rate_end is not None:  # the declarations allow it for the schedules of the table only
            name, argument = _SCHEDULES_WITH_FINAL_RATE[name]
            arguments[argument] = self.learning_rate_end
        return name, arguments

    @property
    def time_limit(self) -> timedelta | None:
        """Duration after which `train()` saves and stops; None for no limit."""
        if self.training_time_limit is None:
            return None
        counts = cast(re.Match, checks.DURATION.fullmatch(self.training_time_limit)).groupdict("0")
        return timedelta(**{unit: int(count) for unit, count in counts.items()})

    def identifying_settings(self) -> dict[str, Any]:
        """Return the settings that change the run: all fields except `may_change_on_resume`, without Hub tokens."""
        names = {item.name for item in dataclasses.fields(self)} - self.may_change_on_resume
        return {name: value for name, value in self.__getstate__().items() if name in names}

    def __copy__(self) -> "RewardConfig":
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))  # keeps the Hub token, unlike `__getstate__`
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> "RewardConfig":
        copied = copy.copy(self)
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without Hub tokens: `training_args.bin`, a pickle of it, is pushed with the model."""
        kwargs = self.model_init_kwargs
        if isinstance(kwargs, dict):
            kwargs = {name: value for name, value in kwargs.items() if name not in ("token", "use_auth_token")}
        return vars(self) | {"hub_token": None, "push_to_hub_token": None, "model_init_kwargs": kwargs}

    def to_dict(self) -> dict[str, Any]:
        """Return all fields in the form that trackers log, without Hub tokens. ``RewardConfig(**fields)`` is equal."""
        # transformers replaces each value of a name with "token" at its end by a placeholder
        replaced = ("eos_token", "own_pad_token", "pad_token", "hub_token", "push_to_hub_token", "model_init_kwargs")
        state = self.__getstate__()
        return super().to_dict() | {name: state[name] for name in replaced}

    @property
    def process_index(self) -> int:
        """Index of this process among the hosts of the mesh.

        On XLA accelerate gives every host index 0, and all of them would write and push.
        """
        chosen = runtime.current()
        return chosen.topology().process_index if chosen.is_spmd else super().process_index

    @property
    def local_process_index(self) -> int:
        """Index of this process on its host; on XLA the same as `process_index`, to log on one host only."""
        return self.process_index if runtime.current().is_spmd else super().local_process_index

    @property
    def should_save(self) -> bool:
        """True if this process writes files: only the first one, or with `save_on_each_node` one per host."""
        if self.save_on_each_node:
            return runtime.current().is_spmd or super().local_process_index == 0
        return super().should_save

    @property
    def train_batch_size(self) -> int:
        """Number of rows in a training batch over all devices of the mesh."""
        return self._over_devices(super().train_batch_size)

    @property
    def eval_batch_size(self) -> int:
        """Number of rows in an evaluation batch over all devices of the mesh."""
        return self._over_devices(super().eval_batch_size)

    def _divide_total_batch(self, total: int, is_batch_given: bool) -> None:
        """Set `per_device_train_batch_size` or `gradient_accumulation_steps` for updates of ``total`` rows.

        Args:
            total: Number of rows per update over all devices.
            is_batch_given: Whether the user set `per_device_train_batch_size`; it is then kept.

        Raises:
            UserError: If no whole number gives exactly ``total`` rows.
        """
        shards = 1  # with split_batches the per-device batch size is the size of the whole batch
        if not cast(AcceleratorConfig, self.accelerator_config).split_batches:
            processes = 1 if self.shards_over_processes else self.world_size
            shards = self.mesh_shape.batch_shards * processes * max(1, self.n_gpu)
        batch, accumulated = self.per_device_train_batch_size, self.gradient_accumulation_steps
        unit = shards * accumulated * (batch if is_batch_given else 1)
        count = 1 if is_batch_given and accumulated > 1 else max(1, round(total / unit))
        if total != count * unit:
            fixed = f", per_device_train_batch_size={batch}" if is_batch_given else ""
            raise UserError(
                f"total_batch_size={total} is impossible with {shards} batch shard(s){fixed} and "
                f"gradient_accumulation_steps={accumulated}. The nearest possible value is {count * unit}."
            )
        if is_batch_given:
            self.gradient_accumulation_steps = accumulated * count
        else:
            self.per_device_train_batch_size = count

    def _over_devices(self, rows: int) -> int:
        """Return the rows of a batch over this process's devices, for the batch size of one device."""
        shards = 1 if self.shards_over_processes else self.mesh_shape.batch_shards
        if not cast(AcceleratorConfig, self.accelerator_config).split_batches:  # parsed by `__post_init__`
            return rows * shards
        if rows % shards:
            raise UserError(
                f"With split_batches the batch of {rows} rows is split into {shards} shards over the mesh "
                f"{self.mesh_shape}, but {rows} / {shards} is not a whole number. Choose a batch of "
                f"{rows + -rows % shards} rows."
            )
        return rows
