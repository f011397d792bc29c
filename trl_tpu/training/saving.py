"""The parts of a run, and what it writes and reads: models, checkpoints, pushes to the Hub.

==================================  ==========================================================================
override                            what for
==================================  ==========================================================================
save_model                          weights from their shards
_save_checkpoint                    hand a checkpoint's contents to the `Checkpointer`
_load_from_checkpoint               weights back into their shards
_load_best_model                    the same
_load_optimizer_and_scheduler       the optimizer's state back into its shards
_finalize_training                  wait for saves, keep the best
_load_rng_state                     go on without a device's random numbers, where TRL wrote the checkpoint
==================================  ==========================================================================
"""

import json
import logging
import signal
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerState
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import HubStrategy

from ..checkpoint.checkpointer import CheckpointContents, Checkpointer, CheckpointLoader, on_all_ranks
from ..checkpoint.folders import RemoteRun, RunFolder, atomic_folder, files_in, is_ours
from ..checkpoint.state_dict import PROGRESS_FILE, older_weights, optimizer_numbers, whole_weights
from ..config.reward_config import RewardConfig, is_url, private_folder
from ..errors import UserError
from ..modeling.adapters import complete_config, save_adapter_config
from ..modeling.head_spec import saved_scale, set_reward_normalization
from ..modeling.losses import Loss, StepResult
from ..parallel.shard import mesh_of, saves_what_it_is_given
from ..report.pages import add_card
from ..runtime import current
from .batch_plan import BatchPlan
from .optimizer import GradientNorms, StepState, bare
from .progress import RecompileGuard
from .statistics import StepStatistics
from .stopping import SIGTERM, HostAgreement, Preemption, Unfinished, check_alike, describe_run, digest

logger = logging.getLogger(__name__)

_SETTINGS = (
    *("seed", "data_seed", "gradient_accumulation_steps", "group_by_prompt"),
    *("learning_rate", "learning_rate_end", "lr_scheduler_type", "warmup_steps", "max_steps", "num_train_epochs"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "optim_state_dtype"),
    *(field.name for field in fields(Loss)),
    *("attributes", "attribute_loss_weights", "margin_scale", "average_over", "disable_dropout", "frozen_parameters"),
    *("bf16", "nonfinite_limit"),
)
"""Settings on which the numbers of a step depend."""


def order_of_pairs(args: Any, processes: int, train_dataset: Any) -> dict[str, Any]:
    """Return everything that each step's numbers depend on: settings, batch size and training data."""
    order = {name: getattr(args, name) for name in _SETTINGS}
    return order | {"the batch": args.train_batch_size * processes, "training data": digest(train_dataset)}


def keeps_state(accelerator: Accelerator) -> bool:
    """Return whether we save the state of training; accelerate's FSDP and DeepSpeed do so themselves."""
    plugins = ("fsdp_plugin", "deepspeed_plugin")
    return all(getattr(accelerator.state, plugin, None) is None for plugin in plugins)


def is_users(method: Any) -> bool:
    """Return whether a trainer's method was written by a user: not by this package or transformers."""
    return getattr(method, "__module__", "").partition(".")[0] not in (__package__.partition(".")[0], "transformers")


