"""Forms of judgement, by name: rows of each, a model for them, and the trainer that takes both."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import tiny
import torch
from datasets import Dataset
from training import QUIET, trained
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    set_seed,
)

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.experimental.prm import PRMConfig, PRMTrainer

NAMES = ["far", "calm", "odd"]
WEIGHTS = [0.65, -0.4, 0.5]


def graded(count: int, missing: tuple[str, ...] = (), seed: int = 0) -> Dataset:
    """Answers that count on: how far, how calmly, and sometimes whether the number of steps is odd."""
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
    """Countings on, each by itself, with how likely the next number is the right one."""
    chooser = random.Random(seed)
    rows = []
    for number in range(count):
        start, label = number % 17, chooser.choice([0.0, 1.0, 0.8])
        said = start + 1 + (label == 0)
        rows.append({"prompt": f"Count on from {start}:", "completion": f" {said} and on", "label": label})
    return Dataset.from_list(rows)


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


@dataclass(frozen=True)
class Form:
    """One form: ``rows`` makes as many as it is told to, and ``outputs`` is how many the model has."""

    rows: Callable[[int], Dataset]
    outputs: int = 1
    auto: Any = AutoModelForSequenceClassification
    settings: dict[str, Any] = field(default_factory=dict)
    config: type[RewardConfig] = RewardConfig
    trainer: type[RewardTrainer] = RewardTrainer

    def model(self, folder: str) -> Any:
        """The model of a folder, or one of its size with other outputs."""
        set_seed(0)
        config = AutoConfig.from_pretrained(folder, num_labels=self.outputs)
        return folder if self.outputs == 1 else self.auto.from_config(config)


FORMS = {
    "ranked": Form(partial(tiny.made_up_rankings, most=4)),
    "attributes": Form(graded, 3, settings={"attributes": NAMES, "attribute_weights": WEIGHTS, "ties": "skip"}),
    "answers": Form(answers),
    "steps": Form(solutions, 2, AutoModelForTokenClassification, {}, PRMConfig, PRMTrainer),
}


def losses(name: str, folder: str, out: str, **settings: Any) -> list[float]:
    """What a short run of a form logs."""
    form = FORMS[name]
    args = form.config(out, **settings, **form.settings)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = trained(form.trainer(form.model(folder), args, train_dataset=form.rows(64), processing_class=tokenizer))
    return [logs["loss"] for logs in trainer.state.log_history if "loss" in logs]


def form_in(words: str) -> Form:
    """The form that is named somewhere in the name of a test's case; else pairs."""
    return next((form for name, form in FORMS.items() if name in words), Form(tiny.made_up_pairs))


# ---- process rewards: a tiny token classifier, and its training by a plain loop

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
