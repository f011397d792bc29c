"""The edges of transformers' Trainer at which state is written.

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
from accelerate.utils import gather_object
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel, TrainerCallback

from ..checkpoint.background import BackgroundSaves
from ..checkpoint.manifest import (
    ASIDE_FOLDER,
    MANIFEST_FILE,
    digests,
    files_in,
    publish,
    retire,
    seal,
    surplus_checkpoints,
)
from ..checkpoint.model_writer import export_model, exported_tensors, stream_model
from ..checkpoint.remote import RemoteRun, is_url, staging_folder
from ..checkpoint.state_dict import (
    SCHEDULER_FILE,
    STATE_FOLDER,
    optimizer_numbers,
    optimizer_tensors,
    trained_tensors,
    write_progress,
)
from ..modeling.adapters import is_peft_model
from ..modeling.stacked import by_layer, is_stacked
from ..runtime import Runtime
from .resuming import ResumingTrainer

logger = logging.getLogger(__name__)


@dataclass
class _Save:
    """A checkpoint on its way to the disk."""

    name: str  # of the folder, "checkpoint-12"
    run_folder: Path
    weights: dict[str, Any] = field(default_factory=dict)  # on the device, then on the host
    state: dict[str, Any] = field(default_factory=dict)
    best: str | None = None  # the checkpoint that must not be deleted

    def copy_to_host(self, model: nn.Module, runtime: Runtime) -> None:
        """Both in one copy, of what is in both only one, and every layer's by its own name."""
        marked = {f"exported {name}": tensor for name, tensor in self.weights.items()}
        copies = by_layer(model, runtime.local_shards(marked | self.state), runtime.index_shards)
        mark = "exported "
        self.weights = {name.removeprefix(mark): copy for name, copy in copies.items() if name.startswith(mark)}
        self.state = {name: copy for name, copy in copies.items() if not name.startswith(mark)}

    @property
    def aside(self) -> Path:
        return self.run_folder / ASIDE_FOLDER / self.name

    @property
    def final(self) -> Path:
        return self.run_folder / self.name


