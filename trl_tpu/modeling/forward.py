"""Rewards of a batch by one forward over all of its sequences."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function
from transformers.utils.output_capturing import CompileableContextVar

from ..errors import UserError
from ..packing.batch import Batch
from .head_spec import find_score_head
from .row_attention import Attention, JointTrees, MaskRule, Masks, TreeByTree, attend_in_rows, tree_rule


class PackingImpossible(UserError):
    """Packed rows cannot be used; the message says why."""


_MAX_JOINT_MASK = 2**27  # entries; with longer trees, kernels are large and few

#: Prefix of this package's implementations in transformers' registries and in a config's `_attn_implementation`.
OURS = "trl_tpu_"


class PackedOutputs(NamedTuple):
    """A packed batch that a model reads, with the mask rules and the scores that the model has produced."""

    batch: Batch[torch.Tensor]
    rules: list[MaskRule]
    scores: list[torch.Tensor]


# The rows that a model is reading in this thread, or None; torch.compile cannot trace Python's `ContextVar`.
_READ = CompileableContextVar("rows")


def current_packed_batch() -> Batch[torch.Tensor] | None:
    """Return the packed batch that a model is reading in this thread; None for a padded batch."""
    return None if (rows := _READ.get()) is None else rows.batch


@contextmanager
def reading(batch: Batch[torch.Tensor] | None) -> Iterator[PackedOutputs | None]:
    """Set the packed batch that models of this thread read while the context is open; None for a padded batch."""
    rows = None if batch is None else PackedOutputs(batch, [], [])
    outside = _READ.set(rows)
    try:
        yield rows
    finally:
        _READ.reset(outside)


def masks_while_read(plain: Masks, build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build masks with ``build`` while a model reads packed rows, and with ``plain`` for any other batch."""
    if (rows := _READ.get()) is None:
        return plain(*args, **kwargs)
    rule = kwargs.get("mask_function", causal_mask_function)
    rows.rules.append(rule)
    return build(plain, rows.batch, rule, *args, **kwargs)


def tree_masks(plain: Masks, batch: Batch[Any], rule: MaskRule, *args: Any, **kwargs: Any) -> Any:
    """Build the masks of packed rows from a model's rule, in the format of its attention function."""
    if batch.trees is None:
        in_trees = tree_rule(batch.subtree_end_RL, batch.position_ids_RL, rule)
        tree_wise = {"mask_function": in_trees, "attention_mask": None, "allow_is_causal_skip": False}
        return plain(*args, **kwargs | tree_wise)
    return (JointTrees if few_kernels(batch) else TreeByTree).of(plain, batch, rule, *args, **kwargs)


def few_kernels(batch: Batch[Any]) -> bool:
    """Return whether the trees of an unpadded row attend together: on a GPU, many small kernels would be slow."""
    trees = batch.trees or ()
    longest = max((tree.stop - tree.start for tree in trees), default=0)
    return batch.input_ids_RL.is_cuda and len(trees) * longest**2 <= _MAX_JOINT_MASK


def register_attention(
    model: PreTrainedModel, name: str, masks: Masks, attention: Attention, build: Callable[..., Any] = tree_masks
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
    AttentionInterface.register(f"{OURS}{name}", partial(attend_in_rows, attention))
    model.set_attn_implementation(f"{OURS}{name}")


@contextmanager
def run_packed(model: nn.Module, batch: Batch[torch.Tensor], **kwargs: Any) -> Iterator[PackedOutputs]:
    """Call ``model`` with packed rows, and yield its recorded mask rules and its scores of each token.

    The whole model is called, so its wrappers (LoRA, data parallelism, autocast) take effect. Use the results within
    the context: a traced program cannot read the recorded values after it is closed.

    Args:
        model: A decoder with a `score` head over its hidden states, such as transformers' classifiers.
            `use_tree_masks` must have been called.
        batch: Packed rows. Their expansion is used if `use_expanded_attention` was called.
        kwargs: Further arguments of the model.

    Raises:
        UserError: If the model has no `score` head, or did not ask for a mask.
    """
    ids_RL = batch.input_ids_RL
    # A mask without padding: without any mask, models search position ids for sequence starts, a read from the device.
    mask_and_positions = {"attention_mask": torch.ones_like(ids_RL), "position_ids": batch.position_ids_RL}
    record_scores(model)
    with reading(batch) as recorded:
        assert recorded is not None
        # The model's own outputs pool one score per row; they have no meaning for packed rows.
        model(input_ids=ids_RL, **mask_and_positions, **kwargs)
        if not recorded.rules:
            raise UserError(
                f"{type(model).__name__} did not ask for the masks of packed rows: it makes its own masks, or "
                "`use_tree_masks` was not called. Train it on padded rows."
            )
        yield recorded


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
    if (rows := _READ.get()) is not None:
        rows.scores.append(scores)


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
        with run_packed(model, batch, **extras) as recorded:
            return read_scores(recorded.scores[0], batch), None
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
    return batch.table.kind.rewards_of(scores_SA)
