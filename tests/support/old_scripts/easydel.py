"""EasyDeL's documentation as translated in the guide: its default config and its preprocessing."""

import re
import sys

from datasets import load_dataset
from environment import EXAMPLES
from transformers import AutoTokenizer

from trl_tpu import RewardConfig, RewardTrainer

model, dataset_name = sys.argv[1:]
guide = (EXAMPLES / "guides" / "from_easydel.md").read_text(encoding="utf-8")
(config,) = re.findall(r"^config = RewardConfig\(\n    learning_rate=5e-5.*?^\)\n", guide, re.MULTILINE | re.DOTALL)
(function,) = re.findall(r"^def preprocess_function.*?^    return columns\n", guide, re.MULTILINE | re.DOTALL)
tokenizer = AutoTokenizer.from_pretrained(model)
names = {"RewardConfig": RewardConfig, "tokenizer": tokenizer}
exec(function + config.replace("(\n", "(bf16=False,").replace("EasyDeL-Checkpoints", "out"), names)
pairs = load_dataset(dataset_name, split="train").map(lambda row: {"prompt": ""})
rows = pairs.map(names["preprocess_function"], batched=True, remove_columns=pairs.column_names)
trainer = RewardTrainer(model=model, args=names["config"], train_dataset=rows, processing_class=tokenizer)
trainer.train()
trainer.save_state()
