"""The rewards of a batch in one forward over all of its sequences, and attention over packed rows."""

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
from .head_spec import find_score_head


class PackingImpossible(UserError):
    """Packed rows cannot be used; the message says why."""


@dataclass(frozen=True, eq=False)
class TreeMasks:
    """The masks of an unpadded row, tree by tree."""

    trees: tuple[tuple[Tree, torch.Tensor | None], ...]
    """Each tree and its mask [1, 1, S, S], or None where the model's own rule is plainly causal."""
    tail_masks: dict[Tail, torch.Tensor]
    """Additive masks [1, 1, T, K] for the later tails of trees without a mask: T own tokens see K, path included."""

    def __getitem__(self, part: Any) -> "TreeMasks":
        """Return the masks themselves: models that cut masks to the keys of a cache, as Gemma 4 does, take all."""
        return self


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
    """Attend in an unpadded row one tree at a time; in any other batch as ``plain`` does.

    Without a mask for the whole tree, its tails are computed one by one, each after the keys of its path.
    """
    if not isinstance(attention_mask, TreeMasks):
        return plain(module, query_BNLD, key_BNLD, value_BNLD, attention_mask, *args, **kwargs)
    outputs: list[torch.Tensor] = []
    # split at once: the backward of slices would write a row of zeros for each
    sizes = [tree.stop - tree.start for tree, _ in attention_mask.trees]
    trees = (states.split(sizes, dim=2) for states in (query_BNLD, key_BNLD, value_BNLD))
    for (tree, mask), *states in zip(attention_mask.trees, *trees, strict=True):
        if mask is not None:
            outputs.append(plain(module, *states, mask, *args, **kwargs)[0])
            continue
        sizes = [tail.stop - tail.start for tail in tree.tails]
        for tail, query, key, value in zip(tree.tails, *(each.split(sizes, dim=2) for each in states), strict=True):
            if tail.path:
                before = [[each[:, :, start:stop] for start, stop in tail.path] for each in states[1:]]
                key, value = torch.cat([*before[0], key], dim=2), torch.cat([*before[1], value], dim=2)
            mask = attention_mask.tail_masks.get(tail)
            outputs.append(plain(module, query, key, value, mask, *args, **kwargs)[0])
    return torch.cat(outputs, dim=1), None


OURS = "trl_tpu_"
"""Prefix of our implementations' names in transformers' registries, and in a config's `_attn_implementation`."""

#: ``(batch, head, query, key) -> bool``, of indices; transformers' type of mask.
MaskRule = Callable[..., Any]


