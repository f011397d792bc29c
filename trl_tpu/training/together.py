"""The same decisions on every host: what a Trainer decides by itself is asked around first.

Steps, logs, evaluations and saves come from arguments and counters, which all hosts share. What need not be the same
is made so: the arguments themselves, metrics, and whatever a callback wishes because of a signal, a clock or another
machine.
"""

import json
from pathlib import Path
from typing import Any
from zlib import crc32

from datasets import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from ..parallel.mesh import MeshShape
from .agreement import Host, agreed, check_alike
from .saving import SavingTrainer

_STOPS = ("should_training_stop", "should_epoch_stop")
_DECISIONS = ("should_log", "should_save", "should_evaluate", *_STOPS)


class TogetherTrainer(SavingTrainer):
    """A Trainer whose hosts do the same at the same time. Subclasses set `runtime` and `mesh` beforehand."""

    mesh: MeshShape

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        runtime = self.runtime
        self.host = Host(runtime.process_index(), runtime.process_count(), runtime.local_positions())
        self.wishes: dict[str, bool] = {}  # of subclasses, agreed upon as the loop's decisions are
        super().__init__(*args, **kwargs)
        if self._process[1] > 1:
            self._postponed = _Postponed()
            self.add_callback(self._postponed)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train as transformers does; resume only from a checkpoint whose files are whole, and from no fresh start.

        Raises:
            ValueError: No checkpoint is whole, or the one given by name is not; the hosts were started with different
                arguments, data or checkpoints.
        """
        self._order = self._order_of_pairs()
        if self.host.count > 1:
            check_alike(self.runtime.all_gather_object(self._run(resume_from_checkpoint)))
        if self._process[1] > 1:
            # stable: its turn comes after all other callbacks have wished
            self.callback_handler.callbacks.sort(key=lambda callback: callback is self._postponed)
        try:
            return super().train(self._checkpoint_to_resume(resume_from_checkpoint), trial, ignore_keys_for_eval)
        finally:
            self._drop_download()

    def _order_of_pairs(self) -> dict[str, Any]:
        order: dict[str, Any] = {
            name: getattr(self.args, name) for name in ("seed", "data_seed", "gradient_accumulation_steps")
        }
        order["the batch"] = self.args.train_batch_size * self.accelerator.num_processes
        return order | {"train data": _digest(self.train_dataset)}

    def _run(self, resume: str | bool | None) -> dict[str, Any]:
        """What has to be the same on every host."""
        folder = get_last_checkpoint(str(self.args.output_dir)) if resume is True else resume
        state = Path(folder or "", "trainer_state.json")
        run = dict(self._order)
        run |= {name: getattr(self.args, name) for name in ("max_steps", "num_train_epochs")}
        run |= {"mesh": str(self.mesh), "eval data": _digest(self.eval_dataset)}
        run["the step to resume from"] = json.loads(state.read_text())["global_step"] if state.is_file() else None
        run["the checkpoints"] = sorted(path.name for path in Path(str(self.args.output_dir)).glob("checkpoint-*"))
        return run

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._agree()
        acts = self.control.should_log or self.control.should_save or self.control.should_evaluate
        self._log_save_evaluate(*args, **kwargs)
        if acts:  # whereupon callbacks may wish to stop
            self._agree()

    def _log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """What has been decided. Subclasses replace this, not who decides."""
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _agree(self) -> None:
        """Let all processes take the same decisions, whatever a callback on one of them has wished."""
        if self._process[1] == 1:
            return
        own = {name: bool(getattr(self.control, name)) for name in _DECISIONS} | self._postponed.pop() | self.wishes
        decided = dict(zip(own, agreed(self._all_gather_object(tuple(own.values()))), strict=True))
        for name in _DECISIONS:
            setattr(self.control, name, decided[name])
        self.wishes = {name: decided[name] for name in self.wishes}


class _Postponed(TrainerCallback):
    """Keeps a wish to stop between micro-batches until the step's end, when all hosts are asked."""

    def __init__(self) -> None:
        self._wishes: dict[str, bool] = {}

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        for name in _STOPS:
            if getattr(control, name):
                self._wishes[name] = True
                setattr(control, name, False)

    def pop(self) -> dict[str, bool]:
        wishes, self._wishes = self._wishes, {}
        return wishes


def _digest(dataset: Any) -> Any:
    """How many rows, and a checksum of some; of a stream nothing is known, of several datasets this of each."""
    if isinstance(dataset, dict):
        return {name: _digest(part) for name, part in dataset.items()}
    if not isinstance(dataset, Dataset) or not len(dataset):
        return None
    some = dataset[range(0, len(dataset), -(-len(dataset) // 16))]
    return f"{len(dataset)} pairs ({crc32(json.dumps(some, sort_keys=True, default=str).encode()):08x})"
