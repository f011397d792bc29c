"""The edges of transformers' Trainer at which state is read: which checkpoint, and back into its shards."""

import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, Trainer
from transformers.trainer import OPTIMIZER_NAME

from ..checkpoint.manifest import check_given, checkpoints_in, faults, newest_good
from ..checkpoint.remote import RemoteRun, is_url, staging_folder
from ..checkpoint.state_dict import (
    STATE_FOLDER,
    read_optimizer,
    read_progress,
    read_scheduler,
    read_torch_optimizer,
    read_weights,
)
from ..runtime import Runtime, Value
from .agreement import Host
from .metrics import RewardMetrics, RewardSums

logger = logging.getLogger(__name__)


class ResumingTrainer(Trainer):
    """A Trainer that resumes only from checkpoints whose files are whole, and never starts anew in silence."""

    runtime: Runtime
    host: Host
    reward_metrics: RewardMetrics
    model: PreTrainedModel  # or one of peft, which hands its attributes on
    optimizer: Optimizer
    lr_scheduler: LambdaLR  # as transformers types it; any scheduler
    remote: RemoteRun | None = None  # where the run's files are kept, if that is a URL
    _order: Mapping[str, Any] = MappingProxyType({})  # what the pairs of each step of this training depend on
    _resumed_from: str | None = None  # the checkpoint, where it is kept
    _download: Path | None = None  # the copy of a checkpoint from a URL
    _progress: dict[str, Any] | None = None  # of the checkpoint that training resumes from

    @property
    def _keeps_state(self) -> bool:
        """Whether checkpoints hold state of ours; accelerate's FSDP and DeepSpeed have their own."""
        return not (self.is_fsdp_enabled or self.is_deepspeed_enabled)

    @property
    def _shares_disk(self) -> bool:
        """Whether all hosts write to one folder, rather than each to a disk of its own."""
        return self.remote is None and not self.args.save_on_each_node

    @property
    def _process(self) -> tuple[int, int]:
        """Which this process is, and of how many: one a host on a mesh, or one of accelerate's."""
        several = self.accelerator.num_processes > 1
        host = self.host
        return (
            (self.accelerator.process_index, self.accelerator.num_processes) if several else (host.index, host.count)
        )

    def _all_gather_object(self, value: Value) -> list[Value]:
        """What every process has given; all take part."""
        return gather_object([value]) if self.accelerator.num_processes > 1 else self.runtime.all_gather_object(value)

    @property
    def _torch_optimizer(self) -> Optimizer:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    @property
    def _batch_layout(self) -> str:
        """In a word, how batches are laid out: what a resumed run must not change."""
        return "padded"

    def _checkpoint_to_resume(self, asked: str | bool | None) -> str | None:
        """The folder of the checkpoint that ``resume_from_checkpoint`` means, whose files are whole.

        Raises:
            ValueError: None is whole, or the one given by name is damaged or of other batches.
        """
        if not asked:
            return None
        if asked is True and self.remote is not None:
            folder = newest_good(self._fetched(self.remote.checkpoints()), self._examine)
        elif asked is True:
            folder = newest_good(checkpoints_in(str(self.args.output_dir)), self._examine)
        else:
            check_given(folder := self._local(os.fspath(asked)), self._examine)
        self._progress = read_progress(folder)
        if self._progress is not None and self._progress["batches"] != self._batch_layout:
            raise ValueError(
                f"The checkpoint {folder} was trained on {self._progress['batches']} batches, and these are "
                f"{self._batch_layout}: the run would not go on to the bit. Resume with the `packing` it had, or "
                "start from its weights: give its folder as the model."
            )
        if self._progress is not None and (changed := _changed(self._progress["order"], self._order)):
            logger.warning("Resuming from %s, but the run will not be the one that it is of: %s.", folder, changed)
        newest = folder if self.remote is None else f"{self.remote.url}/{Path(folder).name}"
        self._resumed_from = newest if asked is True else os.fspath(asked)
        return folder

    def _fetched(self, names: Iterable[str]) -> Iterator[Path]:
        """Checkpoints at the URL, each downloaded when its turn comes."""
        for name in names:
            yield Path(self._local(f"{self.remote.url}/{name}"))  # type: ignore[union-attr]

    def _local(self, checkpoint: str) -> str:
        """A folder of this host with the files of a checkpoint, which may be at a URL."""
        if not is_url(checkpoint):
            return checkpoint
        url, _, name = checkpoint.rstrip("/").rpartition("/")
        self._drop_download()
        self._download = Path(staging_folder(url), f"downloaded-{self.args.local_process_index}", name)
        self._drop_download()  # of an earlier run
        return str(RemoteRun(url).get(name, self._download.parent))

    def _drop_download(self) -> None:
        """Remove the copy of a checkpoint that has been read."""
        if self._download is not None:
            shutil.rmtree(self._download, ignore_errors=True)

    def _examine(self, folder: Path) -> list[str]:
        own = faults(folder, self._process if self._shares_disk else (0, 1))
        return [fault for said in self._all_gather_object(own) for fault in said]

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if Path(resume_from_checkpoint, STATE_FOLDER).is_dir():
            read_weights(self.model, resume_from_checkpoint, self.runtime)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = str(self.state.best_model_checkpoint)
        if self.remote is not None:
            best = self._local(f"{self.remote.url}/{Path(best).name}")
        if Path(best, STATE_FOLDER).is_dir():
            logger.info("Loading the best model, from %s (score: %s).", best, self.state.best_metric)
            read_weights(self.model, best, self.runtime)
        else:
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return None
        if self._progress is None and self._keeps_state and not Path(checkpoint, OPTIMIZER_NAME).is_file():
            logger.warning(
                "The checkpoint %s has no state of the optimizer (was it saved with `save_only_model`?), so its "
                "moments and the learning rate's schedule begin anew.",
                checkpoint,
            )
        if self._progress is not None and self._keeps_state:
            numbers = self._progress["optimizer"]
            read_optimizer(self._torch_optimizer, self.model, checkpoint, numbers, self.runtime)
            read_scheduler(self.lr_scheduler, checkpoint)
            self._progress |= self._own_part(self._progress["processes"])
            self.reward_metrics.load_state_dict(self._progress["metrics"])
        elif not self.runtime.shares_mesh:
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            read_torch_optimizer(self._torch_optimizer, self.lr_scheduler, checkpoint, self.runtime)
        return None

    def _own_part(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """What this process had added up, or of another number of processes: all on the first, the loss on each."""
        index, count = self.accelerator.process_index, self.accelerator.num_processes
        if len(parts) == count:
            return parts[index]
        sums = [RewardSums(**part["metrics"]["open"]) for part in parts] if index == 0 else []
        loss = sum(part["open_loss"] for part in parts) / len(parts)
        return {"metrics": parts[0]["metrics"] | {"open": vars(sum(sums, RewardSums()))}, "open_loss": loss}

    def _resume_loss(self) -> None:
        """Go on adding up the loss where the checkpoint was between two logs."""
        if self._progress is None:
            return
        open_loss = self._progress["open_loss"]
        self._tr_loss = self.runtime.to_device(torch.tensor([open_loss]), self.args.device)
        self._total_loss_scalar = -open_loss  # `train_loss` is of the steps since the resume, as in transformers
        self._globalstep_last_logged = self._progress["logged_step"]
        self._progress = None


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    changed = [name for name in now if before.get(name) != now[name]]
    return ", ".join(f"{name} was {before.get(name)} and is {now[name]}" for name in changed)
