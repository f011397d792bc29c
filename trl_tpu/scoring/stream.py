"""Scores a stream of rows in windows, and sums them up."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import numpy as np
import torch

from ..data import checks
from ..data.comparisons import Labels
from ..data.formats import convert_row, date_written
from ..errors import UserError
from ..evaluation.judge import grades_beside_rewards, parts_of, rankings_of, top1_of
from ..evaluation.reward_sums import RewardSums, pairs_of, sums_on_host
from .forms import REASON, Dialogue, Form, all_of, tokenize
from .scorer import TOKENS_A_PASS, Scorer

logger = logging.getLogger(__name__)


@dataclass
class Summary:
    """Sums over scored rows, so that memory does not grow with their number.

    Args:
        columns: The columns of rewards.
    """

    columns: tuple[str, ...]
    rows: int = 0
    pairs: RewardSums = field(default_factory=RewardSums)
    by_column: defaultdict[str, RewardSums] = field(default_factory=lambda: defaultdict(RewardSums))
    """The sums of each column, as if each of its rewards were a pair with itself."""
    rankings: RewardSums = field(default_factory=RewardSums)
    """The sums of rows of answers with scores or ranks."""
    top1: float = 0.0
    """The sum of `top1_of` over those that have any comparison."""
    without: int = 0
    """Rows that lack a reward."""
    reason: str | None = None
    """Why the first of them does."""

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take scored rows into account."""
        self.rows += len(rows)
        for column in self.columns:
            rewards = [reward for row in rows for reward in _numbers(row.get(column))]
            self.by_column[column] += _sums_of([(reward, reward) for reward in rewards])
        parts = [part for row in rows for part in parts_of(row)]
        both = [(part.get("reward_chosen"), part.get("reward_rejected")) for part in parts]
        self.pairs += _sums_of([pair for pair in both if all(isinstance(reward, float) for reward in pair)])
        ranked = [
            (part["rewards"], grades)
            for part in parts
            if part[REASON] is None and (grades := grades_beside_rewards(part))
        ]
        if ranked:
            rewards_NK, grade_NK = rankings_of(*zip(*ranked, strict=True))
            labels = Labels(grade_NK[:, None].astype(np.float32), None, are_rankings=True)
            self.rankings += sums_on_host(torch.from_numpy(rewards_NK)[:, None], labels)
            self.top1 += top1_of(rewards_NK, grade_NK)[[len(set(grades)) > 1 for _, grades in ranked]].sum().item()
        reasons = [row[REASON] for row in rows if row[REASON] is not None]
        self.without += len(reasons)
        self.reason = self.reason or next(iter(reasons), None)

    @property
    def has_rewards(self) -> bool:
        return any(sums.pairs for sums in self.by_column.values())

    def lines(self) -> Iterator[str]:
        """Yield accuracy and margin of pairs, those of rankings, and the range of each column."""
        if found := self.pairs.metrics():
            yield f"{'pairs' if 'reward_chosen' in self.columns else 'steps':<16} {self.pairs.pairs}"
            yield f"accuracy         {found['accuracy']:.4f}"
            yield f"ties             {self.pairs.ties:.0f}"
            yield f"mean margin      {found['margin']:.4f}"
        if compared := self.rankings.comparisons:
            yield f"rankings         {self.rankings.pairs}"
            accuracy, tie_rate = (self.rankings.metrics()[name] for name in ("accuracy", "tie_rate"))
            yield f"accuracy         {accuracy:.4f}"
            yield f"top1_accuracy    {self.top1 / compared:.4f}"
            yield f"kendall_tau      {2 * accuracy + tie_rate - 1:.4f}"
        for column, sums in self.by_column.items():
            if found := sums.metrics():
                mean, least, largest = (found[f"{which}_reward"] for which in ("mean", "min", "max"))
                yield f"{column:<16} mean {mean:.4f}, min {least:.4f}, max {largest:.4f}"
        if not self.has_rewards:
            yield "no row was scored"

    def complaint(self) -> str | None:
        """Say how many rows lack a reward, and why the first of them does; None if none does."""
        if not self.without:
            return None
        return f"{self.without} of {self.rows} rows have no reward, or lack one; `{REASON}` says why: {self.reason}"


def _sums_of(pairs: list[tuple[Any, Any]]) -> RewardSums:
    return sums_on_host(torch.tensor(pairs, dtype=torch.float64).reshape(-1, 1, 2), pairs_of(len(pairs)))


def _numbers(value: Any) -> list[float]:
    return [each for each in (value if isinstance(value, list) else [value]) if each is not None]


#: Rows that are tokenized, packed and computed together.
WINDOW = 1024

Row = Mapping[str, Any]

#: Some rows as they came, and with their rewards.
Window = tuple[list[Row | UserError], list[dict[str, Any]]]


