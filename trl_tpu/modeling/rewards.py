"""Computes the rewards of a batch in one forward over all of its sequences."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..data.batch import Batch
from .packed_attention import packed_scores


def rewards_of(model: nn.Module, batch: Batch, **extras: Any) -> tuple[torch.Tensor, Any]:
    """Compute the rewards of a micro-batch, and the model's outputs where rows are padded.

    Args:
        model: Called as a whole, so whatever wraps it takes part.
        batch: On the model's device.
        extras: Passed on to the model, with those of the batch.

    Returns:
        Rewards [S, A], float32 or wider; those of padding mean nothing. The outputs are None for packed rows, whose
        own pooling means nothing.
    """
    rows, extras = batch.rows, {**batch.extras, **extras}
    if rows.is_packed:
        return read_scores(packed_scores(model, rows, **extras), batch), None
    outputs = model(input_ids=rows.input_ids_RL, attention_mask=rows.attention_mask_RL, **extras)
    return read_scores(outputs.logits, batch), outputs


def read_scores(scores: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Read rewards [S, A] from a model's scores: of each token, or of each row by its own pooling.

    A step's reward is the log-odds that it is right.
    """
    row_S, column_S = batch.rows.score_row_S.long(), batch.rows.score_column_S.long()
    scores = scores.unsqueeze(-1) if scores.dim() == 1 else scores
    scores_SA = scores[row_S, column_S] if scores.dim() == 3 else scores[row_S]
    scores_SA = scores_SA.to(torch.promote_types(scores.dtype, torch.float32))
    return scores_SA[:, 1:] - scores_SA[:, :1] if batch.table.has_baseline else scores_SA


def rewards_in(outputs: Any, batch: Batch | None) -> torch.Tensor | None:
    """Read rewards [S, A] from what a user's loss returns beside itself; None where there are none to be read.

    They are `rewards`, [P, K] or [P, A, K], or the model's `logits`; or two tensors of a reward per pair, chosen
    first, whatever their names.

    Args:
        batch: Of the loss; None for one of the user's own making.
    """
    if isinstance(outputs, Mapping) and getattr(outputs.get("rewards"), "ndim", 0) in (2, 3):
        rewards = outputs["rewards"]
        return (rewards.unsqueeze(1) if rewards.ndim == 2 else rewards).transpose(1, 2).flatten(0, 1)
    if isinstance(outputs, Mapping) and "logits" in outputs:
        return None if batch is None or batch.rows.is_packed else read_scores(outputs["logits"], batch)
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    halves = [each.flatten() for each in values if isinstance(each, torch.Tensor)]
    if len(halves) != 2 or len(halves[0]) != len(halves[1]):
        return None
    return torch.stack(halves, dim=-1).reshape(-1, 1)
