"""The trained weights by the names under which ``save_pretrained`` writes them, and streamed to its files."""

import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from ..modeling.adapters import adapter_names, is_peft_model
from ..modeling.stacked import by_layer
from ..runtime import Runtime
from .weight_files import WeightFiles


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


def stream_model(
    model: PreTrainedModel, runtime: Runtime, folder: str | Path, *, writes: bool, max_shard_size: int | str = "50GB"
) -> None:
    """Write the weights from the devices to safetensors files in ``folder``; the host holds one tensor at a time.

    All processes take part, since each has only parts, and those that have ``writes`` write.

    Raises:
        OSError: The files could not be written; on all processes.
    """
    state = model.state_dict(keep_vars=True)
    tensors = {name: shape_of(tensor) for name, tensor in state.items()}
    failed: OSError | None = None
    try:
        with ModelWriter(model, tensors, folder, max_shard_size) if writes else nullcontext() as writer:
            for name in list(state):
                host = runtime.to_host({name: state.pop(name)})[name]
                if writer is not None:
                    writer.put(name, host)
    except OSError as error:
        failed = error
    for name in list(state):  # the others are still gathering
        runtime.to_host({name: state.pop(name)})
    problem = next((said for said in runtime.all_gather_object(failed and str(failed)) if said), None)
    if problem is not None:
        raise failed or OSError(f"The model could not be written on another host: {problem}")


def shape_of(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor on the meta device; floating-point ones take the ``dtype`` that is given."""
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=wanted, device="meta")


class ModelWriter:
    """Takes a model's tensors one by one, in any order, and writes them as ``save_pretrained`` would; a context.

    Tied weights are written once, and what transformers renamed, merged or split in reading (the experts of a
    mixture) is turned back.

    Args:
        model: The model, for its names; its tensors may be on the meta device.
        tensors: The tensors that will come, on the meta device.
        folder: Where the files go.
        max_shard_size: Of one file.
        dtype: Of the floating-point tensors in the files; that of `tensors` when None.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tensors: Mapping[str, torch.Tensor],
        folder: str | Path,
        max_shard_size: int | str,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.dtype = model, dtype
        own = model.state_dict(keep_vars=True)
        ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
        kept = remove_tied_weights_from_state_dict({name: shape_of(tensor) for name, tensor in own.items()}, model)
        kept_name = {id(own[name]): name for name in kept if name not in ignored}
        #: of each name that may come, the one of the tied weights that is written
        self._written_as = {name: kept_name.get(id(tensor)) for name, tensor in own.items()}
        coming = {self._written_as[name]: tensor for name, tensor in tensors.items() if name in own}
        expected = {name: coming[name] for name in kept_name.values() if name in coming}
        if missing := sorted(set(kept_name.values()) - coming.keys()):
            raise ValueError(f"These weights of {type(model).__name__} are missing: {', '.join(missing[:5])}.")
        files = revert_weight_conversion(model, dict(expected))
        self._together = _converted_together(model, expected, files)
        self._waiting: dict[str, dict[str, torch.Tensor]] = {}
        shapes = {name: shape_of(tensor, dtype) for name, tensor in files.items()}
        self._files = WeightFiles(folder, shapes, max_shard_size)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write the tensor that the model has under ``name``."""
        written = self._written_as[name]
        if written is None:
            return
        group = self._together[written]
        parts = self._waiting.setdefault(group[0], {})
        parts[written] = tensor
        if len(parts) < len(group):
            return
        del self._waiting[group[0]]
        for file_name, value in revert_weight_conversion(self.model, parts).items():
            self._files.write(file_name, value.to(self._files.tensors[file_name].dtype))

    def __enter__(self) -> Self:
        self._files.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.__exit__(kind, error, trace)


def _converted_together(
    model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], files: Mapping[str, torch.Tensor]
) -> dict[str, tuple[str, ...]]:
    """Of each tensor those that its files' tensors are made of: mostly itself, else all of its layer that are so."""
    of_layer: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        if not _converts_alone(model, name, tensor, files):
            layer = re.match(r".*?\.\d+\.", name)
            of_layer.setdefault(layer.group() if layer else "", []).append(name)
    together = {name: tuple(names) for names in of_layer.values() for name in names}
    return {name: together.get(name, (name,)) for name in tensors}


def _converts_alone(model: PreTrainedModel, name: str, tensor: torch.Tensor, files: Mapping[str, Any]) -> bool:
    try:
        made = revert_weight_conversion(model, {name: tensor})
    except (KeyError, IndexError, RuntimeError, ValueError):  # it waits for others
        return False
    return all(key in files and files[key].shape == value.shape for key, value in made.items())
