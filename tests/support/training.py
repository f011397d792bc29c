"""Train, and what trainers have logged, as tests compare it."""

from typing import Any

_TIMED = ("_runtime", "_per_second", "seconds_per_step", "mfu", "memory_gib", "compiled_programs")


def trained(trainer: Any, resume: str | bool | None = None) -> Any:
    """Train a trainer, from a checkpoint if one is given, and return it."""
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def untimed(logs: dict[str, Any]) -> dict[str, Any]:
    """Leave out time, memory and what belongs to the process: other numbers in every run."""
    return {key: value for key, value in logs.items() if not key.endswith(_TIMED)}


def logged(trainer: Any) -> list[dict[str, Any]]:
    """Return what was logged of training and evaluation, untimed, by step and training first."""
    logs = [untimed(log) for log in trainer.state.log_history if "train_loss" not in log]
    return sorted(logs, key=lambda log: (log["step"], "eval_loss" in log))


def losses(trainer: Any) -> list[float]:
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]
