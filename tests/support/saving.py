"""A subclass that saves more than the model, in each of the methods that public code overrides for it."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from trl_tpu import RewardTrainer
from trl_tpu.checkpoint.manifest import find_faults

FILES = ("other.safetensors", "saved.txt", "later.txt")


class Saving(RewardTrainer):
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        folder = Path(output_dir or self.args.output_dir)
        weights = load_file(folder / "model.safetensors")
        save_file({name: torch.zeros_like(weight) for name, weight in weights.items()}, folder / FILES[0])

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        Path(str(output_dir), FILES[1]).touch()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        Path(self.args.output_dir, f"checkpoint-{self.state.global_step}", FILES[2]).touch()


def check(folder: Path, checkpoint: str) -> None:
    """See that a checkpoint is whole and has what the subclass writes, and its run's folder what `save_model` does."""
    assert all((folder / checkpoint / name).is_file() for name in FILES)
    assert find_faults(folder / checkpoint) == []
    assert all((folder / name).is_file() for name in FILES[:2])
