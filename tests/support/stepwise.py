"""Solutions with judged steps, a tiny token classifier, and its training by a plain loop."""

import random
from pathlib import Path
from typing import Any

import tiny
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer, DataCollatorForTokenClassification

from trl_tpu.experimental.prm import PRMConfig

BATCH, STEPS = 4, 6


def solutions(count: int, seed: int = 0) -> Dataset:
    """Countings on, two to a problem, of which a step is right if it says the next number."""
    chooser = random.Random(seed)
    rows = []
    for number in range(count):
        start = number // 2 * 3 % 40
        right = [chooser.random() < 0.6 for _ in range(chooser.randrange(1, 6))]
        steps = [f"After it comes {start + place + is_right}." for place, is_right in enumerate(right)]
        rows.append({"prompt": f"Count on from {start}, slowly:", "completions": steps, "labels": right})
    return Dataset.from_list(rows)


def save_model(folder: Path) -> str:
    rows = solutions(20)
    tiny.save_tiny(folder, [*rows["prompt"], *(text for row in rows["completions"] for text in row)])
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder, num_labels=2, classifier_dropout=0.0)
    AutoModelForTokenClassification.from_config(config).save_pretrained(folder)
    return str(folder)


def load(model: str, **kwargs: Any) -> Any:
    return AutoModelForTokenClassification.from_pretrained(model, **kwargs)


def settings(out: Path, **more: Any) -> PRMConfig:
    given: dict[str, Any] = {
        "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "max_steps": STEPS,
        "per_device_train_batch_size": BATCH, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "bf16": False,
        "train_sampling_strategy": "sequential",
    }  # fmt: skip
    return PRMConfig(str(out), **given | more)


def by_transformers(model: str, rows: Dataset, held_out: Dataset, batch: int = BATCH) -> tuple[list[float], float]:
    """The losses of a plain loop, and that of all held-out rows in one batch afterwards."""
    examples, others = rows.to_list(), held_out.to_list()
    module, collate = load(model), DataCollatorForTokenClassification(AutoTokenizer.from_pretrained(model))
    optimizer, losses = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.0), []
    for step in range(min(STEPS, -(-len(examples) // batch))):
        loss = module(**collate(examples[step * batch : (step + 1) * batch])).loss  # of the last batch, two
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        evaluated = module(**collate(others)).loss.item()
    return losses, evaluated
