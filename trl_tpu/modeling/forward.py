"""Rewards of a batch by one forward over all of its sequences, and attention over packed rows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function
from transformers.utils.output_capturing import CompileableContextVar

from ..errors import UserError
from ..packing.batch import Batch, Tail, Tree
from ..packing.shapes import round_up
from .head_spec import find_score_head


class PackingImpossible(UserError):
    """Packed rows cannot be used; the message says why."""


@dataclass(frozen=True, eq=False)
class TreeMasks:
    """The masks of an unpadded row, one per tree."""

    trees: tuple[tuple[Tree, torch.Tensor | None], ...]
    """Each tree with its mask [1, 1, S, S]; None if the model's rule is plain causal attention."""
    tail_masks: dict[Tail, torch.Tensor]
    """Additive masks [1, 1, T, K] of later tails in trees without a mask: T tail tokens, K keys of path and tail."""

    def __getitem__(self, part: Any) -> "TreeMasks":
        """Return all masks: models such as Gemma 4 slice masks to the keys of a cache, and training has no cache."""
        return self


@dataclass(frozen=True, eq=False)
class JointMask:
    """One mask for all trees of an unpadded row, which attend together as T rows of L columns."""

    column_TL: torch.Tensor
    """Column of each token in the unpadded row; an arbitrary column for padding."""
    place_S: torch.Tensor
    """Place of each of the unpadded row's S tokens in the flattened T rows."""
    mask: torch.Tensor
    """The mask [T, 1, L, L]."""

    def __getitem__(self, part: Any) -> "JointMask":
        """Return the whole mask: see `TreeMasks`."""
        return self

    def rows_of(self, states_1NSD: torch.Tensor) -> torch.Tensor:
        """Copy heads' states of the unpadded row to the T rows: [T, N, L, D]."""
        states_NMD = states_1NSD[0].index_select(1, self.column_TL.flatten())
        return states_NMD.unflatten(1, self.column_TL.shape).transpose(0, 1)


