"""Formats of labels by name: their rows, a model for them, and their trainer."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import tiny
import torch
import transformers
from datasets import Dataset
from training import QUIET, trained
from transformers import AutoConfig, AutoModelForTokenClassification, AutoTokenizer, DataCollatorForTokenClassification

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.experimental.prm import PRMConfig, PRMTrainer

NAMES = ["far", "calm", "odd"]
WEIGHTS = [0.65, -0.4, 0.5]


def graded(count: int, missing: tuple[str, ...] = (), seed: int = 0) -> Dataset:
    """Return answers graded by how far they count, how calmly, and sometimes by odd numbers of steps."""
    chooser = random.Random(seed)

    def row(number: int) -> dict[str, Any]:
        steps = chooser.sample(range(8), chooser.randrange(2, 5))
        texts = [" " + " ".join(["on"] * step + ["stop"] * (8 - step)) for step in steps]
        grades = {"far": [float(step) for step in steps], "calm": [-abs(step - 3.5) for step in steps]}
        grades["odd"] = [float(step % 2) for step in steps]
        left_out = {*missing, *NAMES[1 + number % 2 :: 2][: number % 3 == 0]}
        scores = {name: None if name in left_out else each for name, each in grades.items()}
        return {"prompt": f"Count on from {chooser.randrange(50)}:", "completions": texts, "scores": scores}

    return Dataset.from_list([row(number) for number in range(count)])


def answers(count: int, seed: int = 0) -> Dataset:
    """Return single answers that name the next number, labeled with the probability that it is right."""
    chooser = random.Random(seed)
    rows = []
    for number in range(count):
        start, label = number % 17, chooser.choice([0.0, 1.0, 0.8])
        said = start + 1 + (label == 0)
        rows.append({"prompt": f"Count on from {start}:", "completion": f" {said} and on", "label": label})
    return Dataset.from_list(rows)


def solutions(count: int, seed: int = 0) -> Dataset:
    """Return two solutions per problem; a step is right if it names the next number."""
    chooser = random.Random(seed)
    rows = []
    for number in range(count):
        start = number // 2 * 3 % 40
        right = [chooser.random() < 0.6 for _ in range(chooser.randrange(1, 6))]
        steps = [f"After it comes {start + place + is_right}." for place, is_right in enumerate(right)]
        rows.append({"prompt": f"Count on from {start}, slowly:", "completions": steps, "labels": right})
    return Dataset.from_list(rows)


@dataclass(frozen=True)
class LabelFormat:
    """A format: ``rows`` builds a number of rows, and ``outputs`` is the number of the model's outputs."""

    rows: Callable[[int], Dataset]
    outputs: int = 1
    auto: Any = transformers.AutoModelForSequenceClassification
    settings: dict[str, Any] = field(default_factory=dict)
    config: type[RewardConfig] = RewardConfig
    trainer: type[RewardTrainer] = RewardTrainer

    def model(self, folder: str) -> Any:
        """Return the folder of a model, or a new model of the same size with ``outputs`` outputs."""
        transformers.set_seed(0)
        config = AutoConfig.from_pretrained(folder, num_labels=self.outputs)
        return folder if self.outputs == 1 else self.auto.from_config(config)


LABEL_FORMATS = {
    "ranked": LabelFormat(partial(tiny.made_up_rankings, most=4)),
    "attributes": LabelFormat(graded, 3, settings={"attributes": NAMES, "attribute_weights": WEIGHTS, "ties": "skip"}),
    "answers": LabelFormat(answers),
    "steps": LabelFormat(solutions, 2, AutoModelForTokenClassification, {}, PRMConfig, PRMTrainer),
}


def losses(name: str, folder: str, out: str, **settings: Any) -> list[float]:
    """Return the losses logged by a short run on a format."""
    form = LABEL_FORMATS[name]
    args = form.config(out, **settings, **form.settings)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = trained(form.trainer(form.model(folder), args, train_dataset=form.rows(64), processing_class=tokenizer))
    return [logs["loss"] for logs in trainer.state.log_history if "loss" in logs]


def format_in(words: str) -> LabelFormat:
    """Return the format named in the name of a test case, or else that of pairs."""
    return next((form for name, form in LABEL_FORMATS.items() if name in words), LabelFormat(tiny.made_up_pairs))


# ---- process rewards: a tiny token classifier, and a plain training loop for it

BATCH, STEPS = 4, 6


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
    given = QUIET | {"save_strategy": "no", "logging_steps": 1, "max_steps": STEPS, "learning_rate": 1e-3}
    given |= {"per_device_train_batch_size": BATCH, "lr_scheduler_type": "constant"}
    given |= {"train_sampling_strategy": "sequential"}
    return PRMConfig(str(out), **given | more)


def by_transformers(model: str, rows: Dataset, held_out: Dataset) -> tuple[list[float], float]:
    """Return the losses of a plain loop, and the loss of all held-out rows in one batch afterwards."""
    examples, others = rows.to_list(), held_out.to_list()
    module, collate = load(model), DataCollatorForTokenClassification(AutoTokenizer.from_pretrained(model))
    optimizer, losses = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.0), []
    for step in range(min(STEPS, -(-len(examples) // BATCH))):
        loss = module(**collate(examples[step * BATCH : (step + 1) * BATCH])).loss  # the last batch has two rows
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        evaluated = module(**collate(others)).loss.item()
    return losses, evaluated
