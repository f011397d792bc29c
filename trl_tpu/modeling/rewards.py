"""From a batch to the rewards of its pairs: one forward of the model over all dialogues."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..data.collators import join_halves
from .losses import masked_mean


@dataclass(frozen=True)
class PairBatch:
    """The dialogues of P pairs as 2P rows, and how to find a pair's two rows.

    `interleaved` rows are c0 r0 c1 r1 ... (pair rows, [P, 2, L]); otherwise c0 c1 ... r0 r1 ... (TRL's layout).
    """

    input_ids_RL: torch.Tensor
    attention_mask_RL: torch.Tensor
    margin_P: torch.Tensor | None
    mask_P: torch.Tensor | None
    interleaved: bool

    @classmethod
    def read(cls, inputs: Mapping[str, Any], pad_token_id: int, padding_side: str) -> "PairBatch":
        """Read any of the three layouts: pair rows, `DataCollatorForPreference`, `RewardDataCollatorWithPadding`."""
        if "input_ids_chosen" in inputs:
            inputs = join_halves(inputs, pad_token_id, padding_side)
        input_ids, attention_mask = inputs["input_ids"], inputs["attention_mask"]
        interleaved = input_ids.dim() == 3
        if interleaved:
            input_ids, attention_mask = input_ids.flatten(0, 1), attention_mask.flatten(0, 1)
        return cls(input_ids, attention_mask, inputs.get("margin"), inputs.get("pair_mask"), interleaved)

    def rewards(self, model: nn.Module, **extras: Any) -> tuple[torch.Tensor, Any]:
        """The rewards [P, 2] by the model's own pooling, and its outputs."""
        outputs = model(input_ids=self.input_ids_RL, attention_mask=self.attention_mask_RL, **extras)
        return self.by_pair(outputs.logits), outputs

    def by_pair(self, logits_R1: torch.Tensor) -> torch.Tensor:
        """The model's logits as float32 rewards, [P, 2]: chosen, rejected."""
        rewards_R = logits_R1.squeeze(-1).float()
        return rewards_R.view(-1, 2) if self.interleaved else rewards_R.view(2, -1).T

    def mean(self, losses_P: torch.Tensor) -> torch.Tensor:
        """The batch's loss."""
        return masked_mean(losses_P, self.mask_P)

    @property
    def tokens(self) -> torch.Tensor:
        """How many tokens the real pairs have, not counting padding: an int32 scalar."""
        tokens_R = self.attention_mask_RL.sum(-1, dtype=torch.int32)
        if self.mask_P is None:
            return tokens_R.sum(dtype=torch.int32)
        return (tokens_R.view(-1, 2) * self.mask_P[:, None]).sum(dtype=torch.int32)


def find_score_head(model: nn.Module) -> nn.Module | None:
    """The linear layer that turns a hidden state into a reward: `score` in every transformers decoder."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "score" and hasattr(module, "forward"):
            return module
    return None


def keep_score_head_in_float32(model: nn.Module) -> None:
    """Run the score head outside autocast: bfloat16 would round every reward to 8 bits before the loss sees it."""
    head = find_score_head(model)
    if head is None or any(parameter.dtype != torch.float32 for parameter in head.parameters()):
        return
    forward = head.forward

    def forward_float32(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return forward(hidden.float(), *args, **kwargs)

    head.forward = forward_float32  # type: ignore[method-assign]
