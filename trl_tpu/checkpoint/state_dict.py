"""What a checkpoint holds beside transformers' own files: tensors by name in `state/`, numbers in `progress.json`."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.optim import Optimizer

from ..modeling.adapters import adapter_names, is_peft_model
from ..modeling.stacked import by_layer
from ..runtime import Runtime
from ..runtime.storage import tensors_in

STATE_FOLDER = "state"
PROGRESS_FILE = "progress.json"
SCHEDULER_FILE = "scheduler.pt"  # transformers' name


def trained_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's tensors by name, tied ones under their first; of a model with adapters only the adapters'."""
    tensors = model.state_dict(keep_vars=True)
    if is_peft_model(model):
        kept = adapter_names(model, tensors)
        tensors = {name: tensor for name, tensor in tensors.items() if name in kept}
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {f"model.{name}": tensors[name] for name in tensors if first[id(tensors[name])] == name}


def optimizer_tensors(optimizer: Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """The optimizer's tensors, ``optimizer.{parameter}.{kind}``."""
    return {name: value for name, value in _optimizer_state(optimizer, model) if isinstance(value, torch.Tensor)}


def optimizer_numbers(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Which optimizer it is, its settings, and what else of its state is no tensor."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    numbers = {name: value for name, value in _optimizer_state(optimizer, model) if not torch.is_tensor(value)}
    state = by_layer(model, numbers, lambda number, _: number)
    return {"class": type(optimizer).__name__, "groups": groups, "state": state}


def read_weights(model: nn.Module, checkpoint: str | Path, runtime: Runtime) -> None:
    """Load the weights of a checkpoint into the model, which keeps its layout.

    Raises:
        ValueError: It is of another model; names the tensors that differ.
    """
    tensors = trained_tensors(model)
    _check_same_model(tensors, _saved(checkpoint, "model."), checkpoint)
    with torch.no_grad():
        runtime.read({name: tensor.detach() for name, tensor in tensors.items()}, Path(checkpoint, STATE_FOLDER))


def read_optimizer(
    optimizer: Optimizer, model: nn.Module, checkpoint: str | Path, numbers: Mapping[str, Any], runtime: Runtime
) -> None:
    """Load the optimizer's state; where there is none yet, it is made and laid out like its parameters.

    Raises:
        ValueError: It is the state of another optimizer.
    """
    if (name := type(optimizer).__name__) != numbers["class"]:
        raise ValueError(
            f"The checkpoint {checkpoint} is of another optimizer, {numbers['class']}, and this is {name}. Choose the "
            "`optim` that it was trained with, or start from its weights: give its folder as the model."
        )
    saved = _saved(checkpoint, "optimizer.")
    parameters = dict(_trained_parameters(optimizer, model))
    for name, tensor in saved.items():
        parameter_name, _, kind = name.removeprefix("optimizer.").rpartition(".")
        if parameter_name not in parameters:
            raise ValueError(
                f"The checkpoint {checkpoint} has optimizer state of {parameter_name}, which is not trained now. "
                "Train the same parameters, or start from its weights: give its folder as the model."
            )
        _make_state(optimizer, parameters[parameter_name], kind, tensor, runtime)
    tensors = optimizer_tensors(optimizer, model)
    if missing := sorted(tensors.keys() - saved.keys()):
        raise ValueError(
            f"The checkpoint {checkpoint} has no {_some(missing)}. Choose the optimizer's options with which it was "
            "trained, or start from its weights: give its folder as the model."
        )
    with torch.no_grad():
        runtime.read(tensors, Path(checkpoint, STATE_FOLDER))
    for name, value in numbers["state"].items():
        parameter_name, _, kind = name.removeprefix("optimizer.").rpartition(".")
        optimizer.state[parameters[parameter_name]][kind] = value
    for group, group_saved in zip(optimizer.param_groups, numbers["groups"], strict=True):
        # "capturable" is the device's option, not the run's; JSON made lists of tuples such as Adam's betas
        group.update(
            {
                key: tuple(value) if isinstance(value, list) else value
                for key, value in group_saved.items()
                if key != "capturable"
            }
        )


def read_torch_optimizer(optimizer: Optimizer, scheduler: Any, checkpoint: str | Path, runtime: Runtime) -> None:
    """Load what transformers' Trainer wrote into existing state, which keeps its layout; nothing if there is none."""
    path = Path(checkpoint, "optimizer.pt")
    if not path.is_file():
        return
    saved = torch.load(path, map_location="cpu", weights_only=True)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with torch.no_grad():
        for index, values in saved["state"].items():
            own = optimizer.state[parameters[index]]
            for kind, value in values.items():
                if isinstance(own.get(kind), torch.Tensor):
                    own[kind].copy_(value)
                else:
                    own[kind] = value
    for group, group_saved in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in group_saved.items() if key not in ("params", "capturable")})
    read_scheduler(scheduler, checkpoint)
    runtime.step_boundary()


