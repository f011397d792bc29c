"""A single process that saves, and a subclass that saves in its own way in each method that public code overrides."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from trl_tpu import RewardTrainer
from trl_tpu.checkpoint.folders import MANIFEST_FILE, describe_files, files_in, find_faults, publish

FILES = ("saved.txt", "later.txt")


class Alone:
    """One process, with the interface of `HostAgreement`."""

    index, count, is_first_of_host = 0, 1, True

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]


class Saving(RewardTrainer):
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        file = Path(output_dir or self.args.output_dir, "model.safetensors")
        save_file({name: weight.half() for name, weight in load_file(file).items()}, file, {"format": "pt"})

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, state_dict)
        Path(str(output_dir), FILES[0]).touch()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        Path(self.args.output_dir, f"checkpoint-{self.state.global_step}", FILES[1]).touch()


def made_checkpoint(output_dir: Path, step: int) -> Path:
    """A checkpoint of two files, which is complete."""
    aside = output_dir / "_unfinished" / f"checkpoint-{step}"
    (aside / "inner").mkdir(parents=True)
    (aside / "weights").write_bytes(bytes(range(100)))
    (aside / "inner" / "state.json").write_text("{}")
    publish(aside, output_dir / aside.name, describe_files(aside, files_in(aside)))
    aside.parent.rmdir()
    return output_dir / aside.name


def reseal(folder: Path) -> None:
    """Write a manifest that agrees with whatever the files are now."""
    (folder / MANIFEST_FILE).unlink(missing_ok=True)
    aside = folder.rename(folder.with_name("aside"))
    publish(aside, folder, describe_files(aside, files_in(aside)))


def check(folder: Path, checkpoint: str) -> None:
    """See that a checkpoint is whole and has what the subclass writes, and its run's folder what `save_model` does."""
    assert all((folder / checkpoint / name).is_file() for name in FILES)
    assert find_faults(folder / checkpoint) == []
    for place in (folder, folder / checkpoint):
        assert load_file(place / "model.safetensors")["score.weight"].dtype == torch.float16
