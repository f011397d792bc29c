"""Compile time and program size of a training step as models get deeper, with and without `scan_layers`.

python -m tests.benchmarks.bench_scan_compile

Llama-shaped models on XLA:CPU, one device, float32, in a process of each. Two programs: forward and backward, and the
optimizer's update after accumulated gradients, which is elementwise and grows with the number of weights either way.
"""

import os

os.environ |= {"PJRT_DEVICE": "CPU", "HF_HUB_OFFLINE": "1", "USE_TORCH_XLA": "1"}

import subprocess
import sys
from pathlib import Path

DEPTHS = (8, 32)


def measure(layers: int, scan: bool) -> None:
    """Print the seconds that the step's two programs took to trace and compile, and the instructions of the first."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import tempfile
    import time

    import tiny
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as met

    from trl_tpu import RewardConfig, RewardTrainer

    pairs = tiny.made_up_pairs(64)
    tokenizer = tiny.tiny_tokenizer(pairs["chosen"], vocab_size=320)
    seconds, sizes = [], []

    class Timed(RewardTrainer):
        def training_step(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            if not seconds:
                xm.wait_device_ops()
                start, before = time.perf_counter(), met.metric_data("CompileTime")[1]
                loss = super().training_step(*args, **kwargs)
                seconds.append(time.perf_counter() - start)
                gradients = [each.grad for each in self.model.parameters()]
                sizes.append(torch_xla._XLAC._get_xla_tensors_hlo(gradients).count(" = "))
                torch_xla.sync(wait=True)
                seconds.append((met.metric_data("CompileTime")[1] - before) / 1e9)
                return loss
            return super().training_step(*args, **kwargs)

    with tempfile.TemporaryDirectory() as folder:
        args = RewardConfig(
            folder,
            bf16=False,
            packing=False,
            pad_to_multiple_of=64,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=1,
            scan_layers=scan,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        model = tiny.tiny_model(tokenizer, layers=layers)
        trainer = Timed(model, args, train_dataset=pairs, processing_class=tokenizer)
        before = met.metric_data("CompileTime")[1] if met.metric_data("CompileTime") else 0
        trainer.train()
        total = (met.metric_data("CompileTime")[1] - before) / 1e9
    print(*seconds, total, *sizes)


def main() -> None:
    print(f"{'layers':>8}{'scan':>7}{'trace s':>10}{'compile s':>11}{'all compiles s':>16}{'instructions':>14}")
    for scan in (False, True):
        rows = []
        for layers in DEPTHS:
            command = [sys.executable, "-m", "tests.benchmarks.bench_scan_compile", str(layers), str(int(scan))]
            printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-4:]
            trace, compile_, total, size = map(float, printed)
            rows.append((trace, compile_, total, size))
            print(f"{layers:8}{scan!s:>7}{trace:10.2f}{compile_:11.2f}{total:16.2f}{size:14.0f}", flush=True)
        ratios = [last / first for first, last in zip(rows[0], rows[-1], strict=True)]
        print(f"{'ratio':>15}{ratios[0]:10.2f}{ratios[1]:11.2f}{ratios[2]:16.2f}{ratios[3]:14.2f}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        measure(int(sys.argv[1]), bool(int(sys.argv[2])))
    else:
        main()
