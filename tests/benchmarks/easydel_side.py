"""EasyDeL's part of `beside_easydel.py`, which runs it in EasyDeL's environment and reads its last line of output.

python easydel_side.py FOLDER PAIRS.json STEPS PAIRS_A_BATCH LEARNING_RATE MAX_LENGTH
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import easydel as ed
import jax
from datasets import Dataset
from jax import numpy as jnp
from transformers import AutoTokenizer


def main(folder: str, pairs: str, steps: int, pairs_a_batch: int, learning_rate: float, max_length: int) -> None:
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if "backend_compile" in event else None
    )
    ends: list[tuple[float, float]] = []
    programs: list[int] = []
    losses: list[float] = []

    class Timed(ed.RewardTrainer):
        def on_step_end(self, state: Any, metrics: Any, step: int) -> Any:
            losses.append(float(metrics.loss))  # waits for the step
            ends.append((time.perf_counter(), time.process_time()))
            programs.append(len(compiled))
            return super().on_step_end(state, metrics, step)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [
        {
            f"{name}_{half}": ids if name == "input_ids" else [1] * len(ids)
            for half, ids in pair.items()
            for name in ("input_ids", "attention_mask")
        }
        for pair in json.loads(Path(pairs).read_text())
    ]
    model = ed.AutoEasyDeLModelForSequenceClassification.from_pretrained(
        folder, from_torch=True, dtype=jnp.float32, param_dtype=jnp.float32, precision=jax.lax.Precision.HIGHEST,
        auto_shard_model=True, config_kwargs={"attn_mechanism": "vanilla", "attn_dtype": jnp.float32},
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as output:
        arguments = ed.RewardConfig(
            save_directory=output, total_batch_size=pairs_a_batch, num_train_epochs=1, max_training_steps=steps,
            learning_rate=learning_rate, scheduler="none", optimizer="adamw", weight_decay=0.0, clip_grad=1.0,
            max_length=max_length, center_rewards_coefficient=None, use_wandb=False, do_last_save=False, log_steps=1,
            report_steps=1, progress_bar_type="json", weight_distribution_log_steps=0, track_memory=False,
            shuffle_train_dataset=False,
        )  # fmt: skip
        trainer = Timed(arguments, tokenizer, model, train_dataset=Dataset.from_list(rows))
        padded = [trainer.input_data_collator_grain(row) for row in rows]
        tokens = sum(row[f"input_ids_{half}"].size for row in padded for half in ("chosen", "rejected"))
        trainer.train()
    print(json.dumps({"ends": ends, "programs": programs, "tokens": tokens, "losses": losses}))


if __name__ == "__main__":
    folder, pairs, steps, pairs_a_batch, learning_rate, max_length = sys.argv[1:]
    main(folder, pairs, int(steps), int(pairs_a_batch), float(learning_rate), int(max_length))
