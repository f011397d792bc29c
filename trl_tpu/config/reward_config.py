"""`RewardConfig`: the settings of a training, TRL's names first."""

import copy
import dataclasses
import inspect
import re
import tempfile
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, cast

from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import SchedulerType

from .. import runtime
from ..errors import UserError, explaining
from ..parallel.mesh import MeshShape, parse_mesh
from ..parallel.sharding_plan import Rules
from ..runtime import Remat
from . import checks
from .checks import RemovedArguments

_DURATION = re.compile(r"(?:([1-9][0-9]{0,5})d)?(?:([1-9][0-9]{0,5})h)?(?:([1-9][0-9]{0,5})m)?")


def parse_duration(text: object, setting: str) -> timedelta:
    """Return a duration such as "2h30m", "1d" or "90m", the value of ``setting``.

    Raises:
        UserError: Any other spelling.
    """
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if not match or not match[0]:
        raise UserError(
            f"{setting}: {text!r} is no duration: write whole numbers of days, hours and minutes with d, h and m, in "
            "this order and without spaces, and leave out what is 0: '2h30m', '1d', '90m'."
        )
    days, hours, minutes = (int(part or 0) for part in match.groups())
    return timedelta(days=days, hours=hours, minutes=minutes)


T = TypeVar("T")


def help_from_docstring(cls: type[T]) -> type[T]:
    """Give each of a dataclass's own fields, as its ``help``, what the docstring's list of parameters says of it."""
    described = inspect.cleandoc(cls.__doc__ or "")
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # a dataclass
        found = re.search(rf"^ {{4}}{field.name}(?: \(.*\))?:(.*(?:\n {{8}}.*)*)", described, re.MULTILINE)
        if found and field.name in cls.__annotations__:
            text = " ".join(found[1].split()).replace("%", "%%")  # argparse formats it
            field.metadata = MappingProxyType({**field.metadata, "help": text})
    return cls


REWARD_METRICS = ("min_reward", "mean_reward", "max_reward", "accuracy", "margin", "tie_rate")
#: Of a verdict; the second ones where pairs have lengths of both kinds.
VERDICT_METRICS = ("accuracy_low", "accuracy_high", "ece", "brier")
LENGTH_METRICS = ("length_only_accuracy", "length_controlled_accuracy")
#: Of which less is better.
ERRORS = ("ece", "brier")
#: Of every evaluation; the last three are transformers'.
METRICS = (
    *("loss", "num_tokens", *REWARD_METRICS, *VERDICT_METRICS),
    *("runtime", "samples_per_second", "steps_per_second"),
)


_PRIVATE: list[tempfile.TemporaryDirectory[str]] = []


def is_url(folder: str) -> bool:
    """Return whether ``folder`` is a URL rather than a folder of this machine."""
    return "://" in folder


def private_folder(url: str) -> str:
    """Make a folder below TMPDIR through which files of ``url`` pass: nobody else's, and removed with this process."""
    _PRIVATE.append(tempfile.TemporaryDirectory(prefix="trl-tpu-", ignore_cleanup_errors=True))
    place, name = _PRIVATE[-1].name, url.rstrip("/").rpartition("/")[2]
    folder = Path(place) if name in ("", ".", "..") else Path(place, name)
    folder.mkdir(exist_ok=True)
    return str(folder)


#: Schedules of transformers that end at a rate, by those that end at 0, and what they call it.
_ENDING = {
    SchedulerType.LINEAR: (SchedulerType.POLYNOMIAL, "lr_end"),  # of power 1
    SchedulerType.COSINE: (SchedulerType.COSINE_WITH_MIN_LR, "min_lr"),
}

#: Other words for `packing`, as other flags take them.
_SWITCHES = {"yes": "true", "on": "true", "no": "false", "off": "false"}


