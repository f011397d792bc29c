"""Components of a trainer, and its loading and saving: models, checkpoints, pushes to the Hub.

==================================  ==========================================================================
override                            purpose
==================================  ==========================================================================
save_model                          write full weights, gathered from their shards
_save_checkpoint                    pass a checkpoint's contents to the `Checkpointer`
_load_from_checkpoint               load weights into their shards
_load_best_model                    load the best model's weights into their shards
_load_optimizer_and_scheduler       load optimizer state into its shards
==================================  ==========================================================================
"""

import json
import logging
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, cached_property, partial
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
from ..checkpoint.folders import RemoteRun, RunFolder, atomic_folder, files_in, has_own_format
from ..checkpoint.identity import LAYOUT, base_identity, identity_of
from ..checkpoint.state_dict import PROGRESS_FILE, gather_full_weights, older_weights, optimizer_numbers
from ..config.checks import check_one_gpu
from ..config.reward_config import RewardConfig, is_url, private_folder
from ..errors import UserAttributeError, UserError
from ..evaluation.verdict import AnyVerdict
from ..modeling.adapters import complete_config, save_adapter_config
from ..modeling.head_spec import HeadSpec, saved_scale, set_reward_normalization, without_adapters
from ..modeling.heads import CODE_FILE
from ..modeling.losses import StepResult
from ..parallel.shard import mesh_of, save_given_weights_only
from ..report.pages import add_card
from ..runtime import current
from .batch_plan import BatchPlan
from .optimizer import StepState, unwrap
from .progress import RecompileGuard
from .statistics import StepStatistics
from .stopping import SIGTERM, HostAgreement, Preemption, Unfinished, check_alike, digest

logger = logging.getLogger(__name__)


def saves_state(accelerator: Accelerator) -> bool:
    """Return whether this package saves the training state, and not DeepSpeed."""
    return getattr(accelerator.state, "deepspeed_plugin", None) is None


class Components:
    """Components that this package adds to `transformers.Trainer`.

    Args:
        args: The trainer's settings.
        model: The trainer's model.
        accelerator: The trainer's accelerator.
        batch_plan: The layout of batches.

    Attributes:
        announce: Called with a message before a compilation, and with "" after it.
        at_late_sigterm: Called after a SIGTERM that came too late to stop training.
        base_identity: Returns the part of the identity that is read from the device, see `base_identity`.
        best_model_lost: Reason why the last `train()` could not load its best model and kept the last one; None if it
            could.
        build: Function that turns the return value of `model_init` into a reward model.
        date: Date that the chat template writes into conversations; None if it writes no date.
        is_described: Whether the command has shown the run's description, so that the log need not begin with it.
        identity: Everything that decides the numbers of the run, see `identity_of`.
        own_optimizer: Whether the user passed an optimizer.
        gradient_norms: Result of `gradient_norms` in the last step; None if it is not measured.
        last_step: Last result of the loss, for subclass methods that do not return it.
        seen: Number of evaluation prompts that are also in the training data, and of all, by the `id` of a dataset.
        verdicts: Verdict of the last evaluation, by metric prefix.

    Raises:
        UserError: Checkpoints of DeepSpeed would go to a URL, or one process would use several GPUs.
    """

    announce: Callable[[str], None] = staticmethod(logger.info)
    best_model_lost: str | None = None
    base_identity: Callable[[], dict[str, Any]] = dict
    build: Any = None
    date: str | None = None
    seen: Mapping[int, tuple[int, ...]]
    is_described = own_optimizer = False
    last_step: StepResult | None = None
    gradient_norms: tuple[list[str], torch.Tensor] | None = None

    def __init__(self, args: RewardConfig, model: nn.Module, accelerator: Accelerator, batch_plan: BatchPlan) -> None:
        self.runtime, self.batch_plan = current(), batch_plan
        self._args, self._accelerator = args, accelerator
        self._attribute_weights = tuple(HeadSpec.of(without_adapters(model).config).attributes.values())
        self._shares_disk = args.output_url is None and not args.save_on_each_node
        self.remote = None if args.output_url is None else RemoteRun(args.output_url)
        if self.remote is not None and not saves_state(accelerator):
            raise UserError(f"DeepSpeed cannot write to {args.output_url}. Set output_dir to a folder that all share.")
        check_one_gpu(args.n_gpu)  # transformers sets 1 for a model that is split across GPUs
        self.verdicts: dict[str, AnyVerdict] = {}
        self.identity: dict[str, Any] = {}
        self.at_late_sigterm: Callable[[], None] = partial(signal.raise_signal, signal.SIGTERM)

    # made when training or an evaluation begins, or a model is saved: settings may change until then
    @cached_property
    def preemption(self) -> Preemption:
        return Preemption(self._args)  # until `train()` makes its own

    @cached_property
    def agreement(self) -> HostAgreement:
        return HostAgreement(self.runtime, self._accelerator)

    @cached_property
    def checkpoints(self) -> CheckpointLoader:
        return CheckpointLoader(self.runtime, self.agreement, shares_disk=self._shares_disk)

    @cached_property
    def run_folder(self) -> RunFolder:
        return RunFolder(Path(str(self._args.output_dir)), self.remote, self._args.should_save)

    @cached_property
    def statistics(self) -> StepStatistics:
        args, accelerator = self._args, self._accelerator
        limit = args.nonfinite_limit if saves_state(accelerator) else 0  # DeepSpeed takes the steps
        return StepStatistics(self.runtime, args.device, accelerator, limit, self._attribute_weights)

    @cached_property
    def recompiles(self) -> RecompileGuard:
        return RecompileGuard(self.runtime, self.announce)

    @cached_property
    def checkpointer(self) -> Checkpointer:
        writes, limit = self._args.should_save, self._args.save_total_limit
        return Checkpointer(self.runtime, self.agreement, writes=writes, shares_disk=self._shares_disk, limit=limit)

    @cached_property
    def step_state(self) -> StepState:
        scanned = self._args.remat_policy if self._args.scan_layers else None
        return StepState(self.runtime, scanned=scanned, moments=self._args.optim_state_dtype)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the context's compilations and time from the statistics of training steps."""
        statistics, start, compiled = self.statistics, time.monotonic(), self.runtime.compile_count() or 0
        try:
            yield
        finally:
            self.recompiles.exclude((self.runtime.compile_count() or 0) - compiled)
            statistics.exclude(time.monotonic() - start)

    def unfinished(self, reason: str) -> Unfinished:
        """Return the exception to raise after an early stop.

        Args:
            reason: `SIGTERM` or `TIME_LIMIT`.
        """
        latest = self.checkpointer.latest
        return Unfinished(reason, latest, latest not in self.checkpointer.failed)