class Components:
    """The parts of a trainer that this package adds to `transformers.Trainer`.

    Args:
        args: Of the trainer.
        model: Of the trainer.
        accelerator: Of the trainer.
        batch_plan: The layout of batches.
        statistics: Sums over training steps.
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
        statistics: StepStatistics,
        announce: Callable[[str], None],
    ) -> None:
        self.runtime = runtime = current()
        self.batch_plan, self.statistics = batch_plan, statistics
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
        in_float16 = args.mixed_precision == "fp16" or any(each.dtype == torch.float16 for each in model.parameters())
        statistics.judges_steps = keeps_state(accelerator) and not in_float16
        self.recompiles = RecompileGuard(runtime, announce)
        self.checkpointer = Checkpointer(
            runtime, self.agreement, writes=args.should_save, shares_disk=shares_disk, limit=args.save_total_limit
        )
        self.checkpoints = CheckpointLoader(runtime, self.agreement, shares_disk=shares_disk)
        self.run_folder = RunFolder(Path(str(args.output_dir)), self.remote, args.should_save)
        self.step_state = StepState(runtime, scanned=args.remat_policy if args.scan_layers else None)
        self.gradient_norms = GradientNorms(runtime, is_on=args.log_grad_norms)
        self.best_model_lost: str | None = None
        """Why the last `train()` ended with its last model instead of its best; None if it did not."""
        self.at_late_sigterm: Callable[[], None] = partial(signal.raise_signal, signal.SIGTERM)
        """Called where a SIGTERM came too late for training to stop."""
        self.order: dict[str, Any] = {}
        """See `order_of_pairs`."""
        self.build: Any = None
        """Makes a reward model of the return value of `model_init`."""
        self.date: str | None = None
        """The date in conversations, where the chat template writes one."""
        self.seen: Mapping[int, tuple[int, ...]] = {}
        """Prompts of evaluation data that are in the training data, by the `id` of a dataset."""
        self.labels: Any = None
        """The form of the labels of the last evaluated batch, a `Labels` without grades."""
        self.last_step: StepResult | None = None
        """The last result of our loss, for methods of subclasses that do not return it."""

    def unfinished(self, reason: str) -> Unfinished:
        """Return what to raise after a stop."""
        latest = self.checkpointer.latest
        return Unfinished(reason, latest, latest not in self.checkpointer.failed)


# ---- the trainer


class SavingTrainer(Trainer):
    """A Trainer whose checkpoints are complete or invisible, and whose saved models are whole."""

    args: RewardConfig
    model: PreTrainedModel  # or one of peft, which hands its attributes on
    trl_tpu: Components
    """What this package adds."""

    def __getattr__(self, name: str) -> Any:
        if name == "trl_tpu":
            raise UserError(f"{type(self).__name__} skips RewardTrainer's constructor: call `super().__init__(...)`.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        """Whether the model is spread over processes: not in transformers' constructor, which then refuses to save."""
        return "trl_tpu" in vars(self) and mesh_of(self.model) is not None

    @is_distributed_loading_by_transformers.setter
    def is_distributed_loading_by_transformers(self, _: bool) -> None:
        """Leave it to transformers to ask the model, and do not listen."""

    @property
    def _shards_model(self) -> bool:
        return current().shards_model

    @property
    def _batch_parts(self) -> int:
        """How many parts of a batch different processes compute."""
        return self.accelerator.num_processes // current().copies

    def _checkpoint_of(self, run: RunFolder, resume: str | bool | None) -> str | None:
        """Find the checkpoint to go on from, and make the folder its run's; a new run's, where there is none."""
        ours, all_gather_object = self.trl_tpu, self.trl_tpu.agreement.all_gather_object
        ours.order = order_of_pairs(self.args, self._batch_parts, self.train_dataset)
        if ours.agreement.count > self.accelerator.num_processes:  # hosts of a mesh, which accelerate does not count
            own = ours.order | describe_run(self.args, self.eval_dataset, resume)
            own["the layout of batches"] = ours.batch_plan.describe()  # of streams, whose data is not compared
            check_alike(all_gather_object(own))
        # each host may have a folder of its own
        config = getattr(self.model, "config", None)  # a search makes the model of each trial later
        ours.order["the model"] = all_gather_object(Path(getattr(config, "name_or_path", None) or "").name)[0]
        on_all_ranks(run.claim, all_gather_object)
        checkpoint = ours.checkpoints.find(resume, run, ours.batch_plan.layout, ours.order)
        step = ours.checkpoints.state().global_step
        bases = {each.base_model_name_or_path or "" for each in getattr(self.model, "peft_config", {}).values()} - {""}
        on_all_ranks(lambda: run.begin(ours.checkpoints.place, step, bases), all_gather_object)
        return checkpoint

    def _begin(self) -> None:
        """Begin to count, or go on counting: the model and all state are ready for the first step."""
        ours = self.trl_tpu
        ours.runtime.step_boundary()  # what placed and loaded them is no part of it
        progress, ours.checkpoints.progress = ours.checkpoints.progress, None
        parts = [] if progress is None else progress["processes"]
        open_loss = ours.statistics.start(self.state.global_step, parts)
        self._tr_loss = ours.statistics.loss_sum(open_loss)
        if progress is not None:
            self._total_loss_scalar = -open_loss  # `train_loss` is of the steps since the resume
            self._globalstep_last_logged = progress["logged_step"]
        ours.agreement.start(self.state.global_step)
        # transformers looks for the best checkpoint only where it was saved
        if (best := ours.checkpoints.best_so_far(ours.run_folder)) is not None:
            self.state.best_model_checkpoint = best
        ours.recompiles.start(ours.batch_plan.shapes)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, or its adapters, as safetensors with config and tokenizer beside it.

        A folder has all of its files afterwards or, where there is no room for them, what it had before.
        """
        runtime, folder = self.trl_tpu.runtime, str(output_dir or self.args.output_dir)
        remote = self.trl_tpu.remote if folder == str(self.args.output_dir) else None
        if is_url(folder):
            folder, remote = private_folder(folder), RemoteRun(folder)

        def write() -> None:
            weights = None
            if self._shards_model:
                weights = whole_weights(self.model, runtime, keeps=self.args.should_save)
            if not self.args.should_save:
                if weights is None:  # accelerate's FSDP and DeepSpeed gather them
                    super(SavingTrainer, self).save_model(folder, _internal_call=True)
                return
            Path(folder).mkdir(parents=True, exist_ok=True)
            with atomic_folder(Path(folder)) as staging:
                with saves_what_it_is_given(self.model):
                    if weights is not None:
                        self._save(str(staging), weights)
                    else:
                        super(SavingTrainer, self).save_model(str(staging), _internal_call=True)
                complete_config(self.model, staging)
                write_card(self.create_model_card)
                add_card(staging, Path(folder), Path(str(self.args.output_dir)))
                names = files_in(staging)
                if remote is not None:
                    remote.put(staging, names)
                    remote.delete_files(older_weights(remote.names(), names))
                for name in older_weights([path.name for path in Path(folder).iterdir()], names):
                    Path(folder, name).unlink()

        # the other hosts wait here, since they may read it next
        on_all_ranks(write, runtime.all_gather_object)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint beside training: see `trl_tpu.checkpoint.checkpointer`."""
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        write_card(self.create_model_card)
        ours = self.trl_tpu
        ours.checkpointer.wait()  # the best one so far may be on its way
        contents = self._checkpoint_contents(ours.run_folder)
        ours.checkpointer.save(contents)
        ours.preemption.note_save(self.state.global_step)
        final = contents.run.path / contents.name
        watch = [type(each).on_save is not TrainerCallback.on_save for each in self.callback_handler.callbacks]
        if self.args.push_to_hub or is_users(self._save_checkpoint) or any(watch):
            ours.checkpointer.wait()  # they look for the folder
        if self.args.push_to_hub and any(final.glob("*.safetensors")):
            self._report_pushes()
            self._push_from_checkpoint(str(final))
        elif self.args.push_to_hub and self.args.hub_strategy != HubStrategy.END:
            logger.warning("%s is not pushed: it has no model's files here. The model is, at the end.", contents.place)

    def _report_pushes(self) -> None:
        """Say which uploads beside training failed, whose errors transformers drops."""
        jobs: list[Any] = getattr(getattr(self, "push_in_progress", None), "jobs", [])
        for job in [job for job in jobs if job.done()]:
            jobs.remove(job)
            if not job.cancelled() and (error := job.exception()) is not None:
                logger.error("An upload to %s FAILED, the repository is as before: %s", self.hub_model_id, error)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        ours, stopped_by = self.trl_tpu, self.trl_tpu.preemption.stopped_by
        # a save in progress may delete older checkpoints; launchers end all processes when one has ended
        ours.checkpointer.settle()
        if stopped_by is not None:
            done, of = self.state.global_step, self.state.max_steps
            logger.warning("At step %s of %s: %s.", done, of, ours.unfinished(stopped_by))
        # with a limit of 1 it would delete all but the best: also the one to resume from after a stop, and whatever
        # else is named `checkpoint-*`. It reads the limit in the middle, and there is no other way to tell it
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            result = super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit
        if stopped_by is None and self.state.best_model_checkpoint is not None and not ours.best_model_lost:
            ours.checkpointer.keep_best_alone(ours.run_folder, Path(self.state.best_model_checkpoint).name)
        self._report_pushes()
        if ours.checkpointer.failed:
            logger.error("These checkpoints were NOT saved: %s", ", ".join(ours.checkpointer.failed))
        return result

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self.trl_tpu.checkpoints.load_weights(self.model, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        ours, best = self.trl_tpu, str(self.state.best_model_checkpoint)
        if ours.preemption.stopped_by == SIGTERM:
            return
        if not keeps_state(self.accelerator) or (ours.remote is None and Path(best).is_dir() and not is_ours(best)):
            super()._load_best_model()
            return
        folder, faults = ours.checkpoints.find_best(best, ours.run_folder)
        if faults:
            ours.best_model_lost = f"{best}: {'; '.join(faults)}"
            logger.error("The best model is LOST, and the last one is in its place: %s.", ours.best_model_lost)
        elif ours.checkpoints.load_weights(self.model, folder):
            ours.statistics.evaluated = saved_scale(folder)
            set_reward_normalization(self.model.config, ours.statistics.scale)
            logger.info("Loaded the best model, from %s (score: %s).", best, self.state.best_metric)
        else:  # it has no state of ours, but a model's files
            self.state.best_model_checkpoint = folder
            super()._load_best_model()
            self.state.best_model_checkpoint = best
        ours.agreement.all_gather_object(None)  # ranks of a host may share a copy, which the first removes

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with self.trl_tpu.step_state.one_by_one():
            ours = keeps_state(self.accelerator) and self.trl_tpu.checkpoints.load_optimizer(
                self.model, bare(self.optimizer), self.lr_scheduler, checkpoint
            )
            if not ours:
                super()._load_optimizer_and_scheduler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        try:
            super()._load_rng_state(checkpoint)
        except KeyError as error:
            if error.args != (self.args.device.type,):
                raise
            logger.warning("%s has no random numbers of this device, which start anew.", checkpoint)

    def _checkpoint_contents(self, run: RunFolder) -> CheckpointContents:
        """Return the contents of a checkpoint of the current step."""
        state, args = self.state, self.args
        if state.best_global_step:
            best = run.path / f"checkpoint-{state.best_global_step}"
            if best.is_dir() or state.best_global_step == state.global_step:
                state.best_model_checkpoint = str(best)
        return CheckpointContents(
            name=f"checkpoint-{state.global_step}",
            run=run,
            describe=self._describe_checkpoint,
            model=self.model if keeps_state(self.accelerator) else None,
            optimizer=None if args.save_only_model else bare(self.optimizer),
            best=None if state.best_model_checkpoint is None else Path(state.best_model_checkpoint).name,
        )

    def _describe_checkpoint(self, folder: Path) -> None:
        """Write a checkpoint's small files. All ranks take part.

        A rank that raises before a collective leaves the others waiting in it, so errors are exchanged before each.
        """
        args, model, runtime, path = self.args, self.model, self.trl_tpu.runtime, str(folder)
        ours, writes, has_state = keeps_state(self.accelerator), args.should_save, not args.save_only_model
        all_gather_object, random_states = self.trl_tpu.agreement.all_gather_object, []
        if has_state:
            sums = self.trl_tpu.statistics.state(self._tr_loss) if ours else []
            save = self._save_rng_state if writes or args.world_size > 1 else None  # hosts of a mesh have the writer's
            own_states = on_all_ranks(lambda: _write_random_states(save, folder), all_gather_object)
            if self.trl_tpu.remote is not None and args.world_size > 1:
                random_states = all_gather_object(own_states)  # the writer uploads them
        if not ours or is_users(self.save_model) or is_users(self._save):
            on_all_ranks(lambda: self.save_model(path, _internal_call=True), all_gather_object)
        else:
            are_gathered = runtime.topology().process_count > 1 and args.save_only_model
            weights = whole_weights(model, runtime, keeps=writes) if are_gathered else {}
            if writes and (weights or isinstance(model, PreTrainedModel)):
                with saves_what_it_is_given(model):
                    self._save(path, weights)
            elif writes:
                save_adapter_config(model, self.processing_class, path)
                torch.save(args, folder / TRAINING_ARGS_NAME)
        if has_state and not ours:
            self._save_optimizer_and_scheduler(path)
        elif has_state and writes:
            numbers = optimizer_numbers(bare(self.optimizer), model)
            progress = {"processes": sums, "logged_step": self._globalstep_last_logged, "optimizer": numbers}
            batches = {"batches": self.trl_tpu.batch_plan.layout, "order": self.trl_tpu.order}
            # floats come back to the bit
            (folder / PROGRESS_FILE).write_text(json.dumps(progress | batches), encoding="utf-8")
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)  # type: ignore[union-attr]
        if has_state:
            self._save_scaler(path)
        if writes:
            complete_config(model, path)
            add_card(folder, folder, Path(str(args.output_dir)))
            for states in random_states:
                for name, state in states.items():
                    (folder / name).write_bytes(state)
            preemption = self.trl_tpu.preemption
            exporting = [*self.callback_handler.callbacks, self.control, *[preemption] * bool(preemption.stopped_by)]
            exporting = [each for each in exporting if isinstance(each, ExportableState)]
            self.state.stateful_callbacks = TrainerState(stateful_callbacks=exporting).stateful_callbacks
            self.state.save_to_json(str(folder / TRAINER_STATE_NAME))


def _write_random_states(save: Callable[[str], None] | None, folder: Path) -> dict[str, bytes]:
    """Write this rank's random states, and return the contents of such files in the folder, by name."""
    if save is not None:
        save(str(folder))
    return {path.name: path.read_bytes() for path in folder.glob("rng_state*.pth")}


def write_card(create_model_card: Callable[..., None], **names: Any) -> None:
    """Write a trainer's model card; where that fails, the model is saved, or its save says more."""
    try:
        create_model_card(**names)
    except OSError as error:
        logger.error("The model card could not be written: %s", error)