def tree_rule(
    subtree_end_RL: torch.Tensor, position_ids_RL: torch.Tensor, rule: MaskRule = causal_mask_function
) -> MaskRule:
    """Turn a model's mask rule, over the positions of one sequence, into a rule over the columns of packed rows."""

    def on_path(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        path = (key <= query) & (query < subtree_end_RL[row, key])
        return path & rule(row, head, position_ids_RL[row, query], position_ids_RL[row, key])

    return on_path


class PackedOutputs(NamedTuple):
    """What a model does while it reads packed rows: the mask rules that it uses, and what its score head returns."""

    rules: list[MaskRule]
    scores: list[torch.Tensor]


# of this thread, if any; torch.compile cannot trace torch's own kind of variable
_BATCH, _PACKED_OUTPUTS = CompileableContextVar("batch"), CompileableContextVar("noted")


def batch_being_read() -> Batch[torch.Tensor] | None:
    """Return the packed batch that a model reads in this thread; None for any other batch."""
    return _BATCH.get()


@contextmanager
def reading(batch: Batch[torch.Tensor] | None) -> Iterator[None]:
    """Let models of this thread read a packed batch, or none, while the context is open."""
    outside = _BATCH.set(batch)
    try:
        yield
    finally:
        _BATCH.reset(outside)


def masks_while_read(plain: Callable[..., Any], build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build masks with ``build`` while packed rows are read, and with ``plain`` for any other batch."""
    if (batch := _BATCH.get()) is None:
        return plain(*args, **kwargs)
    rule = kwargs.get("mask_function", causal_mask_function)
    _PACKED_OUTPUTS.get().rules.append(rule)
    return build(plain, batch, rule, *args, **kwargs)


def tree_masks(plain: Callable[..., Any], batch: Batch[Any], rule: MaskRule, *args: Any, **kwargs: Any) -> Any:
    """Build the masks of packed rows by a model's own rule, in the form that its attention function takes."""
    subtree_end_RL: Any = batch.subtree_end_RL
    position_ids_RL: Any = batch.position_ids_RL
    in_trees = tree_rule(subtree_end_RL, position_ids_RL, rule)
    tree_wise = kwargs | {"mask_function": in_trees, "attention_mask": None, "allow_is_causal_skip": False}
    if batch.trees is None:
        return plain(*args, **tree_wise)
    masks, tail_masks = [], dict[Tail, torch.Tensor]()
    for tree in batch.trees:
        length = tree.stop - tree.start
        alone = {"q_length": length, "kv_length": length, "q_offset": 0, "kv_offset": 0, "attention_mask": None}
        mask = plain(*args, **kwargs | alone)
        if mask is not None and len(tree.tails) > 1:
            mask = plain(*args, **tree_wise | alone | {"q_offset": tree.start, "kv_offset": tree.start})
        masks.append((tree, mask))
        for tail in tree.tails[1:] if mask is None else ():
            before, own = sum(stop - start for start, stop in tail.path), tail.stop - tail.start
            # additive: sdpa would convert a boolean mask in each layer
            hidden = subtree_end_RL.new_full((1, 1, own, before + own), -torch.inf, dtype=kwargs["dtype"])
            tail_masks[tail] = hidden.triu(before + 1)
    return TreeMasks(tuple(masks), tail_masks)


def attend_by(
    model: PreTrainedModel,
    name: str,
    masks: Callable[..., Any],
    attention: Callable[..., Any],
    build: Callable[..., Any] = tree_masks,
) -> None:
    """Select an attention implementation of ours for ``model``, and for no other: its config names it.

    A saved config has no such name, so the model loads anywhere with the default of its class. A model whose own
    code attends stays as it is, and transformers warns.

    Args:
        model: The model.
        name: The implementation's name in transformers' registries, after `OURS`.
        masks: Builds the masks of ordinary batches.
        attention: Attends by a mask.
        build: Builds the masks of packed rows.
    """
    AttentionMaskInterface.register(f"{OURS}{name}", partial(masks_while_read, masks, build))
    AttentionInterface.register(f"{OURS}{name}", partial(attend_tree_by_tree, attention))
    model.set_attn_implementation(f"{OURS}{name}")


def packed_scores(model: nn.Module, batch: Batch[torch.Tensor], **kwargs: Any) -> torch.Tensor:
    """Compute what the score head says of each token of packed rows, [R, L, outputs].

    The model is called as a whole, so whatever wraps it (LoRA, data parallelism, autocast) takes part.

    Args:
        model: A decoder with a `score` head over its hidden states, as transformers' classifiers, after
            `use_tree_masks`.
        batch: Its expansion is used after `use_expanded_attention`.
        kwargs: Passed on to the model.

    Raises:
        UserError: If the model has no `score` head, or did not ask for a mask.
    """
    with run_packed(model, batch, **kwargs) as noted:
        return noted.scores[0]


@contextmanager
def run_packed(model: nn.Module, batch: Batch[torch.Tensor], **kwargs: Any) -> Iterator[PackedOutputs]:
    """Call ``model`` with packed rows, and yield what it has done.

    The rows are read until the context is closed: a program that is traced cannot ask for a reading that is over.

    Raises:
        UserError: If the model has no `score` head, or did not ask for a mask.
    """
    noted, ids_RL = PackedOutputs([], []), batch.input_ids_RL
    # A mask without padding: models that found none would search the positions for sequences, and stop the device.
    everything = {"attention_mask": torch.ones_like(ids_RL), "position_ids": batch.position_ids_RL}
    record_scores(model)
    noted_outside = _PACKED_OUTPUTS.set(noted)
    try:
        with reading(batch):
            # the scores that the model itself picks, one a row, mean nothing here
            model(input_ids=ids_RL, **everything, **kwargs)
            if not noted.rules:
                raise UserError(
                    f"{type(model).__name__} did not ask for the masks of packed rows: it makes its own, or "
                    "`use_tree_masks` was not called. Train it on padded rows."
                )
            yield noted
    finally:
        _PACKED_OUTPUTS.reset(noted_outside)


def record_scores(model: nn.Module) -> None:
    """Let the score head of ``model`` note what it returns while packed rows are read, for as long as it lives.

    Raises:
        UserError: The model has no `score` head.
    """
    if (head := find_score_head(model)) is None:
        raise UserError(f"{type(model).__name__} has no `score` head whose rewards could be read from packed rows.")
    if _record_scores not in head._forward_hooks.values():  # a traced program must not be changed by a second hook
        head.register_forward_hook(_record_scores)


def _record_scores(_head: nn.Module, _args: tuple[torch.Tensor, ...], scores: torch.Tensor) -> None:
    if (noted := _PACKED_OUTPUTS.get()) is not None:
        noted.scores.append(scores)


def rewards_of(model: nn.Module, batch: Batch[torch.Tensor], **extras: Any) -> tuple[torch.Tensor, Any]:
    """Compute the rewards of a micro-batch, and the model's outputs where rows are padded.

    Args:
        model: Called as a whole, so whatever wraps it takes part.
        batch: On the model's device.
        extras: Passed on to the model, with those of the batch.

    Returns:
        Rewards [S, A], float32 or wider; those of padding mean nothing. The outputs are None for packed rows, whose
        own pooling means nothing.
    """
    assert not batch.earlier  # a micro-batch, not all of a batch
    extras = {**batch.extras, **extras}
    if batch.is_packed:
        return read_scores(packed_scores(model, batch, **extras), batch), None
    outputs = model(input_ids=batch.input_ids_RL, attention_mask=batch.attention_mask_RL, **extras)
    return read_scores(outputs.logits, batch), outputs


def read_scores(scores: torch.Tensor, batch: Batch[torch.Tensor]) -> torch.Tensor:
    """Read rewards [S, A] from a model's scores: of each token, or of each row by its own pooling.

    A step's reward is the log-odds that it is right.
    """
    row_S, column_S = batch.score_row_S, batch.score_column_S
    scores = scores.unsqueeze(-1) if scores.dim() == 1 else scores
    scores_SA = scores[row_S, column_S] if scores.dim() == 3 else scores[row_S]
    scores_SA = scores_SA.to(torch.promote_types(scores.dtype, torch.float32))
    return scores_SA[:, 1:] - scores_SA[:, :1] if batch.table.kind == "steps" else scores_SA
