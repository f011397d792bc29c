"""The edges of transformers' Trainer at which state is written and read.

A save copies the state to the host, each host what its devices hold, and goes on training; a thread writes the files
aside, seals them with a manifest, and renames the folder. Such a checkpoint has transformers' files (on one host the
model's weights too, for ``from_pretrained``) and beside them `state/` and `progress.json`, from which training resumes
on any mesh, and in plain torch.
"""

import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.trainer_utils import rotate_checkpoints

from ..parallel.hosts import Host
from ..runtime import Runtime
from .background import BackgroundSaves
from .checkpoint import (
    SCHEDULER_FILE,
    STATE_FOLDER,
    optimizer_numbers,
    optimizer_tensors,
    read_optimizer,
    read_progress,
    read_scheduler,
    read_torch_optimizer,
    read_weights,
    trained_tensors,
    write_progress,
)
from .export import export_model, exported_tensors, stream_model
from .manifest import ASIDE_FOLDER, check_given, digests, faults, files_in, newest_good, publish
from .metrics import RewardMetrics

logger = logging.getLogger(__name__)


@dataclass
class _Save:
    """A checkpoint on its way to the disk."""

    name: str  # of the folder, "checkpoint-12"
    run_folder: Path
    weights: dict[str, Any] = field(default_factory=dict)  # on the device, then on the host
    state: dict[str, Any] = field(default_factory=dict)
    best: str | None = None  # the checkpoint that must not be deleted

    def copy_to_host(self, runtime: Runtime) -> None:
        """Both in one copy, of what is in both only one."""
        marked = {f"exported {name}": tensor for name, tensor in self.weights.items()}
        copies = runtime.snapshot(marked | self.state)
        self.weights = {name: copies[f"exported {name}"] for name in self.weights}
        self.state = {name: copies[name] for name in self.state}

    @property
    def aside(self) -> Path:
        return self.run_folder / ASIDE_FOLDER / self.name

    @property
    def final(self) -> Path:
        return self.run_folder / self.name


