"""What is added up between two logs (loss, rewards, tokens, steps that are not finite): logged, saved, resumed."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object

from ..data.loader import rows_of_step
from ..evaluation.reward_sums import RewardSums
from ..modeling.readers import set_scale
from ..parallel.chips import GiB, peak_flops_of
from .metrics import on_host, over_processes
from .nonfinite import Counted

if TYPE_CHECKING:
    from .device_trainer import DeviceTrainer


def log_step(
    trainer: "DeviceTrainer",
    loss_sum_1: torch.Tensor,
    grad_norm: torch.Tensor | float | None,
    start_time: float,
    learning_rate: float | None,
) -> None:
    """Log what was added up since the last log, by one stop of the device, and start anew.

    Args:
        grad_norm: Of the last step; None after an epoch without a step, as the rate is then.

    Raises:
        FloatingPointError: Too many steps in a row were not finite.
    """
    runtime, nonfinite, metrics = trainer.runtime, trainer.nonfinite, trainer.reward_metrics
    norm = grad_norm if isinstance(grad_norm, torch.Tensor) else torch.tensor(float(grad_norm or 0.0))
    loss, norm, counts, *sums = runtime.fetch([loss_sum_1, norm, nonfinite.device_counts, *metrics.device_sums])
    trainer.recompiles.settle()
    reward_sums, loss_sum = over_processes(trainer.accelerator, on_host(sums), loss.item())
    counted = nonfinite.close(counts)
    steps = trainer.state.global_step - trainer._globalstep_last_logged - counted.nonfinite
    logs = {"loss": loss_sum / steps} if steps else {}
    if grad_norm is not None and not counted.in_a_row:
        logs["grad_norm"] = norm.item()
    logs["learning_rate"] = trainer._get_learning_rate() if learning_rate is None else learning_rate
    logs |= metrics.close(reward_sums)
    set_scale(trainer.model.config, metrics.scale)
    logs |= trainer.throughput.close(reward_sums, trainer.state.global_step)
    if runtime.compiles:
        logs["compiled_programs"] = runtime.compile_count()
    if (memory := runtime.most_memory(trainer.args.device)) is not None:
        logs["memory_gib"] = memory / GiB
    if nonfinite.is_on:
        logs["nonfinite"] = counted.nonfinite
    trainer._tr_loss = nonfinite.start_loss_sum()
    trainer._total_loss_scalar += loss_sum
    trainer._globalstep_last_logged = trainer.state.global_step
    trainer.store_flos()
    trainer.log(logs, start_time)
    _stop_if_nonfinite(trainer, counted)


def leave_nonfinite_out(trainer: "DeviceTrainer") -> None:
    """Take the steps that are not finite out of the mean that `train_loss` is, also those since the last log.

    Raises:
        FloatingPointError: Too many of them were in a row.
    """
    nonfinite = trainer.nonfinite
    counts, open_loss = trainer.runtime.fetch([nonfinite.device_counts, trainer._tr_loss])
    _stop_if_nonfinite(trainer, nonfinite.close(counts))
    if nonfinite.total:
        steps = trainer.state.global_step - trainer._initial_global_step
        finite = steps - nonfinite.total
        total = trainer._total_loss_scalar + open_loss.item()
        trainer._tr_loss = nonfinite.start_loss_sum()
        trainer._total_loss_scalar = total * steps / finite if finite > 0 else float("nan")


def _stop_if_nonfinite(trainer: "DeviceTrainer", counted: Counted) -> None:
    """End the run if too many steps in a row were not finite, with the first of them and its pairs named."""
    if not counted.reached_at:
        return
    step = trainer.state.global_step
    last = step - counted.taken + counted.reached_at
    first = last - trainer.nonfinite.limit + 1
    loader = trainer.callback_handler.train_dataloader
    rows = rows_of_step(loader, first, trainer.args.gradient_accumulation_steps)
    weights = "not saved, as save_strategy='no'"
    if trainer.args.save_strategy != "no":
        trainer._save_checkpoint(trainer.model, None)
        trainer.checkpointer.wait()
        saved = trainer.checkpointer.latest not in trainer.checkpointer.failed
        weights = f"in checkpoint-{step}" if saved else "not saved, as the log says"
    raise FloatingPointError(trainer.nonfinite.explain(first, last, rows, weights))


def open_sums(trainer: "DeviceTrainer") -> list[dict[str, Any]]:
    """Return what each of accelerate's processes has added up since the last log (on XLA there is one process)."""
    (loss,) = trainer.runtime.fetch([trainer._tr_loss])
    own = {
        "metrics": trainer.reward_metrics.state_dict(),
        "open_loss": loss.sum().item(),
        "nonfinite": trainer.nonfinite.state_dict(),
    }
    return gather_object([own]) if trainer.accelerator.num_processes > 1 else [own]


def resume_sums(trainer: "DeviceTrainer") -> None:
    """Go on adding up where the checkpoint was between two logs; from nothing in a new run."""
    progress, trainer.checkpoints.progress = trainer.checkpoints.progress, None
    trainer.nonfinite.start()
    trainer._tr_loss = trainer.nonfinite.start_loss_sum()
    parts = [] if progress is None else progress["processes"]
    peak = peak_flops_of(trainer.runtime.chip())
    trainer.throughput.start(
        trainer.work_of_a_pair,
        None if peak is None else peak * trainer.runtime.topology().devices,
        before=sum((RewardSums(**part["metrics"]["open"]) for part in parts), RewardSums()),
        step=trainer.state.global_step,
    )
    if progress is None:
        return
    accelerator = trainer.accelerator
    own = _own_part(progress["processes"], accelerator.process_index, accelerator.num_processes)
    trainer.reward_metrics.load_state_dict(own["metrics"])
    trainer.nonfinite.load_state_dict(own["nonfinite"])
    trainer._tr_loss = trainer.runtime.to_device(torch.tensor([own["open_loss"]]), trainer.args.device)
    trainer._total_loss_scalar = -own["open_loss"]  # `train_loss` is of the steps since the resume
    trainer._globalstep_last_logged = progress["logged_step"]


def _own_part(parts: Sequence[Mapping[str, Any]], index: int, count: int) -> Mapping[str, Any]:
    """Return what process ``index`` of ``count`` goes on from, given what each had added up at the save.

    Where their number has changed, the first process takes all sums, and each the mean loss.
    """
    if len(parts) == count:
        return parts[index]
    sums = [RewardSums(**part["metrics"]["open"]) for part in parts] if index == 0 else []
    loss = sum(part["open_loss"] for part in parts) / len(parts)
    metrics = parts[0]["metrics"] | {"open": vars(sum(sums, RewardSums()))}
    return dict(parts[0]) | {"metrics": metrics, "open_loss": loss}
