"""A batch: token rows, the positions in them where rewards are read, and a table of comparisons.

Pairs, rankings, several attributes and process rewards differ only in the table. Losses and metrics depend only on the
rewards of a batch and on its table.

Everywhere in this package, a row is a row of the data; where both meet, it is called a data row. A token row is a row
of `input_ids_RL`. Packed, padded, planned and expanded rows are token rows.

Letters: P data rows, K answers per data row, A attributes, S = P K scored positions, G = P A rankings, C comparisons,
R token rows, L columns per token row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

Array = TypeVar("Array")  # numpy arrays during packing, torch tensors after the collator
#: Fields of `Comparisons` that a micro-batch sets to 0 for data rows of other micro-batches.
WEIGHTS = ("weight_C", "ranking_weight_G", "row_weight_P")


class Expansion(NamedTuple, Generic[Array]):
    """Places of packed tokens in expanded rows, int32: see `pack.expand_rows`.

    Attributes:
        gather_R2L: Packed column whose token is copied to each expanded place; -1 for padding.
        segment_R2L: Number of the sequence at each expanded place; 0 for padding.
        scatter_R2L: Packed column that takes its output from each expanded place; -1 for padding and for unused
            copies.
        inverse_RL: Place in the two flattened expanded rows from which each packed token takes its output; -1 for
            padding.
    """

    gather_R2L: Array
    segment_R2L: Array
    scatter_R2L: Array
    inverse_RL: Array


class Segments(NamedTuple, Generic[Array]):
    """Places of all tails of an unpadded row, int32, for one attention call with segments of any length.

    The queries of a segment are a tail's own tokens, in the order of the row. Its keys are the tail's path and the
    tail, so a query sees all keys except those of later queries, and its distance to a key is their distance in the
    sequence.

    Attributes:
        key_K: Column of each key, segment after segment.
        query_starts: First query of each segment, and the number of queries, [N + 1].
        key_starts: First key of each segment, and the number of keys, [N + 1].
        max_queries: Most queries of a segment.
        max_keys: Most keys of a segment.
    """

    key_K: Array
    query_starts: Array
    key_starts: Array
    max_queries: int
    max_keys: int


class ReadOrder(NamedTuple, Generic[Array]):
    """Order in which recurrent layers read the tokens of unpadded rows: see `packing.read_order`.

    Columns are counted through all token rows, T in total.

    Attributes:
        token_E: Column of the token at each of E places; T before the first token of a tree.
        place_T: Place of each column's token; 0 for padding.
        is_empty_E: Whether no token is at a place.
        source_G: Place of each token of the rule's rows, group after group; E for padding.
        target_E: Index in `source_G` from which each place takes its output; 0 if its output is not used.
        groups: Rows and tokens per row of each group.
        paths: Number of groups of paths. They come first.
        state_N: For each row of the other groups, the number of the path that it continues; the number of paths for
            none.
    """

    token_E: Array
    place_T: Array
    is_empty_E: Array
    source_G: Array
    target_E: Array
    groups: tuple[tuple[int, int], ...]
    paths: int
    state_N: Array


class Arrays:
    """Base of dataclasses of arrays. Fields may also be `Arrays`, tuples of `Arrays` or of arrays, or other values."""

    def map_tensors(self, function: Callable[[Any], Any]) -> Any:
        """Return a copy with ``function`` applied to each array."""

        def mapped(value: Any) -> Any:
            if isinstance(value, Arrays):
                return value.map_tensors(function)
            if isinstance(value, tuple):
                return type(value)(*map(mapped, value)) if hasattr(value, "_fields") else tuple(map(mapped, value))
            return function(value) if hasattr(value, "dtype") else value

        instance: Any = self
        return replace(instance, **{item.name: mapped(getattr(self, item.name)) for item in fields(instance)})


@dataclass(frozen=True, eq=False)
class Comparisons(Arrays, Generic[Array]):
    """Comparisons between rewards of a batch, in arrays with shapes that depend only on P, K and A.

    Rewards are numbered by data row, answer and attribute: ``(p K + k) A + a``. Number -1 stands for the constant 0:
    steps and single answers are compared with it. Padding compares a reward with itself or with 0.

    Attributes:
        better_C: Number of the reward that should be higher, int32.
        worse_C: Number of the reward that should be lower, int32.
        probability_C: Probability that `better_C` is better than `worse_C`, 0.5 to 1.
        margin_C: Target margin, subtracted from the difference of the rewards.
        weight_C: Weight of each comparison in the loss, before division by `weight_sum_1`; 0 for padding.
        grade_SA: Grade of each reward for losses over whole rankings and for evaluation; NaN for padding.
        ranking_weight_G: Weight of each ranking in losses over whole rankings; 0 for padding.
        row_weight_P: Weight of each data row in the mean; 0 for padding.
        weight_sum_1: Divisor of the loss: the sum of the global batch's row weights, or a process's share of this sum.
        answers: K.
        kind: Kind of the data rows, see `trl_tpu.data.kinds`.
    """

    better_C: Array
    worse_C: Array
    probability_C: Array
    margin_C: Array
    weight_C: Array
    grade_SA: Array
    ranking_weight_G: Array
    row_weight_P: Array
    weight_sum_1: Array
    answers: int
    kind: Any

    def among(self, here_P: np.ndarray) -> "Comparisons[Any]":
        """Return the table with weight 0 for all data rows that ``here_P`` does not mark (numpy only)."""
        weights: Any = {name: getattr(self, name) for name in WEIGHTS}
        return replace(self, **{name: old * here_P.repeat(len(old) // len(here_P)) for name, old in weights.items()})

    def compared(self, rewards_SA: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rewards that should be higher and the rewards that should be lower, [C] each (torch only)."""
        rewards = rewards_SA.flatten()

        def of(number_C: Any) -> torch.Tensor:
            if not self.kind.compares_with_zero:
                return rewards[number_C]
            # A 0 in front of the rewards would do, but TorchTPU 0.2 confuses gradients that are parts of larger ones.
            return torch.where(number_C < 0, 0.0, rewards[number_C.clamp(min=0)])

        return of(self.better_C), of(self.worse_C)

    def graded_S(self, tokens_S: Any) -> Any:
        """Return the mask of the rewards with a grade in these token rows, [S] (torch only)."""
        return (tokens_S > 0) & ~cast(Any, self.grade_SA).isnan().all(-1)

    def by_ranking(self, values_SA: Any) -> Any:
        """Rearrange values [S, A] by ranking, [G, K] (torch only)."""
        return values_SA.unflatten(0, (-1, self.answers)).transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Tail:
    """The tokens that a sequence adds to its tree. They attend to their path, and causally within the tail.

    Attributes:
        start: First column of the tail, relative to the first column of the tree.
        path: Columns of the sequence's earlier tokens, as ranges relative to the first column of the tree.
    """

    start: int
    stop: int
    path: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """The columns of a prefix tree, counted through all token rows.

    Attributes:
        tails: The tree's tails in the order of columns. A tree without branches has one tail.
    """

    start: int
    stop: int
    tails: tuple[Tail, ...]