class SavingTrainer(ResumingTrainer):
    """A Trainer that saves state from a mesh of devices while it trains on."""

    _save_under_way: _Save | None = None  # while its state is copied

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.saves = BackgroundSaves()
        super().__init__(*args, **kwargs)

    # ---- writing

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model, or its adapters, as safetensors with config and tokenizer beside it."""
        save = self._save_under_way
        if save is not None and self._keeps_state and self.runtime.process_count() == 1:
            save.weights = exported_tensors(self.model)
            return None
        if save is not None and not self.args.save_only_model:
            return self._save_description(str(output_dir))  # of several hosts each writes its part of the state
        folder = str(output_dir or self.args.output_dir)
        remote = self.remote if folder == str(self.args.output_dir) else None
        if is_url(folder):
            folder, remote = staging_folder(folder), RemoteRun(folder)
        if not self.runtime.shares_mesh:
            super().save_model(folder, _internal_call=True)
        elif isinstance(self.model, PreTrainedModel) and not is_stacked(self.model):
            self._save(folder, state_dict={})  # all but the weights
            stream_model(self.model, self.runtime, folder, writes=self.args.should_save)
        else:
            self._save(folder, export_model(self.model, self.runtime))
        if remote is not None and self.args.should_save:
            remote.put(Path(folder), [path.name for path in Path(folder).iterdir() if path.is_file()])
        self.runtime.barrier()  # the other hosts may read it next
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
        return None

    def _save_description(self, folder: str) -> None:
        """Write what the model in a state is: config and tokenizer, or the adapters' configuration."""
        if isinstance(self.model, PreTrainedModel):
            self._save(folder, state_dict={})
        elif is_peft_model(self.model) and self.args.should_save:
            for config in self.model.peft_config.values():
                config.save_pretrained(folder)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._save_under_way is None or not self._keeps_state:
            return super()._save_optimizer_and_scheduler(output_dir)
        self._save_under_way.state = trained_tensors(self.model) | optimizer_tensors(self._torch_optimizer, self.model)
        (open_loss,) = self.runtime.fetch([self._tr_loss])
        own = {"metrics": self.reward_metrics.state_dict(), "open_loss": open_loss.sum().item()}
        progress = {
            "processes": gather_object([own]) if self.accelerator.num_processes > 1 else [own],
            "logged_step": self._globalstep_last_logged,
            "optimizer": optimizer_numbers(self._torch_optimizer, self.model),
            "batches": self._batch_layout,
            "order": dict(self._order),
        }
        if self.args.should_save:
            write_progress(output_dir, progress)
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_FILE))
        return None

    def _save_rng_state(self, output_dir: str) -> None:
        if not self.runtime.shares_mesh or self.args.should_save:
            super()._save_rng_state(output_dir)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Copy the state, and write it as a checkpoint beside training: complete or invisible."""
        began = time.monotonic()
        self.saves.wait()
        save = _Save(f"checkpoint-{self.state.global_step}", Path(super()._get_output_dir(trial)))

        def take_state() -> None:
            self._take_state(save, lambda: super(SavingTrainer, self)._save_checkpoint(model, trial))

        if self._all_could(lambda: self._make_room(save), save) and self._all_could(take_state, save):
            waited = time.monotonic() - began
            if self._takes_part:
                self.saves.submit(self._place_of(save), lambda: self._write(save, waited))
        if self.args.push_to_hub or any(map(_watches_saves, self.callback_handler.callbacks)):
            self.saves.wait()  # they look for the folder
        if self.args.push_to_hub and save.final.is_dir():
            self._report_pushes()
            super()._push_from_checkpoint(str(save.final))

    def _make_room(self, save: _Save) -> None:
        if self._writes_here:
            shutil.rmtree(save.aside.parent, ignore_errors=True)
            save.aside.mkdir(parents=True)

    def _take_state(self, save: _Save, save_checkpoint: Callable[[], None]) -> None:
        """transformers' own `_save_checkpoint`, aside, with the tensors kept for later."""
        self.runtime.step_boundary()
        self._save_under_way = save
        try:
            save_checkpoint()
        finally:
            self._save_under_way = None
        if self._takes_part:
            save.copy_to_host(self.model, self.runtime)
        best = self.state.best_model_checkpoint
        if best is not None and Path(best).is_relative_to(save.aside.parent):
            self.state.best_model_checkpoint = str(save.final.with_name(Path(best).name))
            if self.args.should_save:
                self.state.save_to_json(str(save.aside / "trainer_state.json"))
        save.best = self.state.best_model_checkpoint

    def _all_could(self, action: Callable[[], None], save: _Save) -> bool:
        """Whether every process could do its part; else the save has failed on all."""
        error = _error_of(action)
        problem = next((fault for fault in self._all_gather_object(error and str(error)) if fault), None)
        if problem is not None:
            self.saves.fail(self._place_of(save), error or OSError(f"on another host: {problem}"))
            if self._writes_here:
                shutil.rmtree(save.aside.parent, ignore_errors=True)
        return problem is None

    def _write(self, save: _Save, waited: float) -> None:
        """The part of a save that needs no device. On several hosts all take part, each on a thread."""
        began = time.monotonic()
        try:
            if save.weights:
                self._save(str(save.aside), self.runtime.join_shards(save.weights))
            if save.state:
                self.runtime.write(save.state, save.aside / STATE_FOLDER)
            if self.remote is not None and self.args.should_save:
                self.remote.delete(save.name)  # what a run on another mesh left there would be read with these files
            files = self._digests(save.aside)
            if self.remote is not None:
                self.remote.put(save.aside, files_in(save.aside), save.name)
            self.runtime.all_gather_object(None, while_saving=True)  # the manifest comes last
            try:
                if self.args.should_save:
                    self._publish(save, files)
            finally:
                self.runtime.all_gather_object(
                    None, while_saving=True
                )  # no host goes on before the checkpoint is there
        finally:
            if self._writes_here:  # also when the disk is full
                shutil.rmtree(save.aside.parent, ignore_errors=True)
        took = time.monotonic() - began
        logger.info("%s: training waited %.2f s, writing took %.2f s beside it.", self._place_of(save), waited, took)

    def _publish(self, save: _Save, files: dict[str, Any]) -> None:
        """Make the checkpoint visible, and only then delete older ones."""
        limit = self.args.save_total_limit
        if self.remote is not None:
            seal(save.aside, files)
            self.remote.put(save.aside, [MANIFEST_FILE], save.name)
            self.remote.rotate(limit, save.best and Path(save.best).name, save.name)
            return
        publish(save.aside, save.final, files)
        for surplus in surplus_checkpoints(save.final, limit, save.best):
            retire(surplus, save.aside.parent)

    def _place_of(self, save: _Save) -> str:
        return str(save.final) if self.remote is None else f"{self.remote.url}/{save.name}"

    def _digests(self, folder: Path) -> dict[str, Any]:
        """Sizes and checksums of a checkpoint's files, each host reading its share of those that all see."""
        self.runtime.all_gather_object(None, while_saving=True)  # all have written
        names = files_in(folder)
        try:
            own: Any = digests(folder, names[self.host.index :: self.host.count] if self._shares_disk else names)
        except OSError as error:
            own = str(error)
        said = self.runtime.all_gather_object(own, while_saving=True)
        if problems := [problem for problem in said if isinstance(problem, str)]:
            raise OSError(problems[0])
        return dict(file for part in ([own] if self.args.save_on_each_node else said) for file in part.items())

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

    @property
    def _takes_part(self) -> bool:
        """Whether this process has state to write: on XLA all have, of accelerate's processes the first."""
        return self.runtime.shares_mesh or self.args.should_save

    @property
    def _writes_here(self) -> bool:
        """Whether this process makes and removes the folder that it writes to."""
        return self.args.should_save or (self._takes_part and not self._shares_disk)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.saves.wait()
        if self.accelerator.num_processes > 1:
            self.accelerator.wait_for_everyone()  # launchers end all processes when one has ended
        result = super()._finalize_training(*args, **kwargs)
        if self.saves.failed:
            logger.error("These checkpoints were NOT saved: %s", ", ".join(self.saves.failed))
        return result


def _error_of(action: Callable[[], None]) -> Exception | None:
    """What the file system said to ``action``, if it failed; torch.save says it in a RuntimeError."""
    try:
        action()
    except (OSError, SafetensorError, RuntimeError) as error:
        return error
    return None


def _watches_saves(callback: TrainerCallback) -> bool:
    """Whether a callback may look for what was saved; those of this package do not."""
    kind = type(callback)
    return kind.on_save is not TrainerCallback.on_save and not kind.__module__.startswith(f"{__package__}.")
