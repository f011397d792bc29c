"""The trained weights by the names under which ``save_pretrained`` writes them."""

import torch
from torch import nn

from ..modeling.adapters import adapter_names, is_peft_model
from ..modeling.stacked import by_layer
from ..runtime import Runtime


def export_model(model: nn.Module, runtime: Runtime) -> dict[str, torch.Tensor]:
    """The tensors that ``save_pretrained`` writes, on the host. All processes take part."""
    return by_layer(model, runtime.to_host(exported_tensors(model)), torch.Tensor.__getitem__)


def exported_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict; of a model with adapters only what its ``save_pretrained`` keeps.

    Tied weights stay one tensor, so that ``save_pretrained`` writes them once.
    """
    state = model.state_dict(keep_vars=True)
    if is_peft_model(model):
        kept = adapter_names(model, state)
        state = {name: tensor for name, tensor in state.items() if name in kept}
    return state
