"""As for TRL 1.16, which runs it itself: what the others are compared with. The rows are tokens already."""

import sys

from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

model_name, dataset_name, output_dir = sys.argv[1:]
args = RewardConfig(
    output_dir,
    per_device_train_batch_size=8,
    learning_rate=1e-3,
    num_train_epochs=1,
    logging_steps=1,
    optim="adamw_torch",
    max_length=None,
    bf16=False,
    use_cpu=True,
    report_to="none",
    save_strategy="no",
)
trainer = RewardTrainer(
    AutoModelForSequenceClassification.from_pretrained(model_name, num_labels=1),
    args,
    train_dataset=load_dataset(dataset_name, split="train"),
    processing_class=AutoTokenizer.from_pretrained(model_name),
)
trainer.train()
trainer.save_state()