@help_from_docstring
@dataclass
class RewardConfig(RemovedArguments, TrainingArguments):
    r"""Settings of a [`RewardTrainer`]: those of `trl.RewardConfig`, and those of the devices, the rows and the saves.

    Only what is special to reward models is described here; everything else is
    [`~transformers.TrainingArguments`]'.

    Parameters:
        learning_rate (`float`, *optional*, defaults to `1e-4`):
            The initial learning rate for AdamW.
        logging_steps (`float`, *optional*, defaults to `10`):
            Log every this many steps; below 1, as a fraction of all training steps.
        gradient_checkpointing (`bool`, *optional*, defaults to `True`):
            Recompute activations in the backward pass to save memory.
        bf16 (`bool`, *optional*):
            Compute matrix products in bfloat16 over float32 weights. Unset, it is on unless `fp16` is; on a CPU with
            plain torch, where it only costs, it is off.
        lr_scheduler_kwargs (`dict` or `str`, *optional*):
            Extra parameters of the learning rate scheduler, such as {'num_cycles': 1}.
        optim (`str`, *optional*, defaults to `"adamw_torch"`):
            The optimizer: a name of transformers' OptimizerNames.
        optim_state_dtype (`str`, *optional*):
            `"bfloat16"` stores Adam's first moments in bfloat16 between steps, which saves 2 bytes per trained float32
            parameter. Updates are computed in the type of the weights. Second moments keep that type, since bfloat16
            would round away their small changes.

        model_init_kwargs (`dict[str, Any]`, *optional*):
            For `AutoModelForSequenceClassification.from_pretrained`, when the trainer's `model` is a name. `dtype`
            defaults to float32. On a command line: JSON.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Whether models and tokenizers may bring their own Python code from the Hub.
        chat_template_path (`str`, *optional*):
            A `.jinja` file, or a tokenizer's folder or Hub id, whose chat template to use.
        disable_dropout (`bool`, *optional*, defaults to `True`):
            Whether to set every dropout probability to 0.
        frozen_parameters (`str`, *optional*):
            A regular expression. Parameters in whose names it is found, such as `"embed_tokens|norm"`, do not train,
            of adapters too; they are saved as the others.

        dataset_num_proc (`int`, *optional*):
            Worker processes that tokenize.
        eos_token (`str`, *optional*):
            The end-of-sequence token; the tokenizer's own by default.
        max_length (`int`, *optional*, defaults to `1024`):
            Pairs with a longer dialogue, in tokens, are left out, and counted in the log, unless `truncation_mode`
            cuts them. `None` keeps all.
        truncation_mode (`str`, *optional*):
            Cuts dialogues to `max_length` tokens, by the names of `trl.DPOConfig`: `"keep_start"` leaves out what
            comes after, the end-of-sequence token too; `"keep_end"` the first tokens, as many of both dialogues of a
            pair. A pair of which nothing is left that tells its answers apart is left out. The log counts both.
            `trl-tpu score` never cuts: its `--max_length` leaves out.
        own_pad_token (`bool`, *optional*, defaults to `False`):
            Where padding would be the end-of-sequence token, pad with a token of its own, one that the vocabulary
            reserves where it has such. A reward is read at the last token that is not padding, so that it is then read
            at the end-of-sequence token, as by servers that read the very last one. By default as in TRL.
        pad_to_multiple_of (`int` or `str`, *optional*, defaults to `"auto"`):
            The lengths of padded batches are rounded up to a multiple of this. `"auto"` does not round on plain torch;
            on XLA it pads to one of a few lengths chosen from the data, since each length is compiled once.

        per_device_train_batch_size (`int`, *optional*, defaults to `8`):
            Pairs on each device of the mesh, of a batch.
        total_batch_size (`int`, *optional*):
            Pairs of an update, over all devices and processes and over the batches that accumulate: the same on any
            number of chips. It sets `per_device_train_batch_size`; or, where that is given,
            `gradient_accumulation_steps`.
        learning_rate_end (`float`, *optional*):
            Where a `"linear"` or `"cosine"` schedule ends, in place of 0. Other schedules take their own
            `lr_scheduler_kwargs`.
        center_rewards_coefficient (`float`, *optional*):
            Pulls rewards towards mean zero (https://huggingface.co/papers/2312.09244, eq. 2); 0.01 is recommended.
        loss_type (`str`, *optional*, defaults to `"sigmoid"`):
            Of rankings: `"sigmoid"` is the mean over all comparisons of a prompt's answers
            (https://huggingface.co/papers/2203.02155), `"plackett_luce"` the likelihood of their whole order, and
            `"regression"` the squared error of rewards as scores. Two answers are the pairwise loss by the first two.
        average_over (`str`, *optional*, defaults to `"prompts"`):
            What counts once in the loss of a batch of rankings: its `"prompts"`, or its `"comparisons"`.
        ranking_top_k (`int`, *optional*):
            How many of the best answers `"plackett_luce"` draws; by default all.
        margin_scale (`float`, *optional*):
            Makes the differences of scores, times this, target margins of a ranking's comparisons
            (https://huggingface.co/papers/2307.09288).
        label_smoothing (`float`, *optional*, defaults to `0.0`):
            How likely it is that a label, of a pair or a comparison, is wrong. In pairs the column
            `chosen_probability` says how likely the chosen answer is the better one.
        ties (`str`, *optional*):
            Of answers of equal scores or ranks, `"skip"` does not compare them, and `"rao_kupper"`
            (https://doi.org/10.1080/01621459.1967.10482901) and `"davidson"`
            (https://doi.org/10.1080/01621459.1970.10481082) take them as ties; without it such rows are refused.
        tie_threshold (`float`, *optional*, defaults to `1.0`):
            The parameter of these two above 0, how often answers tie: of Rao and Kupper the logarithm of theirs, which
            their wins have as a margin.
        attributes (`list[str]`, *optional*):
            The names of several attributes that answers of rankings are graded by: `scores` then have a list of
            numbers for each name, or None where a row does not say. The model gets an output for each.
        attribute_weights (`list[float]`, *optional*):
            Of each attribute in the one reward, a weighted sum, which is saved with the model. By default alike.
        attribute_loss_weights (`list[float]`, *optional*):
            Of each attribute in the loss, a weighted mean over those that a row has grades of. By default alike.
        eval_by (`str`, *optional*):
            A column of the evaluation data, such as "source": evaluation logs the accuracy of each of its labels, as
            `eval_accuracy/LABEL`, and their mean, `eval_mean_accuracy_over_groups`.
        max_eval_steps (`int`, *optional*):
            How many batches an evaluation takes at most, of the first pairs; `eval_pairs` then says of how many pairs
            its metrics are. A prediction takes all.
        training_time_limit (`str`, *optional*):
            How long `train()` may take, such as "2h30m", "1d" or "90m". At the end of the step in which that is over
            training saves a checkpoint, whatever `save_strategy` says, and stops; `trainer.stopped_by` is then
            "training_time_limit", and the command ends with status 75, which asks to be started again with
            `resume_from_checkpoint`. The checkpoint's `trainer_state.json` says so too. A SIGTERM does the same, and
            `train()` raises `Unfinished`, which ends a script with status 75: that takes what is left of one step, and
            one save. An evaluation that is due then is left out, and the log says so. A second SIGTERM kills.
        resume_from_checkpoint (`str`, *optional*):
            `"auto"` starts fresh where `output_dir` has no checkpoint, and else resumes the newest one; one that is
            damaged, or of other settings or data, is an error. Other values are read by `trl-tpu reward`, and a script
            hands them to `train()`, as with transformers: `"true"` resumes the newest good one, a folder or URL that
            one.
        save_interval_minutes (`float`, *optional*):
            Save also when this long has passed since training began or last saved, whatever `save_strategy` says.
        nonfinite_limit (`int`, *optional*, defaults to `3`):
            How many steps in a row may have a NaN or infinite loss or gradient before the run stops, at the next log,
            with the first of them and its pairs named. Such a step takes no update, is counted as `nonfinite` in the
            logs, and is no part of the logged loss. 0 trains on as TRL does. It is 0 with `fp16`, whose loss scale
            skips steps by itself, and with float16 weights, where infinite gradients come and go.
        log_grad_norms (`bool`, *optional*, defaults to `False`):
            Log the norm of each parameter's gradient before clipping, as `grad_norm/NAME`. All norms of a step are one
            vector on the device, which is read only when it is logged.
        progress (`str`, *optional*, defaults to `"bar"`):
            `"bar"` shows transformers' progress bar, or prints logs if `disable_tqdm` is on. `"json"` replaces both:
            each log is one line of standard output, a JSON object with `step` and the log's numbers, all of them. A
            number that is not finite is null.
        activation_offloading (`bool`, *optional*, defaults to `False`):
            Whether what the backward needs waits in the host's memory: of layers that `remat` computes again their
            inputs; in plain torch of others all. On XLA it needs `scan_layers`. On a CPU it is there anyway.

        packing (`str` or `bool`, *optional*, defaults to `"auto"`):
            Whether to compute the tokens that a pair's two dialogues share, and those that pairs of a batch share,
            once: the same losses at a fraction of the work. `"auto"` packs where that is exact and possible, and else
            says why not: causal decoders with a `score` head, TRL's own columns, collator and loss. `True` insists.
        row_length (`int`, *optional*):
            The length of packed rows on XLA and TorchTPU, at least the tokens of the largest pair, or for
            a stream twice `max_length`. By default lengths are chosen from the data. Plain torch needs none.
        packed_attention (`str`, *optional*, defaults to `"auto"`):
            How packed rows attend on XLA. `"masks"` builds a mask for each query and key; `"expanded"` moves queries,
            keys and values to rows of whole dialogues and runs a fused kernel there, which long rows need. `"auto"`
            expands on a TPU, where rows are of 2,048 tokens or more and the model allows it.
        max_shapes (`int`, *optional*, defaults to `4`):
            On XLA and TorchTPU, how many shapes batches may have, packed or padded: each is compiled once.
        group_by_prompt (`bool`, *optional*, defaults to `False`):
            Whether pairs that share a prompt come into one batch, where packed rows hold the prompt, and answers that
            several pairs have, once: the log says how many tokens that saves. Prompts come in a random order, another
            one in each epoch.

        mesh (`str`, *optional*):
            How the devices are arranged: axis sizes separated by commas, -1 meaning what is left. `fsdp` splits
            weights and batch, `data` only the batch, `tensor` weights and the work on each row. TPU slices that a
            slower network joins are the outer part of `data`: `slices=2`, on its own found out by itself. On XLA it is
            `"fsdp=-1"` by default. Elsewhere it arranges the processes that torchrun starts, one a device, and the
            model is split by transformers (FSDP2 and tensor parallelism); by default each has all of it (DDP).
        sharding_plan (`str`, *optional*):
            A YAML file of patterns of parameter names and the mesh axes that each dimension goes over, which overrules
            the model's own plan; `"*": auto` keeps the rest of it. See `trl_tpu.parallel.sharding_plan`.
        remat (`str`, *optional*):
            What each layer's backward computes again, to save memory: `"full"` all of the layer, which is what
            `gradient_checkpointing=True` means; `"dots"` all but the matrix products, scores of attention masks among
            them, whose results are kept; `"none"` nothing, which turns `gradient_checkpointing` off.
        scan_layers (`bool`, *optional*, defaults to `False`):
            Whether to run the decoder's layers as a loop on XLA: the program holds one layer, and while training the
            layers' weights are held as one of each kind, so compiling takes as long for deep models as for shallow
            ones. The layers have to be all alike, `remat` "full" or "dots", and the optimizer one that updates each
            number on its own, such as Adam.
        output_url (`str`, *optional*):
            Where checkpoints and the model are kept, on any file system of fsspec (`gs://bucket/run`); `output_dir` is
            then the folder through which they pass. A URL as `output_dir` means the same, with a folder below TMPDIR.

        pad_token (`str`, *optional*):
            Deprecated. Set the tokenizer's own `pad_token`.

    Raises:
        UserError: For a mesh that the devices do not fill, and for settings that cannot be meant or that XLA cannot
            honor.
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "model_init_kwargs"]
    step_separator: ClassVar[str | None] = None
    """What follows each step, where rows are solutions whose steps are judged."""

    # TRL's defaults, which differ from TrainingArguments'
    learning_rate: float = 1e-4
    logging_steps: float = 10
    gradient_checkpointing: bool = True
    bf16: bool | None = None  # type: ignore[assignment]  # TRL's type: None is "not set" until __post_init__
    lr_scheduler_kwargs: dict | str | None = None
    optim: str = "adamw_torch"  # differs from TRL: transformers' default is a fused kernel, which XLA does not have
    optim_state_dtype: str | None = None

    # the model
    model_init_kwargs: dict[str, Any] | str | None = None
    trust_remote_code: bool = False
    chat_template_path: str | None = None
    disable_dropout: bool = True
    frozen_parameters: str | None = None

    # the data
    dataset_num_proc: int | None = None
    eos_token: str | None = None
    own_pad_token: bool = False
    max_length: int | None = 1024
    truncation_mode: str | None = None
    pad_to_multiple_of: int | str | None = "auto"

    # the training
    per_device_train_batch_size: int = None  # type: ignore[assignment]  # None is "not given" until __post_init__
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

    # the rows
    packing: str = "auto"  # or a bool
    row_length: int | None = None
    packed_attention: str = "auto"
    max_shapes: int = 4
    group_by_prompt: bool = False

    # the devices
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
                    f"output_dir={self.output_dir!r} and output_url={self.output_url!r} are two URLs, and a run is "
                    "kept at one: leave one of them out."
                )
            self.output_url, self.output_dir = self.output_dir, private_folder(self.output_dir)
        if self.fsdp in ("no", "off"):  # as YAML writes False
            self.fsdp = None
        checks.take_removed(self)
        if self.pad_token is not None:
            warnings.warn(
                "`pad_token` is deprecated and will be removed in v2.0.0: set `tokenizer.pad_token` and pass the "
                "tokenizer as `processing_class`.",
                FutureWarning,
                stacklevel=3,
            )
        self._fit_to_runtime()
        if isinstance(multiple := self.pad_to_multiple_of, str):
            with explaining("pad_to_multiple_of must be 'auto' or a whole number of at least 1", "Correct it."):
                self.pad_to_multiple_of = None if multiple.lower() in ("auto", "none", "null") else int(multiple)
        self.packing = str(self.packing).lower()
        self.packing = _SWITCHES.get(self.packing, self.packing)
        checks.check_values(self)
        is_given = self.per_device_train_batch_size is not None
        if not is_given:
            self.per_device_train_batch_size = TrainingArguments.per_device_train_batch_size
        if self.remat == Remat.NONE and not self.activation_checkpointing:
            self.gradient_checkpointing = False  # its True is only TRL's default
        if self.greater_is_better is None and (self.metric_for_best_model or "").endswith(ERRORS):
            self.greater_is_better = False  # transformers knows this of losses only
        with runtime.current().known_to_accelerate(), warnings.catch_warnings():
            # our own default is spelled the way TRL spells it
            warnings.filterwarnings(
                "ignore", message="`gradient_checkpointing.*` is deprecated", category=FutureWarning
            )
            super().__post_init__()
        checks.check_remat(self)
        checks.check_trackers(self)
        checks.warn_of_unmet_needs(self)
        _ = self.schedule  # which says what is wrong with it
        self.mesh_shape = self._parse_mesh()
        if self.shards_over_processes:
            checks.check_limits(self, checks.RANK_LIMITS, "impossible with a mesh over processes")
        if self.total_batch_size is not None:
            self._divide(self.total_batch_size, is_given)
        self.sharding_rules = None if self.sharding_plan is None else Rules.read(self.sharding_plan)

    def _parse_mesh(self) -> MeshShape:
        """Return the mesh over all devices or processes; without `mesh`, on plain torch, over this process's device.

        Where shapes are planned, all processes have to take the same, and those of DDP know no batches but their own.
        """
        default, devices, slices = runtime.current().default_mesh(self.world_size, is_asked=self.mesh is not None)
        return parse_mesh(self.mesh or default, devices, slices)

    @property
    def shards_over_processes(self) -> bool:
        """Whether processes with a device each form the mesh. On XLA accelerate counts one process for all devices."""
        return self.mesh_shape.devices > 1 and self.world_size > 1

    def _fit_to_runtime(self) -> None:
        """Start the runtime, before transformers looks for the device, and settle what depends on it."""
        chosen = runtime.current()  # on XLA, SPMD is on by now
        checks.check_limits(self, checks.DEVICE_LIMITS[runtime.choice().name], f"impossible on {chosen.name}")
        chosen.settle_arguments(self)

    @property
    def remat_policy(self) -> Remat:
        """What each layer computes again: what `remat` says, or where it says nothing `gradient_checkpointing`."""
        if self.remat is not None:
            return Remat.parse(self.remat)
        return Remat.FULL if self.activation_checkpointing else Remat.NONE

    @property
    def schedule(self) -> tuple[SchedulerType, dict[str, Any]]:
        """The learning rate's schedule in transformers, which ends at `learning_rate_end`, and its arguments.

        Raises:
            UserError: It cannot end there.
        """
        name, given = SchedulerType(self.lr_scheduler_type), dict(cast(Any, self.lr_scheduler_kwargs) or {})
        if (end := self.learning_rate_end) is None:
            return name, given
        if name in _ENDING and given.keys() <= {"num_cycles"} and 0 <= end < self.learning_rate:
            name, argument = _ENDING[name]
            return name, given | {argument: end}
        raise UserError(
            f"learning_rate_end={end} is where lr_scheduler_type='linear' or 'cosine' ends, below learning_rate, here "
            f"{self.learning_rate}; this is {name.value!r} with {given}. Leave it out and say all in "
            "lr_scheduler_kwargs, such as {'lr_end': 1e-5} of 'polynomial', {'min_lr': 1e-5} of 'cosine_with_min_lr'."
        )

    @property
    def time_limit(self) -> timedelta | None:
        """How long `train()` runs before it saves and stops."""
        limit = self.training_time_limit
        return None if limit is None else parse_duration(limit, "training_time_limit")

    @property
    def save_interval(self) -> timedelta | None:
        """How long training runs before it saves again."""
        return None if self.save_interval_minutes is None else timedelta(minutes=self.save_interval_minutes)

    def __copy__(self) -> "RewardConfig":
        made = object.__new__(type(self))
        vars(made).update(vars(self))  # with the Hub's token, which `__getstate__` leaves out
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> "RewardConfig":
        made = copy.copy(self)
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the Hub's token: `training_args.bin`, a pickle of this, is pushed beside the model."""
        return vars(self) | {"hub_token": None, "model_init_kwargs": _without_token(self.model_init_kwargs)}

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, as trackers log them, without tokens."""
        return super().to_dict() | {"model_init_kwargs": _without_token(self.model_init_kwargs)}

    @property
    def process_index(self) -> int:
        """Which host of the mesh this is. accelerate takes each for the only one, and all would write and push."""
        return runtime.current().process_index(super().process_index)

    @property
    def local_process_index(self) -> int:
        """As `process_index` on XLA, so that one host logs for all."""
        return runtime.current().process_index(super().local_process_index)

    @property
    def should_save(self) -> bool:
        """Whether this process writes: the first, or with `save_on_each_node` that of every host."""
        if self.save_on_each_node:
            return runtime.current().is_first_of_host(super().local_process_index)
        return super().should_save

    @property
    def train_batch_size(self) -> int:
        """Pairs in a training batch, over all devices of the mesh."""
        return self._over_mesh(self.per_device_train_batch_size, super().train_batch_size)

    @property
    def eval_batch_size(self) -> int:
        """Pairs in an evaluation batch, over all devices of the mesh."""
        return self._over_mesh(self.per_device_eval_batch_size, super().eval_batch_size)

    def _divide(self, total: int, is_batch_given: bool) -> None:
        """Set the pairs of a device or, where they are given, the batches that accumulate to ``total`` pairs.

        Raises:
            UserError: No whole number does.
        """
        shards = 1  # with split_batches a device's batch is that of all
        if not cast(AcceleratorConfig, self.accelerator_config).split_batches:
            processes = 1 if self.shards_over_processes else self.world_size
            shards = self.mesh_shape.batch_shards * processes * max(1, self.n_gpu)
        batch, accumulated = self.per_device_train_batch_size, self.gradient_accumulation_steps
        unit = shards * accumulated * (batch if is_batch_given else 1)
        count = 1 if is_batch_given and accumulated > 1 else max(1, round(total / unit))
        if total != count * unit:
            given = f" of per_device_train_batch_size={batch} pairs" if is_batch_given else ""
            raise UserError(
                f"total_batch_size={total} cannot be made of {shards} shard(s) of a batch{given} with "
                f"gradient_accumulation_steps={accumulated}. The nearest that can is {count * unit}."
            )
        if is_batch_given:
            self.gradient_accumulation_steps = accumulated * count
        else:
            self.per_device_train_batch_size = count

    def _over_mesh(self, per_device: int, native: int) -> int:
        shards = self.mesh_shape.batch_shards
        if shards == 1 or self.shards_over_processes:
            return native
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


def _without_token(model_init_kwargs: Any) -> Any:
    """Return the arguments without the token that `from_pretrained` may be given."""
    if not isinstance(model_init_kwargs, dict):
        return model_init_kwargs
    return {name: value for name, value in model_init_kwargs.items() if name not in ("token", "use_auth_token")}