# ---- the trainer


class SavingTrainer(Trainer):
    """Trainer that saves checkpoints atomically and models with full weights."""

    args: RewardConfig
    model: PreTrainedModel  # or a peft model, which forwards attribute access
    trl_tpu: Components

    def __getattr__(self, name: str) -> Any:
        if name == "checkpointer":  # a subclass may have its own
            return self.trl_tpu.checkpointer
        if name == "trl_tpu":
            name = type(self).__name__
            raise UserAttributeError(f"{name} skips RewardTrainer's constructor. Call `super().__init__(...)`.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        """True if the model is sharded over processes.

        False during transformers' constructor: it would reject saving of a sharded model.
        """
        return "trl_tpu" in vars(self) and mesh_of(self.model) is not None

    @is_distributed_loading_by_transformers.setter
    def is_distributed_loading_by_transformers(self, _: bool) -> None:
        """Ignore the value that transformers sets."""

    @property
    def _batch_parts(self) -> int:
        """Number of parts of a batch that different processes compute."""
        return self.accelerator.num_processes // current().copies

    def _find_checkpoint(self, run: RunFolder, resume: str | bool | None) -> str | None:
        """Find the checkpoint to resume from, and lock the folder for its run or for a new run.

        Args:
            run: The run's folder.
            resume: The argument `resume_from_checkpoint` of `train`.

        Returns:
            The checkpoint's folder; None for a new run.
        """
        ours, all_gather_object = self.trl_tpu, self.trl_tpu.agreement.all_gather_object
        ours.identity = identity = identity_of(self.args, self.model, self.processing_class)
        identity["the batch"] = self.args.train_batch_size * self._batch_parts
        identity["training data"] = digest(self.train_dataset)
        if ours.agreement.count > self.accelerator.num_processes:  # accelerate does not count the hosts of a mesh
            more = {
                LAYOUT: str(ours.batch_plan.layout),
                "mesh": str(self.args.mesh_shape),
                "eval data": digest(self.eval_dataset),  # data of streams is not compared
                "the checkpoint to resume from": Path(resume).name if isinstance(resume, str) else bool(resume),
                "the checkpoints": sorted(path.name for path in Path(str(self.args.output_dir)).glob("checkpoint-*")),
            }
            check_alike(all_gather_object(identity | more))
        # the model's folder may differ between hosts: the name on the first host counts
        config = getattr(self.model, "config", None)  # a hyperparameter search makes the model later, per trial
        identity["the model"] = all_gather_object(Path(getattr(config, "name_or_path", None) or "").name)[0]
        ours.base_identity = cache(lambda: base_identity(self.model))
        if resume:
            identity |= ours.base_identity()
        on_all_ranks(run.claim, all_gather_object)
        checkpoint = ours.checkpoints.find(resume, run, ours.batch_plan.layout.name, identity)
        step = ours.checkpoints.state().global_step
        bases = {peft.base_model_name_or_path or "" for peft in getattr(self.model, "peft_config", {}).values()} - {""}
        on_all_ranks(lambda: run.begin(ours.checkpoints.place, step, bases), all_gather_object)
        return checkpoint

    def _begin(self) -> None:
        """Start or resume all counters. Called when the model and its training state are ready for the first step."""
        ours = self.trl_tpu
        ours.runtime.step_boundary()  # keep loading and placement out of the first step's program
        progress, ours.checkpoints.progress = ours.checkpoints.progress, None
        open_loss = ours.statistics.start(self.state.global_step, [] if progress is None else progress["processes"])
        self._tr_loss = torch.zeros(())  # for transformers, which adds it to the next: `statistics` sums the losses
        self._total_loss_scalar = -open_loss  # `train_loss` covers only the steps since the resume
        self._globalstep_last_logged = self.state.global_step if progress is None else progress["logged_step"]
        self.state.train_batch_size = self.args.per_device_train_batch_size  # a resumed run compares it
        ours.agreement.start(self.state.global_step)
        if ours.checkpoints.place is not None:
            step, last = self.state.global_step, self.state.max_steps
            outcome = ": the run is finished already, and no step is taken" if step >= last else ""
            logger.warning("Resuming from %s, at step %s of %s%s.", ours.checkpoints.place, step, last, outcome)
        # transformers looks for the best checkpoint only where it was saved
        if (best := ours.checkpoints.best_so_far(ours.run_folder)) is not None:
            self.state.best_model_checkpoint = best
        ours.recompiles = RecompileGuard(ours.runtime, ours.announce, ours.batch_plan.layout.shapes)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, or its adapters, as safetensors, together with config and tokenizer.

        If the save fails, for example because the disk is full, the folder keeps its previous files.

        Args:
            output_dir: Folder or URL; by default `args.output_dir`.
        """
        runtime, folder = self.trl_tpu.runtime, str(output_dir or self.args.output_dir)
        remote = self.trl_tpu.remote if folder == str(self.args.output_dir) else None
        if is_url(folder):
            folder, remote = private_folder(folder), RemoteRun(folder)

        def write() -> None:
            is_writer = self.args.should_save
            weights = gather_full_weights(self.model, runtime, keeps=is_writer) if runtime.shards_model else None
            if not is_writer:
                if weights is None:  # DeepSpeed gathers them
                    super(SavingTrainer, self).save_model(folder, _internal_call=True)
                return
            Path(folder).mkdir(parents=True, exist_ok=True)
            with atomic_folder(Path(folder)) as staging:
                with save_given_weights_only(self.model):
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

        # all hosts wait for the writer: they may read the model next
        on_all_ranks(write, runtime.all_gather_object)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint alongside training; see `trl_tpu.checkpoint.checkpointer`."""
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        write_card(self.create_model_card)
        ours = self.trl_tpu
        ours.checkpointer.wait()  # the save in progress may be the best checkpoint
        state, run = self.state, ours.run_folder
        if state.best_global_step:
            best = run.path / f"checkpoint-{state.best_global_step}"
            if best.is_dir() or state.best_global_step == state.global_step:
                state.best_model_checkpoint = str(best)
        contents = CheckpointContents(
            name=f"checkpoint-{state.global_step}",
            run=run,
            describe=self._describe_checkpoint,
            model=self.model if saves_state(self.accelerator) else None,
            optimizer=None if self.args.save_only_model else unwrap(self.optimizer),
            best=None if state.best_model_checkpoint is None else Path(state.best_model_checkpoint).name,
        )
        ours.checkpointer.save(contents)
        ours.preemption.note_save(state.global_step)
        final = run.path / contents.name
        have_on_save = [type(item).on_save is not TrainerCallback.on_save for item in self.callback_handler.callbacks]
        if self.args.push_to_hub or not self._is_original("_save_checkpoint") or any(have_on_save):
            ours.checkpointer.wait()  # these read the checkpoint's folder
        if self.args.push_to_hub and any(final.glob("*.safetensors")):
            self._report_pushes()
            if self.args.should_save and (final / CODE_FILE).is_file():  # transformers pushes known file names only
                shutil.copyfile(final / CODE_FILE, run.path / CODE_FILE)
            self._push_from_checkpoint(str(final))
        elif self.args.push_to_hub and self.args.hub_strategy != HubStrategy.END:
            logger.warning("%s is not pushed: it has no model files here. The final model is pushed.", contents.place)

    def _report_pushes(self) -> None:
        """Log the errors of failed background uploads: transformers drops them."""
        jobs: list[Any] = getattr(getattr(self, "push_in_progress", None), "jobs", [])
        for job in [job for job in jobs if job.done()]:
            jobs.remove(job)
            if not job.cancelled() and (error := job.exception()) is not None:
                logger.error("An upload to %s FAILED; the repository is unchanged: %s", self.hub_model_id, error)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if not self.trl_tpu.checkpoints.load_weights(self.model, resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        ours, best = self.trl_tpu, str(self.state.best_model_checkpoint)
        if ours.preemption.stopped_by == SIGTERM:
            return
        is_foreign = ours.remote is None and Path(best).is_dir() and not has_own_format(best)
        if is_foreign or not saves_state(self.accelerator):
            super()._load_best_model()
            return
        folder, faults = ours.checkpoints.find_best(best, ours.run_folder)
        if faults:
            ours.best_model_lost = f"{best}: {'; '.join(faults)}"
            logger.error("The best model is LOST; the last model is used instead: %s.", ours.best_model_lost)
        elif ours.checkpoints.load_weights(self.model, folder):
            ours.statistics.evaluated = saved_scale(folder)
            set_reward_normalization(self.model.config, ours.statistics.scale)
            logger.info("Loaded the best model, from %s (score: %s).", best, self.state.best_metric)
        else:  # the checkpoint has model files only
            self.state.best_model_checkpoint = folder
            super()._load_best_model()
            self.state.best_model_checkpoint = best
        ours.agreement.all_gather_object(None)  # wait: the first rank of a host removes the shared copy

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        with self.trl_tpu.step_state.unstacked():
            state = self.model, unwrap(self.optimizer), self.lr_scheduler
            if not (saves_state(self.accelerator) and self.trl_tpu.checkpoints.load_optimizer(*state, checkpoint)):
                super()._load_optimizer_and_scheduler(checkpoint)

    def _describe_checkpoint(self, folder: Path) -> None:
        """Write a checkpoint's small files. All ranks take part.

        Ranks exchange errors before each collective: if one rank raised alone, the rest would wait forever.
        """
        args, model, runtime, path = self.args, self.model, self.trl_tpu.runtime, str(folder)
        is_native, writes, has_state = saves_state(self.accelerator), args.should_save, not args.save_only_model
        all_gather_object, random_states = self.trl_tpu.agreement.all_gather_object, []

        def write_random_states() -> dict[str, bytes]:
            """Write this rank's random states, and return all random-state files in the folder by name."""
            if writes or args.world_size > 1:  # a mesh's hosts share the writer's
                self._save_rng_state(path)
            return {file.name: file.read_bytes() for file in folder.glob("rng_state*.pth")}

        if has_state:
            sums = self.trl_tpu.statistics.state() if is_native else []
            order = self.trl_tpu.identity | (self.trl_tpu.base_identity() if is_native else {})
            rank_states = on_all_ranks(write_random_states, all_gather_object)
            if self.trl_tpu.remote is not None and args.world_size > 1:
                random_states = all_gather_object(rank_states)  # the writer uploads them
        if not (is_native and self._is_original("save_model") and self._is_original("_save")):
            on_all_ranks(lambda: self.save_model(path, _internal_call=True), all_gather_object)
        else:
            are_gathered = runtime.topology().process_count > 1 and args.save_only_model
            weights = gather_full_weights(model, runtime, keeps=writes) if are_gathered else {}
            if writes and (weights or isinstance(model, PreTrainedModel)):
                with save_given_weights_only(model):
                    self._save(path, weights)
            elif writes:
                save_adapter_config(model, self.processing_class, path)
                torch.save(args, folder / TRAINING_ARGS_NAME)
        if has_state and not is_native:
            self._save_optimizer_and_scheduler(path)
        elif has_state and writes:
            numbers = optimizer_numbers(unwrap(self.optimizer), model)
            progress = {"processes": sums, "logged_step": self._globalstep_last_logged, "optimizer": numbers}
            batches = {"batches": self.trl_tpu.batch_plan.layout.name, "order": order}
            # JSON restores floats bit for bit
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
            exporting = [item for item in exporting if isinstance(item, ExportableState)]
            self.state.stateful_callbacks = TrainerState(stateful_callbacks=exporting).stateful_callbacks
            self.state.save_to_json(str(folder / TRAINER_STATE_NAME))


def write_card(create_model_card: Callable[..., None], **names: Any) -> None:
    """Write a trainer's model card. Log an OSError and go on: the model itself may still be saved."""
    try:
        create_model_card(**names)
    except OSError as error:
        logger.error("The model card could not be written: %s", error)