def attend_tree_by_tree(
    plain: Callable[..., tuple[torch.Tensor, Any]],
    module: nn.Module,
    query_BNLD: torch.Tensor,
    key_BNLD: torch.Tensor,
    value_BNLD: torch.Tensor,
    attention_mask: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    """Attend in an unpadded row one tree at a time, or with a `JointMask` in all at once; else as ``plain`` does.

    In a tree without a mask, attention is computed tail by tail; the keys of a tail's path come before its own keys.
    """
    if isinstance(attention_mask, JointMask):
        rows = map(attention_mask.rows_of, (query_BNLD, key_BNLD, value_BNLD))
        output_TLND = plain(module, *rows, attention_mask.mask, *args, **kwargs)[0]
        return output_TLND.flatten(0, 1).index_select(0, attention_mask.place_S)[None], None
    if not isinstance(attention_mask, TreeMasks):
        return plain(module, query_BNLD, key_BNLD, value_BNLD, attention_mask, *args, **kwargs)
    outputs: list[torch.Tensor] = []
    # One split of the whole row: the backward of separate slices would write a row of zeros per slice.
    sizes = [tree.stop - tree.start for tree, _ in attention_mask.trees]
    trees = (states.split(sizes, dim=2) for states in (query_BNLD, key_BNLD, value_BNLD))
    for (tree, mask), *states in zip(attention_mask.trees, *trees, strict=True):
        if mask is not None:
            outputs.append(plain(module, *states, mask, *args, **kwargs)[0])
            continue
        sizes = [tail.stop - tail.start for tail in tree.tails]
        for tail, query, key, value in zip(tree.tails, *(state.split(sizes, dim=2) for state in states), strict=True):
            if tail.path:
                before = [[state[:, :, start:stop] for start, stop in tail.path] for state in states[1:]]
                key, value = torch.cat([*before[0], key], dim=2), torch.cat([*before[1], value], dim=2)
            mask = attention_mask.tail_masks.get(tail)
            outputs.append(plain(module, query, key, value, mask, *args, **kwargs)[0])
    return torch.cat(outputs, dim=1), None


_MAX_JOINT_MASK = 2**27  # entries; with longer trees, kernels are large and few

OURS = "trl_tpu_"
"""Prefix of this package's implementations in transformers' registries and in a config's `_attn_implementation`."""

#: transformers' type of mask: a function of indices, ``(batch, head, query, key) -> bool``.
MaskRule = Callable[..., Any]


def tree_rule(
    subtree_end_RL: torch.Tensor, position_ids_RL: torch.Tensor, rule: MaskRule = causal_mask_function
) -> MaskRule:
    """Turn a model's mask rule over positions in one sequence into a rule over columns of packed rows."""

    def on_path(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        path = (key <= query) & (query < subtree_end_RL[row, key])
        return path & rule(row, head, position_ids_RL[row, query], position_ids_RL[row, key])

    return on_path


class PackedOutputs(NamedTuple):
    """Mask rules that a model asked for, and outputs of its score head, recorded while it reads packed rows."""

    rules: list[MaskRule]
    scores: list[torch.Tensor]


# values of this thread, or None; torch.compile cannot trace Python's `ContextVar`
_BATCH, _PACKED_OUTPUTS = CompileableContextVar("batch"), CompileableContextVar("noted")


def current_packed_batch() -> Batch[torch.Tensor] | None:
    """Return the packed batch that a model is reading in this thread; None for a padded batch."""
    return _BATCH.get()


@contextmanager
def reading(batch: Batch[torch.Tensor] | None) -> Iterator[None]:
    """Set the packed batch that models of this thread read while the context is open; None for a padded batch."""
    outside = _BATCH.set(batch)
    try:
        yield
    finally:
        _BATCH.reset(outside)


def masks_while_read(plain: Callable[..., Any], build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build masks with ``build`` while a model reads packed rows, and with ``plain`` for any other batch."""
    if (batch := _BATCH.get()) is None:
        return plain(*args, **kwargs)
    rule = kwargs.get("mask_function", causal_mask_function)
    _PACKED_OUTPUTS.get().rules.append(rule)
    return build(plain, batch, rule, *args, **kwargs)


def tree_masks(plain: Callable[..., Any], batch: Batch[Any], rule: MaskRule, *args: Any, **kwargs: Any) -> Any:
    """Build the masks of packed rows from a model's rule, in the format of its attention function."""
    subtree_end_RL: Any = batch.subtree_end_RL
    position_ids_RL: Any = batch.position_ids_RL
    in_trees = tree_rule(subtree_end_RL, position_ids_RL, rule)
    tree_wise = kwargs | {"mask_function": in_trees, "attention_mask": None, "allow_is_causal_skip": False}
    if batch.trees is None:
        return plain(*args, **tree_wise)
    if attends_jointly(batch):
        return joint_mask(plain, batch, rule, *args, **kwargs)
    masks, tail_masks = [], dict[Tail, torch.Tensor]()
    for tree in batch.trees:
        length = tree.stop - tree.start
        alone = {"q_length": length, "kv_length": length, "q_offset": 0, "kv_offset": 0, "attention_mask": None}
        mask = plain(*args, **kwargs | alone)
        if mask is not None and len(tree.tails) > 1:
            mask = plain(*args, **tree_wise | alone | {"q_offset": tree.start, "kv_offset": tree.start})
        masks.append((tree, mask))
        for tail in tree.tails[1:] if mask is None else ():
            before, size = sum(stop - start for start, stop in tail.path), tail.stop - tail.start
            # additive: sdpa would convert a boolean mask in each layer
            hidden = subtree_end_RL.new_full((1, 1, size, before + size), -torch.inf, dtype=kwargs["dtype"])
            tail_masks[tail] = hidden.triu(before + 1)
    return TreeMasks(tuple(masks), tail_masks)


def attends_jointly(batch: Batch[Any]) -> bool:
    """Return whether the trees of an unpadded row attend together: on a GPU, many small kernels would be slow."""
    trees = batch.trees or ()
    longest = max((tree.stop - tree.start for tree in trees), default=0)
    return batch.input_ids_RL.is_cuda and len(trees) * longest**2 <= _MAX_JOINT_MASK


def _rule_of_first_row(rule: MaskRule, row: torch.Tensor, *indices: torch.Tensor) -> Any:
    """Apply a model's rule in any row of a joint mask. The model knows of one row."""
    return rule(torch.zeros_like(row), *indices)


def joint_mask(plain: Callable[..., Any], batch: Batch[Any], rule: MaskRule, *args: Any, **kwargs: Any) -> JointMask:
    """Build the mask of an unpadded row's trees as rows of equal length, from a model's rule."""
    end_RL: Any = batch.subtree_end_RL
    position_RL: Any = batch.position_ids_RL
    sizes = [tree.stop - tree.start for tree in batch.trees or ()]
    size_T = torch.tensor(sizes, device=end_RL.device)
    rows, start_T = len(sizes), size_T.cumsum(0) - size_T
    length = round_up(max(sizes), 8)  # kernels copy masks of other lengths
    column_L, column_S = (torch.arange(count, device=end_RL.device) for count in (length, end_RL.shape[1]))
    column_TL = (start_T[:, None] + column_L).clamp(max=len(column_S) - 1)
    # padding attends to itself, since attention to nothing could give NaN
    end_TL = torch.where(column_L < size_T[:, None], end_RL[0, column_TL] - start_T[:, None], column_L + 1)
    in_rows = {"batch_size": rows, "q_length": length, "kv_length": length, "q_offset": 0, "kv_offset": 0}
    in_rows |= {"attention_mask": None, "allow_is_causal_skip": False}
    in_rows |= {"mask_function": tree_rule(end_TL, position_RL[0, column_TL], partial(_rule_of_first_row, rule))}
    row_S = torch.arange(rows, device=end_RL.device).repeat_interleave(size_T, output_size=len(column_S))
    return JointMask(column_TL, column_S + (row_S * length - start_T[row_S]), plain(*args, **kwargs | in_rows))


def register_attention(
    model: PreTrainedModel,
    name: str,
    masks: Callable[..., Any],
    attention: Callable[..., Any],
    build: Callable[..., Any] = tree_masks,
) -> None:
    """Register an attention implementation, and select it in the config of ``model`` only.

    A saved config does not contain the name, so the model loads anywhere with the default of its class. A model that
    attends by its own code is unchanged, and transformers warns.

    Args:
        model: The model.
        name: The implementation's name in transformers' registries, without the prefix `OURS`.
        masks: Builds the masks of padded batches.
        attention: Computes attention with a mask.
        build: Builds the masks of packed rows.
    """
    AttentionMaskInterface.register(f"{OURS}{name}", partial(masks_while_read, masks, build))
    AttentionInterface.register(f"{OURS}{name}", partial(attend_tree_by_tree, attention))
    model.set_attn_implementation(f"{OURS}{name}")


def packed_scores(model: nn.Module, batch: Batch[torch.Tensor], **kwargs: Any) -> torch.Tensor:
    """Compute the score head's outputs for each token of packed rows, [R, L, outputs].

    The whole model is called, so its wrappers (LoRA, data parallelism, autocast) take effect.

    Args:
        model: A decoder with a `score` head over its hidden states, such as transformers' classifiers.
            `use_tree_masks` must have been called.
        batch: Packed rows. Their expansion is used if `use_expanded_attention` was called.
        kwargs: Further arguments of the model.

    Raises:
        UserError: If the model has no `score` head, or did not ask for a mask.
    """
    with run_packed(model, batch, **kwargs) as recorded:
        return recorded.scores[0]


@contextmanager
def run_packed(model: nn.Module, batch: Batch[torch.Tensor], **kwargs: Any) -> Iterator[PackedOutputs]:
    """Call ``model`` with packed rows, and yield its recorded mask rules and scores.

    Use the results within the context: a traced program cannot read the recorded values after it is closed.

    Raises:
        UserError: If the model has no `score` head, or did not ask for a mask.
    """
    recorded, ids_RL = PackedOutputs([], []), batch.input_ids_RL
    # A mask without padding: without any mask, models search position ids for sequence starts, a read from the device.
    mask_and_positions = {"attention_mask": torch.ones_like(ids_RL), "position_ids": batch.position_ids_RL}
    record_scores(model)
    recorded_outside = _PACKED_OUTPUTS.set(recorded)
    try:
        with reading(batch):
            # The model's own outputs pool one score per row; they have no meaning for packed rows.
            model(input_ids=ids_RL, **mask_and_positions, **kwargs)
            if not recorded.rules:
                raise UserError(
                    f"{type(model).__name__} did not ask for the masks of packed rows: it makes its own masks, or "
                    "`use_tree_masks` was not called. Train it on padded rows."
                )
            yield recorded
    finally:
        _PACKED_OUTPUTS.reset(recorded_outside)


def record_scores(model: nn.Module) -> None:
    """Install a hook that records the outputs of the model's score head while it reads packed rows.

    Raises:
        UserError: The model has no `score` head.
    """
    if (head := find_score_head(model)) is None:
        raise UserError(f"{type(model).__name__} has no `score` head to read the rewards of packed rows from.")
    if _record_scores not in head._forward_hooks.values():  # a second hook would change a traced program
        head.register_forward_hook(_record_scores)


def _record_scores(_head: nn.Module, _args: tuple[torch.Tensor, ...], scores: torch.Tensor) -> None:
    if (recorded := _PACKED_OUTPUTS.get()) is not None:
        recorded.scores.append(scores)


def rewards_of(model: nn.Module, batch: Batch[torch.Tensor], **extras: Any) -> tuple[torch.Tensor, Any]:
    """Compute the rewards of a micro-batch, and for padded rows the model's outputs.

    Args:
        model: The whole model, with its wrappers.
        batch: A micro-batch on the model's device.
        extras: Further arguments of the model. They override the batch's own extras.

    Returns:
        Rewards [S, A], float32 or wider, arbitrary for padding; and the model's outputs, None for packed rows.
    """
    assert not batch.earlier  # one micro-batch, not a whole batch
    extras = {**batch.extras, **extras}
    if batch.is_packed:
        return read_scores(packed_scores(model, batch, **extras), batch), None
    outputs = model(input_ids=batch.input_ids_RL, attention_mask=batch.attention_mask_RL, **extras)
    return read_scores(outputs.logits, batch), outputs


def read_scores(scores: torch.Tensor, batch: Batch[torch.Tensor]) -> torch.Tensor:
    """Read rewards [S, A] from a model's scores: one score per token, or per row after the model's own pooling.

    A step's reward is the log-odds that the step is correct.
    """
    row_S, column_S = batch.score_row_S, batch.score_column_S
    scores = scores.unsqueeze(-1) if scores.dim() == 1 else scores
    scores_SA = scores[row_S, column_S] if scores.dim() == 3 else scores[row_S]
    scores_SA = scores_SA.to(torch.promote_types(scores.dtype, torch.float32))
    return scores_SA[:, 1:] - scores_SA[:, :1] if batch.table.kind == "steps" else scores_SA
