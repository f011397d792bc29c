"""A batch of pairs in packed rows, as the trainer reads it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .expanded_rows import ExpandedRows
from .masked import RowLayout, packed_rewards, packed_states


@dataclass(frozen=True)
class PackedPairs:
    """P pairs in the packed rows of one pass (see `trl_tpu.packing.pack.PackedPass`), on the device."""

    layout: Mapping[str, Any]
    tokens_P: torch.Tensor
    margin_P: torch.Tensor | None
    mask_P: torch.Tensor
    batch_pairs_1: torch.Tensor

    @classmethod
    def read(cls, inputs: Mapping[str, Any]) -> "PackedPairs":
        """Read a pass of `trl_tpu.data.collators.PackedRows` or a batch of `TightRow`.

        Attention in expanded rows needs the arrays of an `Expansion` too, as `expand`, `segment`, `home` and `back`.
        """
        layout: dict[str, Any] = {f"{name}_RL": inputs[name] for name in ("input_ids", "position_ids", "subtree_end")}
        layout |= {f"{name}_P2": inputs[name] for name in ("last_row", "last_column")}
        layout |= {name: inputs.get(name) for name in ("trees", "scored")}
        if "expand" in inputs:
            layout["expanded"] = ExpandedRows(*(inputs[name] for name in ("expand", "segment", "home", "back")))
        return cls(layout, inputs["tokens"], inputs.get("margin"), inputs["pair_mask"], inputs["batch_pairs"])

    def rewards(self, model: nn.Module, **extras: Any) -> tuple[torch.Tensor, Any]:
        """The rewards [P, 2], and in the place of a model's outputs the two halves of them."""
        rewards_P2 = packed_rewards(model, **self.layout, **extras)
        return rewards_P2, {"rewards_chosen": rewards_P2[:, 0], "rewards_rejected": rewards_P2[:, 1]}

    def mean(self, losses_P: torch.Tensor) -> torch.Tensor:
        """This pass's part of the batch's mean loss: the passes' parts add up to it."""
        return (torch.where(self.mask_P, losses_P, 0.0).sum() / self.batch_pairs_1).squeeze()

    def scored_states(self, model: nn.Module) -> tuple[torch.Tensor, list[str]]:
        """The hidden states [P, 2, H] that the rewards are computed from, and the mask rules that were asked for."""
        rows = self.layout
        layout_R2L = torch.stack([rows["subtree_end_RL"], rows["position_ids_RL"]], dim=1)
        masks = RowLayout(layout_R2L, rows["trees"], rows["scored"], rows.get("expanded"))
        _, hidden_RLH = packed_states(model, rows["input_ids_RL"], rows["position_ids_RL"], masks)
        return hidden_RLH[rows["last_row_P2"], rows["last_column_P2"]], masks.asked

    @property
    def tokens(self) -> torch.Tensor:
        """How many tokens the dialogues of the pass's pairs have, as if nothing were shared: an int32 scalar."""
        return self.tokens_P.sum(dtype=torch.int32)
