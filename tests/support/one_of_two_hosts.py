"""One of two hosts that train together, as far as possible on one machine.

    python tests/support/one_of_two_hosts.py INDEX FOLDER KIND

Each host has a mesh of its own virtual devices that does not shard the batch, so both compute the same, and no
network connects their devices. Everything else is as on a pod: host indices, the process group, and a common folder.
Prints the actions of this host as JSON.

KIND "stop in a step": host 1 requests to stop between two micro-batches. "SIGTERM": host 1 gets the signal during an
evaluation. "other data": host 1 has other pairs; "other stream": a stream of longer pairs. "resume": both resume the
newest checkpoint, until host 1 requests to stop after the log of step 6.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch_xla.runtime as xr

index, folder, kind = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
xr.process_index = lambda: index  # type: ignore[assignment]
xr.process_count = lambda: 2  # type: ignore[assignment]

from tiny import made_up_pairs, save_tiny, uneven_pairs  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from trl_tpu import RewardConfig, RewardTrainer, runtime  # noqa: E402
from trl_tpu.checkpoint.folders import find_faults  # noqa: E402


class Requests(TrainerCallback):
    """Requests of a callback on one host only, and a record of this host's logs and saves."""

    def __init__(self) -> None:
        self.logged: list[int] = []
        self.saved: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save |= index == 1 and state.global_step == 2

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= kind == "stop in a step" and index == 1 and state.global_step == 4

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if kind == "SIGTERM" and index == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        control.should_training_stop |= kind == "resume" and index == 1 and state.global_step == 6
        if state.is_world_process_zero:
            self.logged.append(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # the other host must have written its files completely
        checkpoint = folder / "out" / f"checkpoint-{state.global_step}"
        self.saved.append(len(list((checkpoint / "state").iterdir())) if not find_faults(checkpoint) else 0)


def main() -> None:
    pairs = made_up_pairs(48, seed=index if kind == "other data" else 0)
    model = save_tiny(folder / f"model{index}", pairs)
    if kind == "other stream":
        pairs = (uneven_pairs(48) if index else pairs).to_iterable_dataset()
    callback = Requests()
    settings: dict[str, Any] = {"per_device_train_batch_size": 4, "max_steps": 8, "logging_steps": 2}
    settings |= {"save_strategy": "steps", "save_steps": 4, "gradient_accumulation_steps": 2, "report_to": "none"}
    settings |= {"eval_strategy": "steps" if kind == "SIGTERM" else "no", "eval_steps": 3, "max_length": 32}
    args = RewardConfig(str(folder / "out"), mesh="tensor=2", gradient_checkpointing=False, **settings)
    data: dict[str, Any] = {"train_dataset": pairs, "eval_dataset": pairs, "callbacks": [callback]}
    trainer = RewardTrainer(model, args, **data, compute_metrics=lambda prediction: {"host": index})
    trainer.train(resume_from_checkpoint="auto" if kind == "resume" else None)
    trainer.save_model(str(folder / "final"))
    runtime.current().all_gather_object(None)
    steps = trainer.state.global_step
    found = {"steps": steps, "logged": callback.logged, "saved": callback.saved, "should_save": args.should_save}
    found["whose metrics"] = trainer.evaluate(pairs.select(range(8)))["eval_host"]
    found["rewards"] = [float(value) for value in trainer.predict(pairs).predictions.flatten()[:6]]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
