"""What ``trl-tpu reward --dry_run`` shows: pairs as the model will see them, devices, rows and the schedule."""

import math
from collections.abc import Iterable
from itertools import islice, takewhile
from typing import Any

import torch
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedTokenizerBase, get_scheduler
from transformers.trainer_utils import has_length

from trl_tpu.config.reward_config import RewardConfig
from trl_tpu.data.checks import TOKEN_COLUMNS
from trl_tpu.trainer.reward_trainer import RewardTrainer

_PAIRS = 3
_SHOWN = 300  # characters of a text's beginning, and of its end


def describe_run(trainer: RewardTrainer) -> str:
    """Return what a training that has not begun will do, in lines for a terminal."""
    pairs = "\n\n".join(
        describe_pair(row[TOKEN_COLUMNS[0]], row[TOKEN_COLUMNS[1]], trainer.processing_class, number)
        for number, row in enumerate(islice(_rows(trainer.train_dataset), _PAIRS))
    )
    end = "Nothing was trained: --dry_run ends before the first step."
    return "\n\n".join([pairs, trainer.describe(), _schedule(trainer), end])


def _rows(dataset: Any) -> Iterable[dict[str, Any]]:
    return dataset.select(range(min(_PAIRS, len(dataset)))) if isinstance(dataset, Dataset) else dataset


def describe_pair(
    chosen_ids: list[int], rejected_ids: list[int], tokenizer: PreTrainedTokenizerBase, number: int = 0
) -> str:
    """Return a pair as the model sees it: what its dialogues share, how each goes on, and the token that is scored.

    Args:
        chosen_ids: Tokens of the chosen dialogue.
        rejected_ids: Tokens of the rejected one.
        tokenizer: Decodes them, special tokens too.
        number: Of the pair, for its title.
    """
    both = zip(chosen_ids, rejected_ids, strict=False)
    shared = sum(1 for _ in takewhile(lambda tokens: tokens[0] == tokens[1], both))
    lines = [
        f"Pair {number}: {len(chosen_ids)} and {len(rejected_ids)} tokens, of which the first {shared} are shared",
        f"  shared    {_shown(tokenizer.decode(chosen_ids[:shared]))}",
    ]
    for name, ids in (("chosen", chosen_ids), ("rejected", rejected_ids)):
        # as transformers finds it: the last token that is not the pad token
        scored = next((index for index in reversed(range(len(ids))) if ids[index] != tokenizer.pad_token_id), 0)
        token = tokenizer.decode([ids[scored]])
        lines.append(f"  {name:<8}  {_shown(tokenizer.decode(ids[shared:]))}")
        lines.append(f"            scored at token {scored + 1}: {token!r}")
    return "\n".join(lines)


def _shown(text: Any) -> str:
    quoted = repr(text)
    return quoted if len(quoted) <= 2 * _SHOWN else f"{quoted[:_SHOWN]} ... {quoted[-_SHOWN:]}"


def _schedule(trainer: RewardTrainer) -> str:
    args, dataset = trainer.args, trainer.train_dataset
    steps, epochs = _steps(trainer)
    pairs = f"{len(dataset):,} pairs" if has_length(dataset) else "a stream of pairs"
    batch = trainer.args.train_batch_size * trainer.accelerator.num_processes * args.gradient_accumulation_steps
    lines = [
        f"{steps:,} steps of {batch} pairs: {epochs}, {pairs}",
        f"learning rate {_rates(args, steps)}",
        f"logs {_every(args.logging_strategy, args.logging_steps, steps)}; evaluates "
        f"{_every(args.eval_strategy, args.eval_steps, steps)}; saves {_saves(args, steps)}",
    ]
    if (evaluated := trainer.eval_dataset) is not None:
        sets = evaluated if isinstance(evaluated, dict) else {"": evaluated}
        counts = [f"{name} {len(each):,}".strip() if has_length(each) else name for name, each in sets.items()]
        lines.append(f"evaluation on {', '.join(counts)} pairs")
    return "\n".join(["Schedule", *(f"  {line}" for line in lines)])


def _steps(trainer: RewardTrainer) -> tuple[int, str]:
    """Return how many steps there will be, and how many epochs that is in words, as transformers counts them."""
    args = trainer.args
    if not has_length(trainer.train_dataset):
        return args.max_steps, "max_steps"
    batches = len(trainer.get_train_dataloader())
    an_epoch = max(math.ceil(batches / args.gradient_accumulation_steps), 1)
    if args.max_steps > 0:
        return args.max_steps, f"max_steps, which is {args.max_steps / an_epoch:.3g} epochs"
    return math.ceil(args.num_train_epochs * an_epoch), f"{args.num_train_epochs:g} epochs"


def _rates(args: RewardConfig, steps: int) -> str:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=args.learning_rate)
    warmup = args.get_warmup_steps(steps)
    kwargs: Any = args.lr_scheduler_kwargs  # the config has parsed text
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, warmup, steps, kwargs)
    name = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    if not isinstance(schedule, LambdaLR):
        return f"{args.learning_rate:g}, by {name}"
    at = sorted({0, warmup, steps // 2, max(steps - 1, 0)})
    rates = ", ".join(f"{args.learning_rate * schedule.lr_lambdas[0](step):.3g} in step {step + 1:,}" for step in at)
    return f"by {name}, {warmup:,} steps of warm-up: {rates}"


def _every(strategy: Any, interval: float | None, steps: int) -> str:
    kind = getattr(strategy, "value", strategy)
    if kind != "steps":
        return {"no": "never", "epoch": "after each epoch", "best": "after the best evaluations"}.get(kind, str(kind))
    if interval is None:
        return "never"
    count = max(1, math.ceil(steps * interval)) if interval < 1 else int(interval)
    return f"every {count:,} steps"


def _saves(args: RewardConfig, steps: int) -> str:
    saves, limit = _every(args.save_strategy, args.save_steps, steps), args.save_total_limit
    return saves if limit is None or saves == "never" else f"{saves}, of which {limit} stay"
