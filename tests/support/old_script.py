"""A script as TRL taught it up to 0.23, with only its import changed: run by tests, one process for each runtime.

python tests/support/old_script.py MODEL PAIRS_PER_DEVICE OUT
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments

from trl_tpu import RewardDataCollatorWithPadding, RewardTrainer
from trl_tpu.trainer.utils import compute_accuracy

torch.set_num_threads(2)


def main(model_folder: str, pairs_per_device: str, out: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    model = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1)

    def preprocess(row: dict[str, Any]) -> dict[str, list[int]]:
        chosen, rejected = (tokenizer(row["prompt"] + row[half]) for half in ("chosen", "rejected"))
        return {
            "input_ids_chosen": chosen["input_ids"],
            "attention_mask_chosen": chosen["attention_mask"],
            "input_ids_rejected": rejected["input_ids"],
            "attention_mask_rejected": rejected["attention_mask"],
        }

    pairs = tiny.made_up_pairs(20, margin=True).map(preprocess)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            per_device_train_batch_size=int(pairs_per_device),
            per_device_eval_batch_size=int(pairs_per_device),
            num_train_epochs=1,
            learning_rate=1e-2,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = RewardTrainer(
            model=model,
            args=args,
            tokenizer=tokenizer,
            train_dataset=pairs,
            eval_dataset=pairs,
            data_collator=RewardDataCollatorWithPadding(tokenizer, padding=True, max_length=512, pad_to_multiple_of=8),
            compute_metrics=compute_accuracy,
            max_length=512,
        )
        trainer.train()
        metrics = trainer.evaluate()
        predictions = np.asarray(trainer.predict(pairs).predictions)
    result = {
        "runtime": trainer.runtime.name,
        "devices": trainer.runtime.topology().devices,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "metrics": metrics,
        "predictions": predictions.tolist(),
    }
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