def read_scheduler(scheduler: Any, checkpoint: str | Path) -> None:
    """Load the learning rate schedule's place."""
    scheduler.load_state_dict(torch.load(Path(checkpoint, SCHEDULER_FILE), map_location="cpu", weights_only=True))


def write_progress(folder: str | Path, progress: Mapping[str, Any]) -> None:
    """Write plain numbers; floats come back to the bit."""
    Path(folder, PROGRESS_FILE).write_text(json.dumps(progress), encoding="utf-8")


def read_progress(checkpoint: str | Path) -> dict[str, Any] | None:
    """What `write_progress` wrote; None in a checkpoint of another trainer.

    Raises:
        ValueError: It is no JSON.
    """
    path = Path(checkpoint, PROGRESS_FILE)
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _unreadable(checkpoint, PROGRESS_FILE, error) from error


def _saved(checkpoint: str | Path, beginning: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint whose names begin so, without their values."""
    try:
        saved = tensors_in(Path(checkpoint, STATE_FOLDER))
    except (OSError, SafetensorError, KeyError) as error:
        raise _unreadable(checkpoint, STATE_FOLDER, error) from error
    return {name: tensor for name, tensor in saved.items() if name.startswith(beginning)}


def _unreadable(checkpoint: str | Path, part: str, error: Exception) -> ValueError:
    return ValueError(
        f"In the checkpoint {checkpoint}, {part} cannot be read ({type(error).__name__}: {error}). Give another "
        "checkpoint, or resume_from_checkpoint=True for the newest good one."
    )


def _trained_parameters(optimizer: Optimizer, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[id(parameter)], parameter


def _optimizer_state(optimizer: Optimizer, model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, parameter in _trained_parameters(optimizer, model):
        for kind, value in optimizer.state.get(parameter, {}).items():
            yield f"optimizer.{name}.{kind}", value


def _make_state(
    optimizer: Optimizer, parameter: nn.Parameter, kind: str, like: torch.Tensor, runtime: Runtime
) -> None:
    """Something to read a tensor into, where the optimizer would only make it in its first step."""
    if kind in optimizer.state[parameter]:
        return
    if like.shape == parameter.shape:
        made = (parameter.detach() * 0).to(like.dtype)  # has its layout too
    else:
        made = torch.zeros_like(like, device="cpu")
        if runtime.compiles or any(optimizer.defaults.get(option) for option in ("fused", "capturable")):
            made = runtime.to_device(made, parameter.device)  # elsewhere torch keeps Adam's step on the host
    optimizer.state[parameter][kind] = made


def _check_same_model(
    own: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], checkpoint: str | Path
) -> None:
    differing = sorted(name for name in own.keys() & saved.keys() if own[name].shape != saved[name].shape)
    faults = [
        f"its {name} is of shape {list(saved[name].shape)} instead of {list(own[name].shape)}"
        for name in differing[:3]
    ]
    if missing := sorted(own.keys() - saved.keys()):
        faults.append(f"it has no {_some(missing)}")
    if unknown := sorted(saved.keys() - own.keys()):
        faults.append(f"it also has {_some(unknown)}")
    if faults:
        raise ValueError(
            f"The checkpoint {checkpoint} is of another model: {'; '.join(faults)}. Resume with the model, and the "
            "adapters, that it was trained with."
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
