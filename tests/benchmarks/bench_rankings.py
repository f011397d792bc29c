"""Rankings compared with the same comparisons as pairs, as TRL 1.16 needs: 8 answers to a long prompt, plain torch.

python -m tests.benchmarks.bench_rankings [--model 128x4] [--runs 3] [--steps 4]

Systems alternate, each on a new model, in float32. A batch has the same comparisons in all systems: two prompts, or
their 56 pairs, so losses are equal, too. Quote the ratios. "Planned" rows have fixed shapes with padding, as on TPUs.
"""

import random
import tempfile
from itertools import permutations
from typing import Any

from datasets import Dataset
from ranks import Planning

from trl_tpu.runtime import Runtime, replace

from . import harness

PROMPT, ANSWER, ANSWERS, PROMPTS_A_BATCH = 512, (24, 40), 8, 2  # tokens; an answer has about 32
COMPARISONS = ANSWERS * (ANSWERS - 1) // 2  # per prompt
TIME, TOKENS = "ms a comparison", "tokens a unique one"


SYSTEMS: dict[str, type[Runtime]] = {harness.TRL: Runtime, "rankings": Runtime, "rankings, planned": Planning}


def rankings(count: int) -> Dataset:
    """Return prompts of random token ids with fully ordered answers."""
    chooser = random.Random(0)

    def ids(length: int) -> list[int]:
        return chooser.choices(range(3, 1000), k=length)

    prompts = [ids(PROMPT) for _ in range(count)]
    answers = [[prompt + ids(chooser.randint(*ANSWER)) for _ in range(ANSWERS)] for prompt in prompts]
    grades = [chooser.sample(range(ANSWERS), ANSWERS) for _ in prompts]
    return Dataset.from_dict({"answer_ids": answers, "grades": grades})


def as_pairs(ranked: Dataset) -> Dataset:
    """Return every comparison as a pair; pairs of a prompt are consecutive."""
    pairs = [
        {"chosen_ids": better, "rejected_ids": worse}
        for row in ranked
        for (better, high), (worse, low) in permutations(zip(row["answer_ids"], row["grades"], strict=True), 2)
        if high > low
    ]
    return Dataset.from_list(pairs)


def compare(size: str, runs: int, steps: int) -> None:
    ranked = rankings(PROMPTS_A_BATCH * steps)
    unique = sum(PROMPT + sum(len(ids) - PROMPT for ids in row["answer_ids"]) for row in ranked)

    def run(system: str) -> dict[str, Any]:
        replace(SYSTEMS[system]())
        rows, count = (as_pairs(ranked), COMPARISONS) if system == harness.TRL else (ranked, 1)
        trained = harness.train(
            system, model, rows, max_steps=steps, per_device_train_batch_size=PROMPTS_A_BATCH * count,
            train_sampling_strategy="sequential", **harness.SMALL,
        )  # fmt: skip
        return {
            TIME: 1000 * trained.seconds_per_pair * count / COMPARISONS,
            TOKENS: trained.tokens() / unique,
            "losses": trained.losses,
        }

    with tempfile.TemporaryDirectory() as folder:
        model = harness.save_model(folder, size)
        batch = PROMPTS_A_BATCH * COMPARISONS
        title = f"{ANSWERS} answers to a prompt of {PROMPT} tokens: model {size}, {steps} steps of {batch} comparisons"
        columns = {TIME: ".2f", TOKENS: ".3f"}
        harness.compare_systems(title, runs, SYSTEMS, run, columns, shares=[TIME])


if __name__ == "__main__":
    options = harness.options(model="128x4", runs=3, steps=4)
    compare(options.model, options.runs, options.steps)
