"""The parts that `DeviceTrainer` has, and what of them a checkpoint holds."""

import json
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel, TrainerState
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState

from ..checkpoint.checkpointer import Checkpointer, CheckpointLoader, Contents, together
from ..checkpoint.run_folder import RemoteRun, RunFolder
from ..checkpoint.state_dict import PROGRESS_FILE, optimizer_numbers, whole_weights
from ..config.reward_config import RewardConfig
from ..data.measure import is_prepared, measure
from ..errors import UserError
from ..modeling.adapters import complete_config, save_adapter_config
from ..modeling.losses import Loss
from ..parallel.shard import saves_what_it_is_given
from ..report.model_card import add_card
from ..runtime import current
from .batch_plan import BatchPlan
from .optimizer import StepState, bare
from .statistics import LogInterval, NonfiniteGuard, RewardMetrics, computes_in_float16
from .step import StepResult
from .stopping import HostAgreement, Preemption, RecompileGuard, Unfinished

_SETTINGS = (
    *("seed", "data_seed", "gradient_accumulation_steps", "group_by_prompt"),
    *("learning_rate", "learning_rate_end", "lr_scheduler_type", "warmup_steps", "max_steps", "num_train_epochs"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *(field.name for field in fields(Loss)),
    *(
        "attributes",
        "attribute_loss_weights",
        "margin_scale",
        "average_over",
        "disable_dropout",
        "frozen_parameters",
        "bf16",
        "nonfinite_limit",
    ),
)


def check_alike(runs: Sequence[Mapping[str, Any]]) -> None:
    """Refuse hosts that were started with different arguments, data or checkpoints.

    Args:
        runs: What has to be the same everywhere, as each host has it.

    Raises:
        UserError: Names everything that differs, and each host's value.
    """
    faults = []
    for name in runs[0]:
        hosts_of: dict[str, list[int]] = {}
        for host, run in enumerate(runs):
            hosts_of.setdefault(json.dumps(run[name], default=str), []).append(host)
        if len(hosts_of) > 1:
            faults.append(f"{name} is " + " and ".join(f"{value} on {_named(on)}" for value, on in hosts_of.items()))
    if faults:
        raise UserError(
            f"All hosts must train the same run, but {'; '.join(faults)}. Start the same command on every host, with "
            "the same data, and an output_dir that all of them share."
        )


def order_of_pairs(args: Any, processes: int, train_dataset: Any) -> dict[str, Any]:
    """Return what each step depends on, its pairs and how it trains: a run in which it differs is not the same run."""
    order: dict[str, Any] = {name: getattr(args, name) for name in _SETTINGS}
    order["the batch"] = args.train_batch_size * processes
    return order | {"training data": digest(train_dataset)}


def describe_run(args: Any, eval_dataset: Any, resume: str | bool | None) -> dict[str, Any]:
    """Return what else has to be the same on every host of a mesh: over what mesh, and from which checkpoint."""
    run: dict[str, Any] = {"mesh": str(args.mesh_shape), "eval data": digest(eval_dataset)}
    run["the checkpoint to resume from"] = Path(resume).name if isinstance(resume, str) else bool(resume)
    run["the checkpoints"] = sorted(path.name for path in Path(str(args.output_dir)).glob("checkpoint-*"))
    return run


def digest(dataset: Any) -> Any:
    """Return how many pairs there are, and a checksum of all; None for a stream; of a dict, this of each dataset."""
    if isinstance(dataset, dict):
        return {name: digest(part) for name, part in dataset.items()}
    if not is_prepared(dataset):
        return None
    return f"{len(dataset)} pairs ({measure(dataset).checksum:08x})"


def _named(hosts: list[int]) -> str:
    more = f" and {len(hosts) - 8} more" if len(hosts) > 8 else ""
    return f"{'host' if len(hosts) == 1 else 'hosts'} {', '.join(map(str, hosts[:8]))}{more}"


def keeps_state(accelerator: Accelerator) -> bool:
    """Return whether checkpoints hold state of ours; accelerate's FSDP and DeepSpeed have their own."""
    plugins = ("fsdp_plugin", "deepspeed_plugin")
    return all(getattr(accelerator.state, plugin, None) is None for plugin in plugins)


def is_users(method: Any) -> bool:
    """Return whether a trainer's method is neither this package's nor transformers', but a user's."""
    return getattr(method, "__module__", "").partition(".")[0] not in (__package__.partition(".")[0], "transformers")


def contents_of(trainer: Any, run: RunFolder) -> Contents:
    """Return what the checkpoint of the step that ``trainer``, a `DeviceTrainer`, is at contains."""
    state, args = trainer.state, trainer.args
    if state.best_global_step:
        best = run.path / f"checkpoint-{state.best_global_step}"
        if best.is_dir() or state.best_global_step == state.global_step:
            state.best_model_checkpoint = str(best)
    return Contents(
        name=f"checkpoint-{state.global_step}",
        run=run,
        describe=partial(_describe, trainer),
        model=trainer.model if keeps_state(trainer.accelerator) else None,
        optimizer=None if args.save_only_model else bare(trainer.optimizer),
        best=None if state.best_model_checkpoint is None else Path(state.best_model_checkpoint).name,
    )


def _describe(trainer: Any, folder: Path) -> None:
    """Write a checkpoint's small files. All ranks take part.

    A rank that raises before a collective leaves the others waiting in it, so errors are exchanged before each.
    """
    args, model, runtime, path = trainer.args, trainer.model, trainer.trl_tpu.runtime, str(folder)
    ours, writes, has_state = keeps_state(trainer.accelerator), args.should_save, not args.save_only_model
    all_gather_object, random_states = trainer.trl_tpu.agreement.all_gather_object, []
    if has_state:
        sums = trainer.trl_tpu.log_interval.state(trainer._tr_loss) if ours else []
        save = trainer._save_rng_state if writes or args.world_size > 1 else None  # hosts of a mesh have the writer's
        own_states = together(partial(_write_random_states, save, folder), all_gather_object)
        if trainer.trl_tpu.remote is not None and args.world_size > 1:
            random_states = all_gather_object(own_states)  # the writer uploads them
    if not ours or is_users(trainer.save_model) or is_users(trainer._save):
        together(lambda: trainer.save_model(path, _internal_call=True), all_gather_object)
    else:
        are_gathered = runtime.topology().process_count > 1 and args.save_only_model
        weights = whole_weights(model, runtime, keeps=writes) if are_gathered else {}
        if writes and (weights or isinstance(model, PreTrainedModel)):
            with saves_what_it_is_given(model):
                trainer._save(path, weights)
        elif writes:
            save_adapter_config(model, trainer.processing_class, path)
            torch.save(args, folder / TRAINING_ARGS_NAME)
    if has_state and not ours:
        trainer._save_optimizer_and_scheduler(path)
    elif has_state and writes:
        progress = {
            "processes": sums,
            "logged_step": trainer._globalstep_last_logged,
            "optimizer": optimizer_numbers(bare(trainer.optimizer), model),
            "batches": trainer.trl_tpu.batch_plan.layout,
            "order": trainer.trl_tpu.order,
        }
        (folder / PROGRESS_FILE).write_text(json.dumps(progress), encoding="utf-8")  # floats come back to the bit
        torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)  # type: ignore[union-attr]
    if has_state:
        trainer._save_scaler(path)
    if writes:
        complete_config(model, path)
        add_card(folder, folder, Path(args.output_dir))
        for states in random_states:
            for name, state in states.items():
                (folder / name).write_bytes(state)
        callbacks = [*trainer.callback_handler.callbacks, trainer.control]
        trainer.state.stateful_callbacks = _state_of_callbacks(callbacks, trainer.trl_tpu.preemption.stopped_by)
        trainer.state.save_to_json(str(folder / TRAINER_STATE_NAME))