class SavingTrainer(Trainer):
    """A Trainer that saves state from a mesh of devices and loads it back into its shards."""

    runtime: Runtime
    host: Host
    reward_metrics: RewardMetrics
    model: PreTrainedModel  # or one of peft, which hands its attributes on
    optimizer: Optimizer
    lr_scheduler: LambdaLR  # as transformers types it; any scheduler
    _save_under_way: _Save | None = None  # while its state is copied
    _progress: dict[str, Any] | None = None  # of the checkpoint that training resumes from

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.saves = BackgroundSaves()
        super().__init__(*args, **kwargs)

    @property
    def batch_layout(self) -> str:
        """In a word, how batches are laid out: what a resumed run must not change."""
        return "padded"

    # ---- writing

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, or its adapters, as safetensors with config and tokenizer beside it."""
        save = self._save_under_way
        if save is not None and self._keeps_state and self.runtime.process_count() == 1:
            save.weights = exported_tensors(self.model)
            return None
        if save is not None and not self.args.save_only_model:
            return None  # of several hosts each writes its part of the state
        if self.runtime.name == "native":
            return super().save_model(output_dir, _internal_call)
        folder = output_dir or str(self.args.output_dir)
        if isinstance(self.model, PreTrainedModel):
            self._save(folder, state_dict={})  # all but the weights
            stream_model(self.model, self.runtime, folder, writes=self.args.should_save)
        else:
            self._save(folder, export_model(self.model, self.runtime))
        self.runtime.barrier()  # the other hosts may read it next
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
        return None

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._save_under_way is None or not self._keeps_state:
            return super()._save_optimizer_and_scheduler(output_dir)
        self._save_under_way.state = trained_tensors(self.model) | optimizer_tensors(self._torch_optimizer, self.model)
        (open_loss,) = self.runtime.fetch([self._tr_loss])
        progress = {
            "metrics": self.reward_metrics.state_dict(),
            "open_loss": open_loss.sum().item(),
            "logged_step": self._globalstep_last_logged,
            "optimizer": optimizer_numbers(self._torch_optimizer, self.model),
            "batches": self.batch_layout,
        }
        if self.args.should_save:
            write_progress(output_dir, progress)
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_FILE))
        return None

    def _save_rng_state(self, output_dir: str) -> None:
        if self.runtime.name == "native" or self.args.should_save:
            super()._save_rng_state(output_dir)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Copy the state, and write it as a checkpoint beside training: complete or invisible."""
        began = time.monotonic()
        self.saves.wait()
        save = _Save(f"checkpoint-{self.state.global_step}", Path(super()._get_output_dir(trial)))
        error = _error_of(lambda: self._take_state(save, model, trial))
        problem = next((said for said in self.runtime.from_everyone(error and str(error)) if said), None)
        if problem is not None:
            self.saves.fail(str(save.final), error or OSError(f"on another host: {problem}"))
        elif self._takes_part:
            waited = time.monotonic() - began
            self.saves.submit(str(save.final), lambda: self._write(save, waited))
        if self.args.push_to_hub or any(map(_watches_saves, self.callback_handler.callbacks)):
            self.saves.wait()  # they look for the folder
        if self.args.push_to_hub and save.final.is_dir():
            self._report_pushes()
            super()._push_from_checkpoint(str(save.final))

    def _take_state(self, save: _Save, model: nn.Module, trial: Any) -> None:
        """transformers' own `_save_checkpoint`, aside, with the tensors kept for later."""
        self.runtime.step_boundary()
        if self.args.should_save:
            shutil.rmtree(save.aside.parent, ignore_errors=True)
            save.aside.mkdir(parents=True)
        self._meet()
        self._save_under_way = save
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._save_under_way = None
        if self._takes_part:
            save.copy_to_host(self.runtime)
        best = self.state.best_model_checkpoint
        if best is not None and Path(best).is_relative_to(save.aside.parent):
            self.state.best_model_checkpoint = str(save.final.with_name(Path(best).name))
            if self.args.should_save:
                self.state.save_to_json(str(save.aside / "trainer_state.json"))
        save.best = self.state.best_model_checkpoint
        self._meet()

    def _write(self, save: _Save, waited: float) -> None:
        """The part of a save that needs no device. On several hosts all take part, each on a thread."""
        began = time.monotonic()
        try:
            if save.weights:
                self._save(str(save.aside), self.runtime.assemble(save.weights))
            if save.state:
                self.runtime.write(save.state, save.aside / STATE_FOLDER)
            files = self._digests(save.aside)
            if self.args.should_save:
                publish(save.aside, save.final, files)
        finally:
            if self.args.should_save:  # also when the disk is full
                shutil.rmtree(save.aside.parent, ignore_errors=True)
        if self.args.should_save:
            limit, folder = self.args.save_total_limit, str(save.run_folder)
            rotate_checkpoints(
                output_dir=folder, save_total_limit=limit, best_model_checkpoint=save.best, use_mtime=True
            )
        took = time.monotonic() - began
        logger.info("%s: training waited %.2f s, writing took %.2f s beside it.", save.final, waited, took)

    def _digests(self, folder: Path) -> dict[str, Any]:
        """Sizes and checksums of a checkpoint's files, each host reading its share of those that all see."""
        self.runtime.from_everyone(None, while_saving=True)  # all have written
        names = files_in(folder)
        try:
            own: Any = digests(folder, names[self.host.index :: self.host.count] if self._shares_folder else names)
        except OSError as error:
            own = str(error)
        said = self.runtime.from_everyone(own, while_saving=True)
        if problems := [problem for problem in said if isinstance(problem, str)]:
            raise OSError(problems[0])
        return dict(file for part in (said if self._shares_folder else [own]) for file in part.items())

    def _get_output_dir(self, trial: Any) -> str:
        if self._save_under_way is not None:
            return str(self._save_under_way.aside.parent)
        return super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Not while it is written: the upload runs beside training, and the folder is about to be renamed."""

    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        self._report_pushes()

    def _report_pushes(self) -> None:
        """Say which uploads beside training failed, whose errors transformers drops."""
        jobs: list[Any] = getattr(getattr(self, "push_in_progress", None), "jobs", [])
        for job in [job for job in jobs if job.done()]:
            jobs.remove(job)
            if not job.cancelled() and (error := job.exception()) is not None:
                logger.error("An upload to %s FAILED, the repository is as before: %s", self.hub_model_id, error)

    def _meet(self) -> None:
        self.runtime.barrier()
        if self.accelerator.num_processes > 1:
            self.accelerator.wait_for_everyone()

    @property
    def _keeps_state(self) -> bool:
        """Whether checkpoints hold state of ours; accelerate's FSDP and DeepSpeed have their own."""
        return not (self.is_fsdp_enabled or self.is_deepspeed_enabled)

    @property
    def _takes_part(self) -> bool:
        """Whether this process has state to write: on XLA all have, of accelerate's processes the first."""
        return self.runtime.name == "xla" or self.args.should_save

    @property
    def _shares_folder(self) -> bool:
        return not self.args.save_on_each_node

    @property
    def _torch_optimizer(self) -> Optimizer:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    # ---- reading

    def checkpoint_to_resume(self, asked: str | bool | None) -> str | None:
        """The folder of the checkpoint that ``resume_from_checkpoint`` means, whose files are whole.

        Raises:
            ValueError: None is whole, or the one given by name is damaged or of other batches.
        """
        if not asked:
            return None
        if asked is True:
            folder = newest_good(str(self.args.output_dir), self._examine)
        else:
            check_given(folder := os.fspath(asked), self._examine)
        self._progress = read_progress(folder)
        if self._progress is not None and self._progress["batches"] != self.batch_layout:
            raise ValueError(
                f"The checkpoint {folder} was trained on {self._progress['batches']} batches, and these are "
                f"{self.batch_layout}: the run would not go on to the bit. Resume with the `packing` it had, or start "
                "from its weights: give its folder as the model."
            )
        return folder

    def _examine(self, folder: Path) -> list[str]:
        own = faults(folder, (self.host.index, self.host.count) if self._shares_folder else (0, 1))
        return [fault for said in self.runtime.from_everyone(own) for fault in said]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if Path(resume_from_checkpoint, STATE_FOLDER).is_dir():
            read_weights(self.model, resume_from_checkpoint, self.runtime)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = str(self.state.best_model_checkpoint)
        if Path(best, STATE_FOLDER).is_dir():
            logger.info("Loading the best model, from %s (score: %s).", best, self.state.best_metric)
            read_weights(self.model, best, self.runtime)
        else:
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return None
        if self._progress is not None and self._keeps_state:
            numbers = self._progress["optimizer"]
            read_optimizer(self._torch_optimizer, self.model, checkpoint, numbers, self.runtime)
            read_scheduler(self.lr_scheduler, checkpoint)
            self.reward_metrics.load_state_dict(self._progress["metrics"])
        elif self.runtime.name == "native":
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            read_torch_optimizer(self._torch_optimizer, self.lr_scheduler, checkpoint, self.runtime)
        return None

    def resume_loss(self) -> None:
        """Go on adding up the loss where the checkpoint was between two logs."""
        if self._progress is None:
            return
        open_loss = self._progress["open_loss"]
        self._tr_loss = self.runtime.upload(torch.tensor([open_loss]), self.args.device)
        self._total_loss_scalar = -open_loss  # `train_loss` is of the steps since the resume, as in transformers
        self._globalstep_last_logged = self._progress["logged_step"]
        self._progress = None

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.saves.wait()
        result = super()._finalize_training(*args, **kwargs)
        if self.saves.failed:
            logger.error("These checkpoints were NOT saved: %s", ", ".join(self.saves.failed))
        return result


def _error_of(action: Callable[[], None]) -> Exception | None:
    """What the file system said to ``action``, if it failed."""
    try:
        action()
    except (OSError, SafetensorError) as error:
        return error
    return None


def _watches_saves(callback: TrainerCallback) -> bool:
    return type(callback).on_save is not TrainerCallback.on_save