@dataclass(frozen=True, eq=False)
class Batch(Arrays, Generic[Array]):
    """A micro-batch, or a whole batch: the last micro-batch, with all others in `earlier`.

    Packed rows hold prefix trees of several sequences. Padded rows hold one sequence each, and have an
    `attention_mask_RL` instead of `position_ids_RL` and `subtree_end_RL`.

    The batch's loss and gradient are the sums of the micro-batches' losses and gradients. For transformers, accelerate
    and scripts, a batch behaves like TRL's dict: `to` moves it to a device, and `input_ids` and `attention_mask` are
    created on request.

    Attributes:
        input_ids_RL: Token ids. Padding columns hold the pad token.
        token_row_S: Token row in which each reward is read, int32; 0 without a reward in these token rows.
        token_column_S: Column of the token at which each reward is read, int32; 0 without a reward here.
        tokens_S: Tokens from the previous reward of the sequence to this reward, int32; 0 without a reward in these
            token rows. Shared tokens count for every sequence.
        table: Comparisons of the rewards that are read in these token rows.
        position_ids_RL: Index of each token in its sequence, int32.
        subtree_end_RL: Token q attends to token k exactly when ``k <= q < subtree_end[k]``, int32.
        attention_mask_RL: 1 for tokens, 0 for padding.
        expansion: Places of the tokens in expanded rows, for models that attend in rows of whole sequences.
        trees: The trees of an unpadded row: attention is computed tree by tree. None for token rows with one mask.
        segments: The tails of an unpadded row, to compute attention in one call. None: tree by tree.
        read_order: Order in which recurrent layers read unpadded rows.
        extras: Further arguments of the model: additional keys of a user-defined collator's batch.
        earlier: Micro-batches to compute before this one, in order. They only accumulate gradients.
    """

    input_ids_RL: Array
    token_row_S: Array
    token_column_S: Array
    tokens_S: Array
    table: Comparisons[Array]
    position_ids_RL: Array | None = None
    subtree_end_RL: Array | None = None
    attention_mask_RL: Array | None = None
    expansion: Expansion[Array] | None = None
    trees: tuple[Tree, ...] | None = None
    segments: Segments[Array] | None = None
    read_order: ReadOrder[Array] | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)
    pad_token_id: int = 0
    earlier: tuple["Batch[Array]", ...] = ()

    @property
    def parts(self) -> tuple["Batch[Array]", ...]:
        """The micro-batches, in order."""
        return (*self.earlier, replace(self, earlier=())) if self.earlier else (self,)

    def tensors(self) -> dict[str, Any]:
        """Return all arrays by name, except `segments`, `read_order` and those of earlier micro-batches."""
        expansion = {} if self.expansion is None else self.expansion._asdict()
        values = vars(self) | vars(self.table) | expansion
        return {name: value for name, value in values.items() if hasattr(value, "dtype")}

    @property
    def is_packed(self) -> bool:
        return self.subtree_end_RL is not None

    @property
    def present_P(self) -> Any:
        """Mask of the data rows in this micro-batch, [P]."""
        return cast(Any, self.tokens_S).reshape(-1, self.table.answers).any(-1)

    # ---- the interface for loaders and scripts

    def to(self, device: Any, non_blocking: bool = False) -> "Batch[Array]":
        # copies of pinned memory need not wait for the device
        return self.map_tensors(lambda array: array.to(device, non_blocking=non_blocking or array.is_pinned()))

    def pin_memory(self) -> "Batch[Array]":
        return self.map_tensors(torch.Tensor.pin_memory)

    def __len__(self) -> int:
        """Return the number of micro-batches."""
        return len(self.earlier) + 1

    def __contains__(self, key: object) -> bool:
        return key in ("input_ids", "attention_mask")

    def __getitem__(self, key: str) -> torch.Tensor:
        """Return `input_ids` or `attention_mask` [K P, L], padded and in TRL's order.

        Raises:
            KeyError: The batch has no such key.
        """
        if key not in self:
            raise KeyError(f"{key!r} is not in this batch. Its keys are input_ids and attention_mask.")
        ids_D = [torch.from_numpy(ids).long() for ids in self._sequences()]
        stored = cast(torch.Tensor, self.input_ids_RL)
        if not ids_D:  # a process without data rows
            return torch.zeros(0, 0, dtype=torch.long, device=stored.device)
        values, fill = (ids_D, self.pad_token_id) if key == "input_ids" else (list(map(torch.ones_like, ids_D)), 0)
        return pad_sequence(values, batch_first=True, padding_value=fill).to(stored.device)

    def items(self) -> list[tuple[str, torch.Tensor]]:
        """Return the keys and tensors of `__getitem__`, for code that moves or passes on TRL's dict."""
        return [(key, self[key]) for key in ("input_ids", "attention_mask")]

    def _sequences(self) -> list[np.ndarray]:
        """Return sequences up to their last scored token: first all first answers, then all second answers, ..."""
        sequences, answers = dict[tuple[int, int], np.ndarray](), self.table.answers
        for part in self.parts:
            host = part.map_tensors(lambda tensor: tensor.cpu().numpy())
            for place in np.flatnonzero(host.tokens_S).tolist():
                row, column = host.token_row_S[place], host.token_column_S[place]
                ids_L = host.input_ids_RL[row, : column + 1]
                if host.is_packed:
                    ids_L = ids_L[host.subtree_end_RL[row, : column + 1] > column]
                answer = 0 if part.table.kind.is_one_sequence else place % answers
                sequences[answer, place // answers] = ids_L
        return [sequences[key] for key in sorted(sequences)]


def micro_batches_of(inputs: Any) -> tuple[Any, ...]:
    """Return the micro-batches of a loader's batch; a user-defined dict is one micro-batch."""
    return inputs.parts if isinstance(inputs, Batch) else (inputs,)


def tensors_in(inputs: Any) -> Mapping[str, Any]:
    """Return the tensors of a micro-batch, or of a user-defined dict, by name."""
    return inputs.tensors() if isinstance(inputs, Batch) else inputs
