"""What a save costs training: the wait for the copy of the state to the host, and the writing after it.

python -m tests.benchmarks.bench_save_wait

A Llama of 16 million parameters on eight virtual XLA:CPU devices, `data=2,fsdp=2,tensor=2`. "copies" are of the same
state alone, which no save can do without; "writes" are what is left of a save when training may go on.
"""

import statistics
import tempfile
from typing import Any

import tiny

from . import harness

STEPS, EVERY = 12, 3


def run(size: str) -> dict[str, Any]:
    from trl_tpu import RewardTrainer
    from trl_tpu.checkpoint.state_dict import optimizer_tensors, trained_weights

    waits: list[float] = []
    writes: list[float] = []
    copies: list[float] = []

    pairs = tiny.made_up_pairs(256)
    hidden, layers = map(int, size.split("x"))
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = tiny.tiny_tokenizer(pairs)
        args = harness.config(
            "trl_tpu", folder, mesh="data=2,fsdp=2,tensor=2", max_steps=STEPS, save_strategy="steps", save_steps=EVERY,
            save_total_limit=1, max_shapes=1, per_device_train_batch_size=2,
        )  # fmt: skip
        model = tiny.tiny_model(tokenizer, hidden, layers)
        trainer = RewardTrainer(model, args, train_dataset=pairs, processing_class=tokenizer)
        runtime, checkpointer = trainer.trl_tpu.runtime, trainer.checkpointer
        save = checkpointer.save

        def timed_save(contents: Any) -> None:
            runtime.step_boundary()
            runtime.fetch([trainer._tr_loss])  # the step itself is no wait for the save
            with harness.timed(waits):
                save(contents)
            with harness.timed(writes):
                checkpointer.wait()

        checkpointer.save = (
            timed_save  # training would wait for the writing if a method of the trainer were overridden
        )
        trainer.train()
    state = optimizer_tensors(trainer.optimizer.optimizer, trainer.model) | trained_weights(trainer.model)
    for _ in waits:
        with harness.timed(copies):
            runtime.local_shards(state)
    size_of = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    return {"bytes": size_of, "copies": copies, "waits": waits, "writes": writes}


if __name__ == "__main__":
    options = harness.options(run, model="512x4")
    found = harness.in_a_process("bench_save_wait", options.model, CPU_NUM_DEVICES="8", **harness.XLA)
    print(f"state {found.pop('bytes') / 1e9:.2f} GB, {len(found['waits'])} saves")
    for name, values in found.items():
        print(f"{name:<7} median {statistics.median(values):6.2f} s   from {min(values):.2f} to {max(values):.2f}")
