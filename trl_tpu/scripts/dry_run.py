"""What ``trl-tpu reward --dry_run`` shows: pairs as the model will see them, devices, rows and the schedule."""

import math
from collections.abc import Iterable
from itertools import islice, takewhile
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import has_length

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
    steps, pairs = args.max_steps, "a stream of pairs"
    if has_length(dataset):
        pairs = f"{len(dataset):,} pairs"
        an_epoch = max(math.ceil(len(trainer.get_train_dataloader()) / args.gradient_accumulation_steps), 1)
        steps = steps if steps > 0 else math.ceil(args.num_train_epochs * an_epoch)
        pairs += f" are {steps / an_epoch:.3g} epochs"
    batch = args.train_batch_size * trainer.accelerator.num_processes * args.gradient_accumulation_steps
    strategies = {"logging": args.logging_steps, "eval": args.eval_steps, "save": args.save_steps}
    shown = {name: getattr(getattr(args, f"{name}_strategy"), "value", "") for name in strategies}
    lines = [
        f"{steps:,} steps of {batch} pairs: {pairs}",
        f"learning rate {args.learning_rate:g} by {getattr(args.lr_scheduler_type, 'value', args.lr_scheduler_type)}, "
        f"{args.get_warmup_steps(steps):,} steps of warm-up",
        ", ".join(f"{name}: {f'{strategies[name]:g} ' if by == 'steps' else ''}{by}" for name, by in shown.items()),
    ]
    return "\n".join(["Schedule", *(f"  {line}" for line in lines)])