def _write_random_states(save: Callable[[str], None] | None, folder: Path) -> dict[str, bytes]:
    """Write this rank's random states, and return the contents of such files in the folder, by name."""
    if save is not None:
        save(str(folder))
    return {path.name: path.read_bytes() for path in folder.glob("rng_state*.pth")}


def _state_of_callbacks(callbacks: Iterable[Any], stopped_by: str | None) -> Any:
    """Return what callbacks export, and what stopped training if something did."""
    exportable: list[Any] = [each for each in callbacks if isinstance(each, ExportableState)]
    exported: Any = TrainerState(stateful_callbacks=exportable).stateful_callbacks
    if stopped_by is not None:
        # in the form of a callback's state; transformers ignores those that it has no callback for
        exported[Preemption.__name__] = {"args": {}, "attributes": {"stopped_by": stopped_by}}
    return exported


class Components:
    """The parts of a trainer, made of what `transformers.Trainer` has set.

    Args:
        args: The trainer's.
        model: The trainer's.
        accelerator: The trainer's.
        batch_plan: How batches are laid out.
        metrics: What steps add up beside the loss.
        announce: Told what is being compiled.

    Raises:
        UserError: Checkpoints would go to a URL in parts of every process, or this one would take several GPUs.
    """

    def __init__(
        self,
        args: RewardConfig,
        model: nn.Module,
        accelerator: Accelerator,
        batch_plan: BatchPlan,
        metrics: RewardMetrics,
        announce: Callable[[str], None],
    ) -> None:
        self.runtime = runtime = current()
        self.batch_plan, self.metrics = batch_plan, metrics
        self.remote = None if args.output_url is None else RemoteRun(args.output_url)
        if self.remote is not None and not keeps_state(accelerator):
            raise UserError(
                f"FSDP and DeepSpeed of accelerate write a part of a checkpoint in every process, and a URL, "
                f"{args.output_url}, is written to from one. Give a folder that all processes share as output_dir."
            )
        if args.n_gpu > 1:  # which is 1 for a model that is split across GPUs
            raise UserError("nn.DataParallel is not supported: launch a process a GPU (torchrun), or show it one GPU.")
        shares_disk = self.remote is None and not args.save_on_each_node
        self.agreement = HostAgreement(runtime, accelerator)
        self.preemption = Preemption(args.time_limit, args.save_interval)
        limit = args.nonfinite_limit if keeps_state(accelerator) and not computes_in_float16(args, model) else 0
        self.nonfinite = NonfiniteGuard(limit, runtime, args.device, accelerator)
        self.log_interval = LogInterval(runtime, args.device, accelerator, metrics, self.nonfinite)
        self.recompiles = RecompileGuard(runtime, announce)
        self.checkpointer = Checkpointer(
            runtime, self.agreement, writes=args.should_save, shares_disk=shares_disk, limit=args.save_total_limit
        )
        self.checkpoints = CheckpointLoader(runtime, self.agreement, shares_disk=shares_disk)
        self.run_folder = RunFolder(Path(str(args.output_dir)), self.remote, args.should_save)
        self.step_state = StepState(runtime, scanned=args.remat_policy if args.scan_layers else None)
        self.best_model_lost: str | None = None
        """Why the last `train()` ended with its last model in the place of its best; None if it did not."""
        self.at_late_sigterm: Callable[[], None] = partial(signal.raise_signal, signal.SIGTERM)
        """What is done where a SIGTERM came too late for training to stop."""
        self.order: dict[str, Any] = {}
        """What each step of this training depends on."""
        self.build: Any = None
        """Makes a reward model of what `model_init` returns."""
        self.date: str | None = None
        """The date that the chat template has written into conversations."""
        self.seen: Mapping[int, tuple[int, ...]] = {}
        """Prompts of evaluation data that are in the training data, by the `id` of a dataset."""
        self.labels: Any = None
        """The form of its labels."""
        self.last_step: StepResult | None = None
        """What our loss computed last, for methods of subclasses that do not return it."""

    def unfinished(self, reason: str) -> Unfinished:
        """Return what to raise after a stop."""
        latest = self.checkpointer.latest
        return Unfinished(reason, latest, latest not in self.checkpointer.failed)
