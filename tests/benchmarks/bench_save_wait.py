"""What a save costs training: the wait for the copy of the state to the host, beside the writing that it goes on over.

python -m tests.benchmarks.bench_save_wait

A Llama of 16 million parameters on eight virtual XLA:CPU devices, `data=2,fsdp=2,tensor=2`. "copies" are of the same
state alone, which no save can do without.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HIDDEN, LAYERS, STEPS, EVERY = 512, 4, 12, 3


def run() -> None:
    import tiny

    from trl_tpu import RewardConfig, RewardTrainer
    from trl_tpu.checkpoint.state_dict import optimizer_tensors, trained_weights

    class Timed(RewardTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.waits: list[float] = []
            self.writes: list[float] = []
            super().__init__(*args, **kwargs)
            write = self.checkpointer._write

            def timed(*args: Any) -> None:
                began = time.perf_counter()
                write(*args)
                self.writes.append(time.perf_counter() - began)

            self.checkpointer._write = timed

        def _save_checkpoint(self, *args: Any) -> None:
            self.trl_tpu.runtime.step_boundary()
            self.trl_tpu.runtime.fetch([self._tr_loss])  # the step itself is no wait for the save
            self.checkpointer.wait()  # nor is the save before, which here has a few steps' time only
            began = time.perf_counter()
            super()._save_checkpoint(*args)
            self.waits.append(time.perf_counter() - began)

    pairs = tiny.made_up_pairs(256)
    texts = [*pairs["prompt"], *pairs["chosen"], *pairs["rejected"]]
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.save_tiny(Path(folder) / "model", texts, hidden=HIDDEN, layers=LAYERS)
        args = RewardConfig(
            f"{folder}/out", mesh="data=2,fsdp=2,tensor=2", max_steps=STEPS, save_steps=EVERY, save_total_limit=1,
            bf16=False, max_shapes=1, per_device_train_batch_size=2, report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = Timed(model, args, train_dataset=pairs)
        trainer.train()
        state = optimizer_tensors(trainer.optimizer.optimizer, trainer.model) | trained_weights(trainer.model)
        copies = []
        for _ in trainer.waits:
            began = time.perf_counter()
            trainer.trl_tpu.runtime.local_shards(state)
            copies.append(time.perf_counter() - began)
        size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    print(json.dumps({"bytes": size, "waits": trainer.waits, "writes": trainer.writes, "copies": copies}))


def main() -> None:
    environment = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8", "HF_HUB_OFFLINE": "1"}
    paths = os.pathsep.join([str(Path(__file__).parents[1] / "support"), *filter(None, sys.path)])
    output = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.bench_save_wait", "run"],
        env=os.environ | environment | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    found = json.loads(output.splitlines()[-1])
    print(f"state {found['bytes'] / 1e9:.2f} GB, {len(found['waits'])} saves")
    for name in ("copies", "waits", "writes"):
        values = found[name]
        print(f"{name:<7} median {statistics.median(values):6.2f} s   from {min(values):.2f} to {max(values):.2f}")


if __name__ == "__main__":
    run() if sys.argv[1:] else main()
