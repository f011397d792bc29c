"""A script for TRL 0.5 to 0.6: transformers' TrainingArguments, a named tokenizer, manual token columns."""

import sys

from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from trl_tpu import RewardTrainer, TrainingArguments

model_name, dataset_name, output_dir = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(model_name)
model = AutoModelForSequenceClassification.from_pretrained(model_name, num_labels=1)


def preprocess(rows):
    tokens = {"chosen": tokenizer(rows["chosen"]), "rejected": tokenizer(rows["rejected"])}
    return {f"{key}_{half}": tokens[half][key] for half in tokens for key in ("input_ids", "attention_mask")}


pairs = load_dataset(dataset_name, split="train").map(preprocess, batched=True)
pairs = pairs.filter(lambda row: len(row["input_ids_chosen"]) <= 512 and len(row["input_ids_rejected"]) <= 512)
settings = {"per_device_train_batch_size": 8, "num_train_epochs": 1, "learning_rate": 1e-3, "optim": "adamw_torch"}
settings |= {"logging_steps": 1, "evaluation_strategy": "no", "save_strategy": "no", "report_to": "none"}
args = TrainingArguments(output_dir=output_dir, remove_unused_columns=False, **settings)
trainer = RewardTrainer(model=model, tokenizer=tokenizer, args=args, train_dataset=pairs, max_length=512)
trainer.train()
trainer.save_state()
