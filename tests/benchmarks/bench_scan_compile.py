"""Compile time and program size of a training step as models get deeper, with and without `scan_layers`.

python -m tests.benchmarks.bench_scan_compile

Llama-shaped models on XLA:CPU, one device, float32, in a process of each. A step is forward, backward and the
optimizer's update: one program, or with accumulated gradients two. What else is compiled stacks the layers' weights
before the first step, and gives them back one by one after the last.
"""

import os

os.environ |= {"PJRT_DEVICE": "CPU", "HF_HUB_OFFLINE": "1", "USE_TORCH_XLA": "1"}

import subprocess
import sys
from pathlib import Path
from typing import Any

DEPTHS = (8, 32)


def measure(layers: int, scan: bool, accumulation: int) -> None:
    """Print the seconds that tracing and compiling a step took, and all compiling.

    Compiling counts twice: by the clock, and by the processors, which other processes do not slow down.
    """
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
    import tempfile
    import time

    import tiny
    import torch_xla
    import torch_xla.debug.metrics as met
    from transformers import TrainerCallback

    from trl_tpu import RewardConfig, RewardTrainer

    def compiled() -> float:
        return (met.metric_data("CompileTime") or (0, 0))[1] / 1e9

    class Timed(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch_xla.sync(wait=True)
            self.before = time.perf_counter(), time.process_time(), compiled()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch_xla.sync(wait=True)
            wall, processors, compiling = self.before
            compiling = compiled() - compiling
            wall, processors = time.perf_counter() - wall, time.process_time() - processors
            self.seconds = wall - compiling, compiling, processors

    pairs = tiny.made_up_pairs(64)
    tokenizer = tiny.tiny_tokenizer(pairs["chosen"], vocab_size=320)
    timed = Timed()
    with tempfile.TemporaryDirectory() as folder:
        args = RewardConfig(
            folder,
            bf16=False,
            packing=False,
            pad_to_multiple_of=64,
            per_device_train_batch_size=8 // accumulation,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            scan_layers=scan,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        model = tiny.tiny_model(tokenizer, layers=layers)
        trainer = RewardTrainer(model, args, train_dataset=pairs, processing_class=tokenizer, callbacks=[timed])
        trainer.train()
    print(*timed.seconds, compiled())


def main() -> None:
    headings = ("rest of step s", "compile s", "compile+rest cpu s", "all compiles s")
    for accumulation in (1, 2):
        for scan in (False, True):
            print(
                f"\naccumulation {accumulation}, scan_layers={scan}\n  layers" + "".join(f"{h:>20}" for h in headings)
            )
            rows = []
            for layers in DEPTHS:
                arguments = map(str, (layers, int(scan), accumulation))
                command = [sys.executable, "-m", "tests.benchmarks.bench_scan_compile", *arguments]
                printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
                rows.append([float(each) for each in printed[-len(headings) :]])
                print(f"{layers:8}" + "".join(f"{each:20.2f}" for each in rows[-1]), flush=True)
            ratios = [last / first for first, last in zip(rows[0], rows[-1], strict=True)]
            print("   ratio" + "".join(f"{each:20.2f}" for each in ratios), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        measure(int(sys.argv[1]), bool(int(sys.argv[2])), int(sys.argv[3]))
    else:
        main()