def score(
    model: str | Scorer,
    rows: Iterable[Row | Dialogue],
    *,
    max_length: int | None = None,
    best_of_n: bool = False,
    bf16: bool = False,
    mesh: str = "fsdp=-1",
    tokens_per_pass: int = TOKENS_A_PASS,
    standardize: bool = False,
    trust_remote_code: bool = False,
) -> Iterator[dict[str, Any]]:
    """Score rows with a saved reward model on the device that training would take, as many as there are.

    What dialogues share is computed once. Rewards equal those of one dialogue at a time to rounding.

    Args:
        model: Folder (or Hub id) of a saved reward model or of its adapters; or a `Scorer`, to load it only once,
            whose own settings then hold.
        rows: Rows of one of the forms in `trl_tpu.scoring.forms`: a dataset, a list, an iterator; or texts, or lists
            of messages.
        max_length: Dialogues of more tokens get no reward, as training leaves them out; no limit when None.
        best_of_n: Whether only the best of each row's ``completions`` is kept, as ``completion`` and ``reward``.
        bf16: Whether to compute in bfloat16, over float32 weights.
        mesh: How the devices of PyTorch/XLA share the weights, as in training.
        tokens_per_pass: Tokens that each device computes at a time.
        standardize: Whether rewards are ``(reward - mean) / std``, by the mean and std in the model's config.
        trust_remote_code: Whether the model may bring its own code.

    Returns:
        An iterator over the rows in their order, each with rewards, numbers of tokens, and in ``not_scored`` what
        keeps it from having a reward, which then is None.

    Raises:
        UserError: No rows, or columns that cannot be scored; a folder that holds no saved reward model.
    """
    form, coming = look_at(map(_as_row, rows), best_of_n)
    if not isinstance(model, Scorer):
        settings: dict[str, Any] = {"bf16": bf16, "mesh": mesh, "tokens_per_pass": tokens_per_pass}
        model = Scorer(model, trust_remote_code, standardize=standardize, **settings)
    return chain.from_iterable(scored for _, scored in scored_windows(model, coming, form.of_model(model), max_length))


def _as_row(row: Any) -> Row:
    if isinstance(row, str):
        return {"text": row}
    return {"messages": row} if isinstance(row, list) else row


def look_at(rows: Iterable[Row | UserError], best_only: bool) -> tuple[Form, Iterator[Row | UserError]]:
    """Find out the form of rows by their first one, and return them all.

    Raises:
        UserError: There are none, the first is broken, or its columns cannot be scored.
    """
    coming = iter(rows)
    first = next(coming, None)
    if first is None:
        raise UserError("There are no rows to score.")
    if isinstance(first, UserError):
        raise first
    converted, forms = convert_row(first)
    if forms:
        logger.warning(f"In the rows to score, there are {', '.join(forms)}.")
    return Form.of({**first, **converted}, best_only), chain([first], coming)


def scored_windows(
    scorer: Scorer, rows: Iterable[Row | UserError], form: Form, max_length: int | None = None, first: int = 0
) -> Iterator[Window]:
    """Yield `WINDOW` rows at a time, as they came, and with their rewards.

    Args:
        scorer: The model.
        rows: The rows from the ``first`` on; in the place of a broken one, what is wrong with it.
        form: Of the rows.
        max_length: Most tokens of a dialogue that gets a reward; no limit when None.
        first: The number of the first row.
    """
    coming = iter(rows)
    computing: list[Callable[[], Window]] = []
    while some := list(islice(coming, WINDOW)):
        computing.append(_start(scorer, some, form, max_length, first))
        first += len(some)
        # a device computes this window while the next one is tokenized
        if len(computing) > (scorer.device.type != "cpu"):
            yield computing.pop(0)()
    for window in computing:
        yield window()


def _start(
    scorer: Scorer, rows: list[Row | UserError], form: Form, max_length: int | None, first: int
) -> Callable[[], Window]:
    read = [
        form.read(row, checks.row_of(number, "scored"), scorer.tokenizer) for number, row in enumerate(rows, first)
    ]
    ready = tokenize([item for items in read for item in all_of(items)], scorer, max_length)
    chats = ((item.dialogue, item.row) for item, _ in ready if isinstance(item.dialogue, list))
    date_written(scorer.tokenizer, chats)  # for its warning
    rewards = scorer.start([ids for _, ids in ready])

    def written() -> Window:
        for (item, _), (reward, *by_attribute) in zip(ready, rewards().tolist(), strict=True):
            if np.isfinite(reward):
                item.reward = reward
                item.by_attribute = dict(zip(scorer.outputs.attributes, by_attribute, strict=True))
            else:
                item.fault = f"{item.where}: the reward is {reward}, which the model computes there"
        return rows, [
            form.written({} if isinstance(row, UserError) else row, items, bool(scorer.outputs.attributes))
            for row, items in zip(rows, read, strict=True)
        ]

    return written
