"""Compile time and program size of a training step as models get deeper, with and without `scan_layers`.

python -m tests.benchmarks.bench_scan_compile [--depths 8 32]

Llama-shaped models on XLA:CPU, one device, float32, in a process of each. A step is forward, backward and the
optimizer's update: one program, or with accumulated gradients two. What else is compiled stacks the layers' weights
before the first step, and gives them back one by one after the last.
"""

import tempfile
import time
from collections.abc import Iterator
from typing import Any

import tiny

from . import harness

COLUMNS = ("rest of step s", "compile s", "compile+rest cpu s", "all compiles s")


def run(layers: str, scan: str, accumulation: str) -> list[float]:
    """Return the seconds that tracing and compiling a step took, and all compiling.

    Compiling counts twice: by the clock, and by the processors, which other processes do not slow down.
    """
    import torch_xla
    import torch_xla.debug.metrics as met
    from transformers import TrainerCallback

    from trl_tpu import RewardTrainer

    def clocks() -> tuple[float, float, float]:
        torch_xla.sync(wait=True)
        return time.perf_counter(), time.process_time(), (met.metric_data("CompileTime") or (0, 0))[1] / 1e9

    class Timed(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.before = clocks()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.spent = [end - begin for begin, end in zip(self.before, clocks(), strict=True)]

    pairs = tiny.made_up_pairs(64)
    tokenizer = tiny.tiny_tokenizer(pairs["chosen"], vocab_size=320)
    timed = Timed()
    with tempfile.TemporaryDirectory() as folder:
        args = harness.config(
            "trl_tpu", folder, packing=False, pad_to_multiple_of=64, max_steps=1, scan_layers=scan == "True",
            per_device_train_batch_size=8 // int(accumulation), gradient_accumulation_steps=int(accumulation),
            logging_steps=500,
        )  # fmt: skip
        model = tiny.tiny_model(tokenizer, layers=int(layers))
        trainer = RewardTrainer(model, args, train_dataset=pairs, processing_class=tokenizer, callbacks=[timed])
        trainer.train()
    wall, processors, compiling = timed.spent
    return [wall - compiling, compiling, processors, clocks()[-1]]


def deeper(depths: list[Any], *settings: Any) -> Iterator[tuple[Any, list[float]]]:
    """Yield a row for each depth, and the ratios of the last to the first."""
    rows = []
    for layers in depths:
        rows.append(harness.in_a_process("bench_scan_compile", layers, *settings, **harness.XLA))
        yield layers, rows[-1]
    yield "ratio", [last / first for first, last in zip(rows[0], rows[-1], strict=True)]


if __name__ == "__main__":
    depths = harness.options(run, depths=[8, 32]).depths
    for accumulation in (1, 2):
        for scan in (False, True):
            title = f"accumulation {accumulation}, scan_layers={scan}, by layers"
            harness.show(title, dict.fromkeys(COLUMNS, ".2f"), deeper(depths, scan, accumulation))
