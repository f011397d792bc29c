"""What a checkpoint of a run contains: transformers' own small files, and what its training goes on from."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, TrainerState
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState

from ..checkpoint.run_folder import RunFolder
from ..checkpoint.saver import Contents, together
from ..checkpoint.state_dict import optimizer_numbers, whole_weights, write_progress
from ..modeling.adapters import complete_config, save_adapter_config
from ..parallel.ranks import saves_what_it_is_given
from ..report.model_card import add_card
from .optimizer import bare
from .preemption import Preemption


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
        save = trainer._save_rng_state if writes or not runtime.shares_mesh else None  # a mesh has the writer's
        own_states = together(partial(_write_random_states, save, folder), all_gather_object)
        if trainer.trl_tpu.remote is not None and not runtime.shares_mesh:
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
        write_progress(folder, progress)
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
