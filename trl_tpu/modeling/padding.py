"""Tells whether rewards depend on how far rows are padded, which a device that compiles wants to choose."""

import torch
from torch import nn

from ..data.collators import DataCollatorForPreference

# relative, between float32 sums over rows of two lengths
_ROUNDING = 2e-5


@torch.no_grad()
def reads_padding(model: nn.Module, pad_token_id: int) -> bool:
    """Return whether a tiny batch gets other rewards when it is padded further.

    So it is where a forward averages over all columns, or reads the last one: as transformers does for the embeddings
    that prompt tuning gives it. True also where it is unknown: weights on the meta
    device or coarser than float32, a forward that fails.
    """
    parameter = next(model.parameters())
    if parameter.is_meta or parameter.dtype not in (torch.float32, torch.float64):
        return True
    ids = [token for token in range(1, 21) if token != pad_token_id]
    examples = [
        {"answers": [ids[:9], ids[5:9]]},
        {"answers": [ids[3:10], ids[8:14]]},
    ]
    was_training = model.training
    model.eval()
    try:
        rewards = []
        for multiple in (1, 16):
            batch = DataCollatorForPreference(pad_token_id, multiple)(examples)
            rows = {name: tensor.to(parameter.device) for name, tensor in batch.items()}
            rewards.append(model(**rows).logits.squeeze(-1))
    except Exception:  # whatever a user's code does with inputs that it does not expect
        return True
    finally:
        model.train(was_training)
    short, long = rewards
    return not (short - long).abs().max() <= _ROUNDING * short.abs().max()
