"""Rewards of a batch by one forward over all of its sequences, and attention over packed rows.

A `PackedAttention` stands in place of a layer's mask, and attends.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

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


#: Prefix of this package's implementations in transformers' registries and in a config's `_attn_implementation`.
OURS = "trl_tpu_"

# ---- attention

#: transformers' type of mask: a function of indices, ``(batch, head, query, key) -> bool``.
MaskRule: TypeAlias = Callable[..., Any]
#: one of transformers' mask functions: it makes a mask from a rule
Masks: TypeAlias = Callable[..., Any]
#: outputs [B, L, N, D] of attention, and its weights or None
Outputs: TypeAlias = tuple[torch.Tensor, Any]
#: one of transformers' attention functions
Attention: TypeAlias = Callable[..., Outputs]


def tree_rule(subtree_end_RL: Any, position_ids_RL: Any, rule: MaskRule = causal_mask_function) -> MaskRule:
    """Turn a model's mask rule over positions in one sequence into a rule over columns of packed rows."""

    def on_path(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        path = (key <= query) & (query < subtree_end_RL[row, key])
        return path & rule(row, head, position_ids_RL[row, query], position_ids_RL[row, key])

    return on_path


class PackedAttention:
    """Attention over packed rows. A model passes it from its mask function to its layers, as it would pass a mask."""

    def attend(self, plain: Attention, module: nn.Module, *states_BNLD: Any, **kwargs: Any) -> Outputs:
        """Attend as one of transformers' attention functions.

        Args:
            plain: The model's attention function over mask tensors.
            module: The attention layer.
            states_BNLD: Queries, keys and values of B rows, N heads, L columns and D numbers.
            **kwargs: Further arguments of ``plain``.

        Returns:
            Outputs [B, L, N, D] and no attention weights.
        """
        raise NotImplementedError

    def __getitem__(self, part: Any) -> "PackedAttention":
        """Return all of it: models such as Gemma 4 slice masks to the keys of a cache, and training has no cache."""
        return self


def attend_packed(
    plain: Attention, module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any
) -> Outputs:
    """Attend as a `PackedAttention` does, or with a mask tensor as ``plain`` does."""
    if isinstance(attention_mask, PackedAttention):
        return attention_mask.attend(plain, module, query, key, value, **kwargs)
    return plain(module, query, key, value, attention_mask, **kwargs)


@dataclass(frozen=True, eq=False)
class TreeByTree(PackedAttention):
    """Attention in an unpadded row, one tree at a time: the least work, in many small operations.

    In a tree without a mask, attention is computed tail by tail. The keys of a tail's path come before its own keys.

    Attributes:
        trees: Each tree with its mask [1, 1, S, S]; None if the model's rule is plain causal attention.
        tail_masks: Additive masks [1, 1, T, K] of later tails in trees without a mask: T tail tokens, K keys of path
            and tail.
    """

    trees: tuple[tuple[Tree, torch.Tensor | None], ...]
    tail_masks: dict[Tail, torch.Tensor]

    def attend(self, plain: Attention, module: nn.Module, *states_BNLD: Any, **kwargs: Any) -> Outputs:
        outputs: list[torch.Tensor] = []
        # One split of the whole packed row: the backward of separate slices would write as many zeros per slice.
        sizes = [tree.stop - tree.start for tree, _ in self.trees]
        trees = (state.split(sizes, dim=2) for state in states_BNLD)
        for (tree, mask), *states in zip(self.trees, *trees, strict=True):
            if mask is not None:
                outputs.append(plain(module, *states, mask, **kwargs)[0])
                continue
            sizes = [tail.stop - tail.start for tail in tree.tails]
            tails = (state.split(sizes, dim=2) for state in states)
            for tail, query, key, value in zip(tree.tails, *tails, strict=True):
                if tail.path:
                    before = [[state[:, :, start:stop] for start, stop in tail.path] for state in states[1:]]
                    key, value = torch.cat([*before[0], key], dim=2), torch.cat([*before[1], value], dim=2)
                outputs.append(plain(module, query, key, value, self.tail_masks.get(tail), **kwargs)[0])
        return torch.cat(outputs, dim=1), None


# ---- forward


class PackedOutputs(NamedTuple):
    """A packed batch that a model reads, with the mask rules and the scores that the model has produced."""

    batch: Batch[torch.Tensor]
    rules: list[MaskRule]
    scores: list[torch.Tensor]


# What a model is reading in this thread, or None; torch.compile cannot trace Python's `ContextVar`.
_READ = CompileableContextVar("packed")


def current_packed_batch() -> Batch[torch.Tensor] | None:
    """Return the packed batch that a model is reading in this thread; None for a padded batch."""
    return None if (packed := _READ.get()) is None else packed.batch


@contextmanager
def reading(batch: Batch[torch.Tensor] | None) -> Iterator[PackedOutputs | None]:
    """Set the packed batch that models of this thread read while the context is open; None for a padded batch."""
    packed = None if batch is None else PackedOutputs(batch, [], [])
    outside = _READ.set(packed)
    try:
        yield packed
    finally:
        _READ.reset(outside)


def masks_while_read(plain: Masks, build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build masks with ``build`` while a model reads packed rows, and with ``plain`` for any other batch."""
    if (packed := _READ.get()) is None:
        return plain(*args, **kwargs)
    rule = kwargs.get("mask_function", causal_mask_function)
    packed.rules.append(rule)
    return build(plain, packed.batch, rule, *args, **kwargs)


def tree_masks(plain: Masks, batch: Batch[Any], rule: MaskRule, *args: Any, **kwargs: Any) -> Any:
    """Build the masks of packed rows by a model's mask function ``plain`` from its ``rule``."""
    in_trees = tree_rule(batch.subtree_end_RL, batch.position_ids_RL, rule)
    tree_wise = {"mask_function": in_trees, "attention_mask": None, "allow_is_causal_skip": False}
    if batch.trees is None:
        return plain(*args, **kwargs | tree_wise)
    masks, tail_masks = [], dict[Tail, torch.Tensor]()
    for tree in batch.trees:
        length = tree.stop - tree.start
        alone = {"q_length": length, "kv_length": length, "q_offset": 0, "kv_offset": 0, "attention_mask": None}
        mask = plain(*args, **kwargs | alone)
        if mask is not None and len(tree.tails) > 1:
            mask = plain(*args, **kwargs | alone | tree_wise | {"q_offset": tree.start, "kv_offset": tree.start})
        masks.append((tree, mask))
        for tail in tree.tails[1:] if mask is None else ():
            before, size = sum(stop - start for start, stop in tail.path), tail.stop - tail.start
            # additive: sdpa would convert a boolean mask in each layer
            hidden = batch.input_ids_RL.new_full((1, 1, size, before + size), -torch.inf, dtype=kwargs["dtype"])
            tail_masks[tail] = hidden.triu(before + 1)
    return TreeByTree(tuple(masks), tail_masks)


def few_kernels(device: torch.device) -> bool:
    """Return whether attention should take few large kernels: on a GPU, many small ones would be slow."""
    return device.type == "cuda"


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
    AttentionInterface.register(f"{OURS}{name}", partial(attend_packed, attention))
    model.set_attn_implementation(f"{OURS}{name}")


def run_packed(model: nn.Module, batch: Batch[torch.Tensor], **kwargs: Any) -> tuple[torch.Tensor, list[MaskRule]]:
    """Call ``model`` with packed rows, and return its scores of each token and its mask rules.

    The whole model is called, so its wrappers (LoRA, data parallelism, autocast) take effect.

    Args:
        model: A decoder with a `score` head over its hidden states, such as transformers' classifiers.
            `use_tree_masks` must have been called.
        batch: Packed rows. Their expansion is used if `use_expanded_attention` was called.
        kwargs: Further arguments of the model.

    Raises:
        UserError: The model did not ask for a mask.
    """
    ids_RL = batch.input_ids_RL
    # A mask without padding: without any mask, models search position ids for sequence starts, a read from the device.
    mask_and_positions = {"attention_mask": torch.ones_like(ids_RL), "position_ids": batch.position_ids_RL}
    record_scores(model)
    with reading(batch) as recorded:
        assert recorded is not None
        model(input_ids=ids_RL, **mask_and_positions, **kwargs)
        if not recorded.rules:
            raise UserError(
                f"{type(model).__name__} did not ask for the masks of packed rows: it makes its own masks, or "
                "`use_tree_masks` was not called. Train it on padded rows."
            )
        # not the outputs' logits: AdaLoRA's forward leaves out the hook that puts the scores there
        return recorded.scores[0], recorded.rules


def record_scores(model: nn.Module) -> None:
    """Install hooks that record each token's scores, and make them the model's outputs, while it reads packed rows.

    FSDP2 reduces gradients only if the loss uses the outputs of a module that it shards.
    """
    head: Any = find_score_head(model)
    if _record_scores not in head._forward_hooks.values():  # a second hook would change a traced program
        head.register_forward_hook(_record_scores)
        base = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)
        base.register_forward_hook(_output_scores, prepend=True)


def _record_scores(_head: nn.Module, _args: tuple[torch.Tensor, ...], scores: torch.Tensor) -> None:
    if (packed := _READ.get()) is not None:
        packed.scores.append(scores)


def _output_scores(_model: nn.Module, _args: tuple[torch.Tensor, ...], outputs: Any) -> None:
    if (packed := _READ.get()) is not None:
        outputs.logits = packed.scores[0]


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
        return read_scores(run_packed(model, batch, **extras)[0], batch), None
    outputs = model(input_ids=batch.input_ids_RL, attention_mask=batch.attention_mask_RL, **extras)
    return read_scores(outputs.logits, batch), outputs


def read_scores(scores: torch.Tensor, batch: Batch[torch.Tensor]) -> torch.Tensor:
    """Read rewards [S, A] from a model's scores: one score per token, or per token row after the model's own pooling.

    A step's reward is the log-odds that the step is correct.
    """
    row_S, column_S = batch.token_row_S, batch.token_column_S
    scores = scores.unsqueeze(-1) if scores.dim() == 1 else scores
    scores_SA = scores[row_S, column_S] if scores.dim() == 3 else scores[row_S]
    scores_SA = scores_SA.to(torch.promote_types(scores.dtype, torch.float32))
    return batch.table.kind.rewards_of(scores_SA)
