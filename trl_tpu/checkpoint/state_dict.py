"""Tensors on disk: a model's files as transformers writes them, and shards in safetensors files by torch's plans.

torch's own files of a distributed checkpoint would need pickle to be read. Here each file is one of safetensors,
which says the place of its parts: nothing in a checkpoint can run code, and any mesh, or plain torch, reads what any
other wrote.
"""

import json
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from operator import getitem
from pathlib import Path
from queue import Queue
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from ..errors import UserError
from ..modeling.adapters import adapter_names, is_peft_model, names_in_file, without_adapters
from ..modeling.layers import by_layer
from ..parallel.shard import reshard, zeros_laid_out_like
from ..runtime import Runtime

_WEIGHTS = re.compile(r"(model|adapter_model)(?:-\d{5}-of-\d{5})?\.safetensors(?:\.index\.json)?")
_READ = re.compile(r"((adapter_)?model(-\d+-of-\d+)?|host-\d{5}-device-\d{3})\.safetensors")
_FILE_SIZE = "5GB"
"""The largest model file: while one is written, the host holds it twice."""


# ---- a model's files


def write_model(model: Any, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write whole weights on the host as ``model.save_pretrained`` does, beside a config that is there already."""
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        model.save_pretrained(aside, state_dict=dict(weights), max_shard_size=_FILE_SIZE)
        for path in Path(aside).rglob("*"):
            # the config may have changed since the weights were copied, and the README is peft's stub
            if path.is_file() and path.name not in ("config.json", "README.md"):
                (target := folder / path.relative_to(aside)).parent.mkdir(exist_ok=True)
                path.rename(target)


def older_weights(there: list[str], new: list[str]) -> list[str]:
    """Return which files of ``there`` are weights of the kinds of ``new``, and not among them: of an older model."""
    kinds = {match[1] for name in new if (match := _WEIGHTS.fullmatch(name))}
    found = [match for name in there if (match := _WEIGHTS.fullmatch(name)) and name not in new]
    return [match[0] for match in found if match[1] in kinds]


# ---- shards


def write_state(shards: Mapping[str, Any], folder: Path, runtime: Runtime) -> None:
    """Write what `Runtime.local_shards` gave to ``folder``; all processes take part, from any thread.

    Raises:
        OSError: On all ranks if one could not write.
    """
    planners, writer = runtime.checkpoint_planners(), _ShardWriter(str(folder), save_distributed=True)
    group = planners.group
    with _checkpointing():
        dcp.save(
            dict(shards), storage_writer=writer, planner=planners.save, process_group=group, no_dist=group is None
        )


def read_state(tensors: Mapping[str, torch.Tensor], folder: Path, runtime: Runtime) -> None:
    """Read named tensors from the safetensors files of ``folder`` in place; all processes take part.

    Raises:
        OSError: A tensor is missing, has another shape or cannot be read; on all ranks if on one.
    """
    planners, files = runtime.checkpoint_planners(), reader_of(folder)
    group = planners.group
    runtime.step_boundary()
    with _checkpointing():
        dcp.load(
            dict(tensors), storage_reader=files, planner=planners.load, process_group=group, no_dist=group is None
        )
    runtime.step_boundary()
    runtime.all_gather_object(None)


class _OwnFiles(FileSystem):
    """Lists the files of a model and of shards: a user may have put others beside them, with tensors of any name."""

    def ls(self, path: Any) -> list[str]:
        return [each for each in super().ls(path) if _READ.fullmatch(Path(each).name)]


def reader_of(folder: Path) -> HuggingFaceStorageReader:
    """Return what reads the tensors in safetensors files of ``folder``, whole or in shards."""
    reader = HuggingFaceStorageReader(str(folder))
    reader.fs = _OwnFiles()
    return reader


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors in the safetensors files of ``folder``, whole or in shards, on the meta device."""
    found = reader_of(folder).read_metadata().state_dict_metadata
    return {
        name: torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")
        for name, saved in found.items()
        if isinstance(saved, TensorStorageMetadata)
    }


def join_shards(shards: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of `Runtime.local_shards`, where one process has all shards; tied tensors stay tied."""
    unique = {id(each): each if isinstance(each, torch.Tensor) else each.join() for each in shards.values()}
    return {name: unique[id(each)] for name, each in shards.items()}


def to_host(state: Mapping[str, torch.Tensor], runtime: Runtime, *, keeps: bool = True) -> dict[str, torch.Tensor]:
    """Return a state dict as host tensors, put together from shards; tied tensors stay tied. Nothing if not ``keeps``.

    All processes take part. Several gather one tensor at a time, so that only those that keep all hold all.
    """
    if runtime.topology().process_count == 1:
        return join_shards(runtime.local_shards(state)) if keeps else {}
    host: dict[int, torch.Tensor] = {}
    for tensor in {id(tensor): tensor for tensor in state.values()}.values():
        whole = runtime.constrain(tensor, (None,) * tensor.dim())  # none of several processes has all shards
        copy = join_shards(runtime.local_shards({"": whole}))[""]
        if keeps:
            host[id(tensor)] = copy
    return {name: host[id(tensor)] for name, tensor in state.items()} if keeps else {}


@contextmanager
def _checkpointing() -> Iterator[None]:
    """Run torch's distributed checkpoint without its warnings, and raise its failures as ordinary errors.

    Its CheckpointException derives from BaseException and passes every ``except Exception``. The ignored warnings say
    that one process saves alone, which is intended, and that torch uses its deprecated storage.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        try:
            yield
        except CheckpointException as error:
            rank, (failure, _) = next(iter(error.failures.items()))
            raise OSError(f"process {rank}: {type(failure).__name__}: {failure}") from error


class _ShardWriter(HuggingFaceStorageWriter):
    """Writes a file for each host and device: torch's has one a host, in which shards of a tensor would collide."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        of_device: dict[int, list[WriteItem]] = {}
        for item in plan.items:
            of_device.setdefault(item.index.index or 0, []).append(item)
        files: Queue = Queue()
        for device, items in of_device.items():
            name = f"host-{plan.storage_data['shard_index'] - 1:05d}-device-{device:03d}.safetensors"
            files.put((self.fs.concat_path(self.path, name), name, items))
        return self._write_data(planner, files)


STATE_FOLDER = "state"
PROGRESS_FILE = "progress.json"
Tensors = Mapping[str, torch.Tensor]
_WEIGHT = "model."
_OPTIMIZER = "optimizer."
_OF_ARGUMENTS = ("params", "initial_lr", "weight_decay", "betas", "eps", "capturable", "foreach", "fused")
"""Settings of an optimizer's groups that are those of now, and not those of the checkpoint."""


def trained_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's tensors by name, tied ones under each of theirs; of a model with adapters the adapters'."""
    reshard(model)
    weights = model.state_dict(keep_vars=True)
    if is_peft_model(model):
        kept = adapter_names(model, weights)
        weights = {name: tensor for name, tensor in weights.items() if name in kept}
    return weights


def whole_weights(model: nn.Module, runtime: Runtime, *, keeps: bool) -> dict[str, torch.Tensor]:
    """Return `trained_weights` whole on the host, as `to_host` does, of stacked layers under each one's names."""
    return by_layer(model, to_host(trained_weights(model), runtime, keeps=keeps), getitem)


def give_weights_on_host(model: nn.Module, runtime: Runtime) -> None:
    """Let ``model.state_dict()`` copy the weights to the host, whole, and so ``save_pretrained`` and all that saves.

    A device's tensors have no memory that safetensors could read. With ``keep_vars=True`` it returns them as they are.
    """

    def to_the_host(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        if any(isinstance(value, nn.Parameter) for value in state.values()):  # keep_vars
            return
        weights = module.state_dict(keep_vars=True)
        for name in weights:
            del state[prefix + name]
        host = by_layer(module, to_host(weights, runtime), getitem)
        state.update({prefix + name: tensor for name, tensor in host.items()})

    without_adapters(model).register_state_dict_post_hook(to_the_host)


def are_in_model_files(model: nn.Module) -> bool:
    """Return whether ``save_pretrained`` writes every weight under its own name, so that they can be read back there.

    It does not for adapters, whose names it shortens, nor where transformers merges or splits weights as it loads
    them (the experts of a mixture).
    """
    leaves_out = is_peft_model(model) or getattr(model, "_keys_to_ignore_on_save", None)
    if leaves_out or not isinstance(model, PreTrainedModel):
        return False
    tensors = model.state_dict(keep_vars=True)
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    return revert_weight_conversion(model, dict(shapes)).keys() == shapes.keys()


def state_tensors(model: nn.Module, optimizer: Optimizer, *, with_weights: bool) -> dict[str, torch.Tensor]:
    """Return what goes into `state/`: ``optimizer.{parameter}.{kind}`` and, where asked for, ``model.{name}``."""
    tensors = {name: value for name, value in _optimizer_state(optimizer, model) if isinstance(value, torch.Tensor)}
    weights = _once(trained_weights(model)) if with_weights else {}
    return tensors | {f"{_WEIGHT}{name}": tensor for name, tensor in weights.items()}


def optimizer_numbers(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return which optimizer it is, its settings, and what else of its state is no tensor, for JSON."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    numbers = {name: value for name, value in _optimizer_state(optimizer, model) if not torch.is_tensor(value)}
    state = by_layer(model, numbers, lambda number, _: number)
    return {"class": type(optimizer).__name__, "groups": groups, "state": state}


# ---- reading


def has_weights(checkpoint: str | Path) -> bool:
    """Return whether `read_weights` is the way to read a checkpoint: one of ours."""
    return Path(checkpoint, PROGRESS_FILE).is_file() or Path(checkpoint, STATE_FOLDER).is_dir()


def read_weights(model: nn.Module, checkpoint: str | Path, runtime: Runtime) -> None:
    """Load the weights of a checkpoint into the model, which keeps its layout.

    Raises:
        UserError: It is of another model; names the tensors that differ.
    """
    folder, prefix = Path(checkpoint, STATE_FOLDER), _WEIGHT
    saved = _saved(folder, prefix)
    if not saved:
        folder, prefix = Path(checkpoint), ""
        saved = _saved(folder, prefix)
    weights: Any = trained_weights(model)
    if not prefix and is_peft_model(model):
        adapter: Any = model.active_adapter
        weights = {name: weights[own] for name, own in names_in_file(model, weights, adapter).items()}
    own = _once(weights, prefer={name.removeprefix(prefix) for name in saved})
    tensors = {f"{prefix}{name}": tensor.detach() for name, tensor in own.items()}
    _check_same_model(tensors, saved, checkpoint)
    with torch.no_grad():
        read_state(tensors, folder, runtime)


def read_optimizer(
    optimizer: Optimizer, model: nn.Module, checkpoint: str | Path, numbers: Mapping[str, Any], runtime: Runtime
) -> None:
    """Load the optimizer's state; where there is none yet, it is made and laid out like its parameters.

    Args:
        numbers: What `optimizer_numbers` returned.

    Raises:
        UserError: It is the state of another optimizer.
    """
    if (name := type(optimizer).__name__) != numbers["class"]:
        raise UserError(
            f"The checkpoint {checkpoint} is of another optimizer, {numbers['class']}, and this is {name}. Choose the "
            "`optim` that it was trained with, or start from its weights: give its folder as the model."
        )
    folder = Path(checkpoint, STATE_FOLDER)
    saved = _saved(folder, _OPTIMIZER)
    parameters = dict(_trained_parameters(optimizer, model))
    for name, tensor in saved.items():
        parameter, kind = _parameter_and_kind(name)
        if parameter not in parameters:
            raise UserError(
                f"The checkpoint {checkpoint} has optimizer state of {parameter}, which is not trained now. "
                "Train the same parameters, or start from its weights: give its folder as the model."
            )
        _make_state(optimizer, parameters[parameter], kind, tensor, runtime)
    tensors = state_tensors(model, optimizer, with_weights=False)
    if tensors:
        with torch.no_grad():
            read_state(tensors, folder, runtime)
    for name, value in numbers["state"].items():
        parameter, kind = _parameter_and_kind(name)
        optimizer.state[parameters[parameter]][kind] = value
    for group, saved_group in zip(optimizer.param_groups, numbers["groups"], strict=True):
        _update_group(group, saved_group)


def read_torch_optimizer(optimizer: Optimizer, scheduler: Any, checkpoint: str | Path, runtime: Runtime) -> None:
    """Load what transformers' Trainer wrote into existing state, which keeps its layout."""
    saved = torch.load(Path(checkpoint, OPTIMIZER_NAME), map_location="cpu", weights_only=True)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with torch.no_grad():
        for index, values in saved["state"].items():
            own = optimizer.state[parameters[index]]
            for kind, value in values.items():
                own[kind] = own[kind].copy_(value) if isinstance(own.get(kind), torch.Tensor) else value
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        _update_group(group, saved_group)
    read_scheduler(scheduler, checkpoint)
    runtime.step_boundary()


def read_scheduler(scheduler: Any, checkpoint: str | Path) -> None:
    """Load the learning rate schedule's place; the rate that it starts from stays that of now."""
    place = torch.load(Path(checkpoint, SCHEDULER_NAME), map_location="cpu", weights_only=True)
    if type(scheduler) is not LambdaLR:  # of any other the rate of now may depend on those before
        scheduler.load_state_dict(place)
        return
    factors = [factor_at(place["last_epoch"]) for factor_at in scheduler.lr_lambdas]
    rates = [rate * factor for rate, factor in zip(scheduler.base_lrs, factors, strict=True)]
    scheduler.load_state_dict(place | {"base_lrs": scheduler.base_lrs, "_last_lr": rates})
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def write_progress(folder: str | Path, progress: Mapping[str, Any]) -> None:
    """Write plain numbers; floats come back to the bit."""
    Path(folder, PROGRESS_FILE).write_text(json.dumps(progress), encoding="utf-8")


def read_progress(checkpoint: str | Path) -> dict[str, Any] | None:
    """Return what `write_progress` wrote; None for a checkpoint of another trainer."""
    path = Path(checkpoint, PROGRESS_FILE)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


# ---- names


def _once(tensors: Tensors, prefer: Set[str] = frozenset()) -> dict[str, torch.Tensor]:
    """Return each tensor once: under its first name, or where tied under one that is in ``prefer``."""
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in names or (name in prefer and names[id(tensor)] not in prefer):
            names[id(tensor)] = name
    return {name: tensors[name] for name in names.values()}


def _saved(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors in safetensors files of ``folder`` whose names begin so, without their values."""
    found = tensors_in(folder) if folder.is_dir() else {}
    return {name: tensor for name, tensor in found.items() if name.startswith(prefix)}


def _parameter_and_kind(name: str) -> tuple[str, str]:
    parameter, _, kind = name.removeprefix(_OPTIMIZER).rpartition(".")
    return parameter, kind


def _trained_parameters(optimizer: Optimizer, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    reshard(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[id(parameter)], parameter


def _optimizer_state(optimizer: Optimizer, model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, parameter in _trained_parameters(optimizer, model):
        for kind, value in optimizer.state.get(parameter, {}).items():
            yield f"{_OPTIMIZER}{name}.{kind}", value


def _update_group(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Take a group's settings from a checkpoint, but for those that the run's arguments give."""
    for name, value in saved.items():
        if name not in _OF_ARGUMENTS:
            group[name] = tuple(value) if isinstance(value, list) else value  # JSON makes lists of tuples


def _make_state(
    optimizer: Optimizer, parameter: nn.Parameter, kind: str, like: torch.Tensor, runtime: Runtime
) -> None:
    """Make something to read a tensor into, where the optimizer would only make it in its first step."""
    if kind in optimizer.state[parameter]:
        return
    if like.shape == parameter.shape:
        optimizer.state[parameter][kind] = zeros_laid_out_like(parameter).to(like.dtype)
        return
    made = torch.zeros_like(like, device="cpu")
    counts_there = any(optimizer.defaults.get(option) for option in ("fused", "capturable"))
    if runtime.records_steps or like.dim() > 0 or counts_there:  # else torch keeps Adam's step on the host
        made = runtime.to_device(made, parameter.device)
    optimizer.state[parameter][kind] = made


def _check_same_model(own: Tensors, saved: Tensors, checkpoint: str | Path) -> None:
    here, there = ({name: list(tensor.shape) for name, tensor in each.items()} for each in (own, saved))
    differing = sorted(name for name in here | there if here.get(name) != there.get(name))
    if differing:
        told = [f"{name} is {there.get(name, 'not')} there and {here.get(name, 'not')} here" for name in differing[:3]]
        raise UserError(
            f"The checkpoint {checkpoint} is of another model: {len(differing)} weights differ ({'; '.join(told)}). "
            "Give the model, and the adapters, that it was trained with."
        )
