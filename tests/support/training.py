"""Train, and what trainers have logged, as tests compare it."""

from typing import Any

import torch

#: Settings of most runs: float32, and nothing printed or tracked.
QUIET: dict[str, Any] = {"bf16": False, "report_to": "none", "disable_tqdm": True}
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


def state_of(trainer: Any) -> dict[str, torch.Tensor]:
    """Weights and the optimizer's tensors on the host."""
    from trl_tpu.checkpoint.state_dict import to_host  # imports the trainer

    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    tensors = dict(trainer.model.state_dict())
    for parameter, values in optimizer.state.items():
        for kind, value in values.items():
            tensors[f"{names[parameter]} {kind}"] = torch.as_tensor(value if value is not None else -1.0)
    return to_host(tensors, trainer.trl_tpu.runtime)


def differing(first: Any, second: Any) -> list[str]:
    """Names of weights and optimizer state that are not equal to the bit, in two trainers."""
    these, those = state_of(first), state_of(second)
    assert these.keys() == those.keys()
    return [name for name in these if not torch.equal(these[name].nan_to_num(7.0), those[name].nan_to_num(7.0))]
