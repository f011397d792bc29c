"""One batch: rows of tokens, the positions in them where rewards are read, and a table of comparisons.

Pairs, rankings, several attributes and process rewards differ only in the table. Losses and metrics read the rewards
of a batch and its table, and nothing else.

Letters: P rows of the data, K answers of each, A attributes, S = P K scored positions, G = P A rankings,
C comparisons, R rows of tokens, L their length.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, Literal, NamedTuple, NoReturn, TypeVar, cast

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from ..errors import UserTypeError

Array = TypeVar("Array")  # numpy's while packing, torch's from the collator on
Kind = Literal["pairs", "rankings", "answers", "steps"]
POINTWISE_KINDS = ("answers", "steps")
"""Kinds of rows whose rewards are compared with the constant 0."""
WEIGHTS = ("weight_C", "ranking_weight_G", "row_weight_P")
"""Fields of `Comparisons` that are 0 in a micro-batch for rows of the data that it does not have."""


class Expansion(NamedTuple, Generic[Array]):
    """Where the tokens of packed rows lie in expanded rows, int32: see `planned.expand_rows`."""

    gather_R2L: Array
    """The column of the packed row whose token is copied to each place; -1 for padding."""
    segment_R2L: Array
    """A number for each sequence of a row; 0 for padding."""
    scatter_R2L: Array
    """The column that takes its output from each place; -1 where none does, as it has another copy or is padding."""
    inverse_RL: Array
    """For each token, the place in the two rows, flattened, that its output is taken from; -1 for padding."""


class Arrays:
    """A dataclass of arrays and other values; fields may also be `Arrays`, an `Expansion`, or a tuple of `Arrays`."""

    def tensors(self) -> dict[str, Any]:
        """Return all arrays by name, but those in tuples."""
        found = dict[str, Any]()
        for name, value in vars(self).items():
            if isinstance(value, Arrays | Expansion):
                found |= value.tensors() if isinstance(value, Arrays) else value._asdict()
            elif hasattr(value, "dtype"):
                found[name] = value
        return found

    def map_tensors(self, function: Callable[[Any], Any]) -> Any:
        """Return a copy with ``function`` of each array."""

        def mapped(value: Any) -> Any:
            if isinstance(value, Arrays):
                return value.map_tensors(function)
            if isinstance(value, Expansion):
                return Expansion(*map(function, value))
            if isinstance(value, tuple):
                return tuple(map(mapped, value))
            return function(value) if hasattr(value, "dtype") else value

        own: Any = self
        return replace(own, **{each.name: mapped(getattr(self, each.name)) for each in fields(own)})


@dataclass(frozen=True, eq=False)
class Comparisons(Arrays, Generic[Array]):
    """Compared rewards of a batch, in arrays whose shapes depend on P, K and A alone.

    Rewards are numbered row by row, answer by answer, attribute by attribute: ``(p K + k) A + a``. Number -1 is the
    constant 0, with which steps and single answers are compared. Padding compares a reward with itself, or with 0.
    """

    better_C: Array
    """Number of the reward that should be higher, int32."""
    worse_C: Array
    probability_C: Array
    """Probability that `better_C` is the better one, 0.5 to 1."""
    margin_C: Array
    """Target margin, subtracted from the difference of the rewards."""
    weight_C: Array
    """Weight in the sum that is divided by `weight_sum_1`; 0 for padding."""
    grade_SA: Array
    """Grade of each reward, NaN for padding: for losses of whole rankings, and for evaluation."""
    ranking_weight_G: Array
    """Weight of each ranking in losses of whole rankings; 0 for padding."""
    row_weight_P: Array
    """Weight of each row of the data in the mean; 0 for padding."""
    weight_sum_1: Array
    """What the loss is divided by: the row weights of the global batch, or a process's share of them."""
    answers: int
    """K."""
    kind: Kind = "pairs"
    """What the rows of the data are."""

    def among(self, here_P: np.ndarray) -> "Comparisons[Any]":
        """Return the same table without the comparisons of rows that are elsewhere (numpy only)."""
        weights: Any = {name: getattr(self, name) for name in WEIGHTS}
        rows = len(here_P)
        return replace(self, **{name: each * np.repeat(here_P, len(each) // rows) for name, each in weights.items()})

    def compared(self, rewards_SA: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rewards that should be higher, and those that they are compared with, [C] each (torch only)."""
        rewards = rewards_SA.flatten()

        def of(number_C: Any) -> torch.Tensor:
            if self.kind not in POINTWISE_KINDS:
                return rewards[number_C]
            # no 0 is put before the rewards: TorchTPU 0.2 confuses gradients that are parts of larger ones
            return torch.where(number_C < 0, 0.0, rewards[number_C.clamp(min=0)])

        return of(self.better_C), of(self.worse_C)

    def by_ranking(self, values_SA: Any) -> Any:
        """Return values of rewards [G, K], for each ranking those of its answers."""
        attributes = values_SA.shape[-1]
        return values_SA.reshape(-1, self.answers, attributes).swapaxes(1, 2).reshape(-1, self.answers)


@dataclass(frozen=True, slots=True)
class Tail:
    """The tokens that a sequence adds to its tree: they see their path, and one another in order."""

    start: int
    """Their first column, counted from the tree's."""
    stop: int
    path: tuple[tuple[int, int], ...]
    """The columns before them in their sequence, as ranges counted from the tree's first."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Where a tree lies in its row."""

    start: int
    stop: int
    tails: tuple[Tail, ...]
    """Its tokens in order. A tree that does not branch has one tail."""


@dataclass(frozen=True, eq=False)
class Batch(Arrays, Generic[Array]):
    """A micro-batch; the last one of a batch, which updates, stands for all of it, and has the others in `earlier`.

    Packed rows hold prefix trees of several sequences. Padded rows hold one sequence each, and have an
    `attention_mask_RL` instead of `position_ids_RL` and `subtree_end_RL`.

    The sum of the micro-batches' losses is the batch's loss, and the sum of their gradients its gradient. To
    transformers, accelerate and scripts a batch looks like TRL's dict as far as they need it: it moves to a device by
    `to`, and has `input_ids` and `attention_mask`, which are made on request.
    """

    input_ids_RL: Array
    """Token ids. Padding columns hold the pad token."""
    score_row_S: Array
    """The row of the token at which each reward is read, int32; 0 where there is no reward."""
    score_column_S: Array
    """Its column."""
    tokens_S: Array
    """Tokens that each reward adds to those before it in its row of the data, as if nothing were shared, int32.

    0 where there is no reward in these rows."""
    table: Comparisons[Array]
    """Compares the rewards of these rows of tokens."""
    position_ids_RL: Array | None = None
    """Index of each token in its sequence, int32."""
    subtree_end_RL: Array | None = None
    """Token q attends to token k exactly when ``k <= q < subtree_end[k]``, int32."""
    attention_mask_RL: Array | None = None
    """1 for tokens, 0 for padding."""
    expansion: Expansion[Array] | None = None
    """Where the tokens lie in rows of whole sequences, for models that attend there."""
    trees: tuple[Tree, ...] | None = None
    """Where the trees of an unpadded row lie, which attend one by one; None where whole rows are masked."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """Other keys of a batch that a user's collator made; the model is given them."""
    pad_token_id: int = 0
    earlier: tuple["Batch[Array]", ...] = ()
    """The micro-batches that are computed before this one, in order: they only accumulate gradients."""

    @classmethod
    def of(cls, parts: list["Batch[Array]"]) -> "Batch[Array]":
        """Return the batch of some micro-batches, in order."""
        return replace(parts[-1], earlier=tuple(parts[:-1]))

    @property
    def parts(self) -> tuple["Batch[Array]", ...]:
        """The micro-batches, in order."""
        return (*self.earlier, replace(self, earlier=())) if self.earlier else (self,)

    @property
    def is_packed(self) -> bool:
        return self.subtree_end_RL is not None

    def present_P(self) -> Any:
        """Return which rows of the data are in this micro-batch, [P]."""
        tokens_S: Any = self.tokens_S
        return tokens_S.reshape(-1, self.table.answers).any(-1)

    # ---- as loaders and scripts see it

    def to(self, device: Any, non_blocking: bool = False) -> "Batch[Array]":
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch[Array]":
        return self.map_tensors(torch.Tensor.pin_memory)

    def __len__(self) -> int:
        """Return the number of micro-batches."""
        return len(self.earlier) + 1

    def __iter__(self) -> NoReturn:
        raise UserTypeError("A batch is no dict: move it by `batch.to(device)`, give it to `compute_loss` as it is.")

    def __contains__(self, key: object) -> bool:
        return key in ("input_ids", "attention_mask")

    def __getitem__(self, key: str) -> torch.Tensor:
        """Return `input_ids` or `attention_mask` [K P, L], padded and in TRL's order.

        Raises:
            KeyError: The batch has no such key.
        """
        if key not in self:
            raise KeyError(f"{key!r} is not in this batch, which has input_ids and attention_mask.")
        ids_D, own = [torch.from_numpy(ids).long() for ids in self._sequences()], cast(torch.Tensor, self.input_ids_RL)
        if not ids_D:  # of a process without rows
            return torch.zeros(0, 0, dtype=torch.long, device=own.device)
        rows, fill = (ids_D, self.pad_token_id) if key == "input_ids" else (list(map(torch.ones_like, ids_D)), 0)
        return pad_sequence(rows, batch_first=True, padding_value=fill).to(own.device)

    def _sequences(self) -> list[np.ndarray]:
        """Return the token ids of sequences up to their last scored token: all first answers, then all second ones."""
        found, answers = dict[tuple[int, int], np.ndarray](), self.table.answers
        for part in self.parts:
            needed = (part.input_ids_RL, part.tokens_S, part.score_row_S, part.score_column_S, part.subtree_end_RL)
            on_host: Any = [None if each is None else cast(torch.Tensor, each).cpu().numpy() for each in needed]
            ids_RL, tokens_S, row_S, column_S, end_RL = on_host
            for place in np.flatnonzero(tokens_S).tolist():
                row, column = row_S[place], column_S[place]
                ids_L = ids_RL[row, : column + 1]
                if end_RL is not None:
                    ids_L = ids_L[end_RL[row, : column + 1] > column]
                found[0 if part.table.kind == "steps" else place % answers, place // answers] = ids_L
        return [found[key] for key in sorted(found)]


def micro_batches_of(inputs: Any) -> tuple[Any, ...]:
    """Return the parts of a loader's batch that are computed one at a time: micro-batches, or a user's dict whole."""
    return inputs.parts if isinstance(inputs, Batch) else (inputs,)


def tensors_in(inputs: Any) -> Mapping[str, Any]:
    """Return the tensors of such a part by name."""
    return inputs.tensors() if isinstance(inputs, Batch) else inputs
