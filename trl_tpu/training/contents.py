"""What a checkpoint of a run contains: transformers' own small files, and what its training goes on from."""

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, Trainer, TrainerState
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from ..checkpoint.run_folder import RunFolder
from ..checkpoint.saver import Contents
from ..checkpoint.state_dict import optimizer_numbers, whole_weights, write_progress
from ..modeling.adapters import complete_config, save_adapter_config
from .optimizer import bare
from .preemption import Preemption
from .same_run import settings_of

if TYPE_CHECKING:
    from .device_trainer import DeviceTrainer


def keeps_state(trainer: Trainer) -> bool:
    """Return whether checkpoints hold state of ours; accelerate's FSDP and DeepSpeed have their own."""
    return not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled)


def contents_of(trainer: "DeviceTrainer", run: RunFolder) -> Contents:
    """Return what the checkpoint of the step that ``trainer`` is at contains."""
    state, args = trainer.state, trainer.args
    if state.best_global_step:
        best = run.path / f"checkpoint-{state.best_global_step}"
        if best.is_dir() or state.best_global_step == state.global_step:
            state.best_model_checkpoint = str(best)
    return Contents(
        name=f"checkpoint-{state.global_step}",
        run=run,
        describe=partial(_describe, trainer),
        model=trainer.model if keeps_state(trainer) else None,
        optimizer=None if args.save_only_model else bare(trainer.optimizer),
        save_weights=lambda folder, weights: trainer._save(str(folder), weights),
        best=None if state.best_model_checkpoint is None else Path(state.best_model_checkpoint).name,
    )


def _describe(trainer: "DeviceTrainer", folder: Path) -> None:
    """Write what is small, which `Checkpointer` puts the tensors beside. All processes take part."""
    args, path = trainer.args, str(folder)
    sums: list[Any] = []
    if not args.save_only_model:  # first what all processes gather: a writer whose disk is full would leave them alone
        if keeps_state(trainer):
            sums = trainer.log_interval.state(trainer._tr_loss)
        _save_random_states(trainer, folder)
    _describe_model(trainer, path)
    if not args.save_only_model:
        if keeps_state(trainer):
            _save_progress(trainer, folder, sums)
        else:
            trainer._save_optimizer_and_scheduler(path)
        trainer._save_scaler(path)
    if args.should_save:
        trainer.state.stateful_callbacks = _state_of_callbacks(trainer)
        trainer.state.save_to_json(os.path.join(path, TRAINER_STATE_NAME))


def _describe_model(trainer: "DeviceTrainer", path: str) -> None:
    """Write config and tokenizer, and the weights too where `Checkpointer` does not."""
    args, model, runtime = trainer.args, trainer.model, trainer.runtime
    if not keeps_state(trainer):
        Trainer.save_model(trainer, path, _internal_call=True)
    elif runtime.topology().process_count > 1 and args.save_only_model:
        trainer._save(path, whole_weights(model, runtime, keeps=args.should_save))
    elif isinstance(model, PreTrainedModel):
        trainer._save(path, {})
    elif args.should_save:
        save_adapter_config(model, trainer.processing_class, path)
    if args.should_save:
        complete_config(model, path)


def _save_random_states(trainer: "DeviceTrainer", folder: Path) -> None:
    """Write where random numbers are: of a mesh the writer's, else those of every process.

    For a checkpoint at a URL each process has a folder of its own, and the writer's is uploaded.
    """
    args = trainer.args
    if trainer.runtime.shares_mesh and not args.should_save:
        return
    trainer._save_rng_state(str(folder))
    if trainer.remote is not None and not trainer.runtime.shares_mesh:
        own = {path.name: path.read_bytes() for path in folder.glob("rng_state*.pth")}
        for states in trainer.agreement.all_gather_object(own):
            for name, state in states.items() if args.should_save else ():
                (folder / name).write_bytes(state)


def _save_progress(trainer: "DeviceTrainer", folder: Path, sums: list[Any]) -> None:
    """Write `progress.json`, with the open ``sums`` of all processes, and the schedule's place."""
    if trainer.args.should_save:
        progress = {
            "processes": sums,
            "logged_step": trainer._globalstep_last_logged,
            "optimizer": optimizer_numbers(bare(trainer.optimizer), trainer.model),
            "batches": trainer.batch_plan.layout,
            "order": trainer.order,
            "settings": settings_of(trainer.args),
        }
        write_progress(folder, progress)
        torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)  # type: ignore[union-attr]


def _state_of_callbacks(trainer: "DeviceTrainer") -> Any:
    """Return what callbacks export, and what stopped training if something did."""
    callbacks = [*trainer.callback_handler.callbacks, trainer.control]
    exportable: list[Any] = [each for each in callbacks if isinstance(each, ExportableState)]
    exported: Any = TrainerState(stateful_callbacks=exportable).stateful_callbacks
    if trainer.stopped_by is not None:
        # in the form of a callback's state; transformers ignores those that it has no callback for
        exported[Preemption.__name__] = {"args": {}, "attributes": {"stopped_by": trainer.stopped_by}}
    return exported
