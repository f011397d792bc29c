"""The trained weights as host tensors, ready for ``save_pretrained``."""

import torch
from torch import nn

from ..modeling.adapters import adapter_names, is_peft_model
from ..runtime import Runtime


def export_model(model: nn.Module, runtime: Runtime) -> dict[str, torch.Tensor]:
    """The state dict on the host; of a model with adapters only what its ``save_pretrained`` keeps.

    Tied weights stay one tensor, so that ``save_pretrained`` writes them once.
    """
    state = model.state_dict(keep_vars=True)
    if is_peft_model(model):
        kept = adapter_names(model, state)
        state = {name: tensor for name, tensor in state.items() if name in kept}
    return runtime.to_host(state)
