"""Tensors on disk: a model's files as transformers writes them, and shards in safetensors files by torch's plans.

Reading the files of torch's own distributed checkpoint format needs pickle. Here each file is a safetensors file that
records the place of its shards: nothing in a checkpoint can run code, and any mesh, or plain torch, reads what any
other wrote.
"""

import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
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

PROGRESS_FILE = "progress.json"
STATE_FOLDER = "state"
WEIGHT_PREFIX = "model."
OPTIMIZER_PREFIX = "optimizer."
_OF_ARGUMENTS = ("params", "initial_lr", "weight_decay", "betas", "eps", "capturable", "foreach", "fused")
"""Settings of an optimizer's groups that the new run's arguments give, not the checkpoint."""

Tensors = Mapping[str, torch.Tensor]


# ---- a model's files


def write_model(model: Any, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write full weights on the host as ``model.save_pretrained`` does, to a folder that has a config already."""
    with tempfile.TemporaryDirectory(dir=folder) as staging:
        model.save_pretrained(staging, state_dict=dict(weights), max_shard_size=_FILE_SIZE)
        for path in Path(staging).rglob("*"):
            # the config may have changed since the weights were copied, and the README is peft's stub
            if path.is_file() and path.name not in ("config.json", "README.md"):
                (target := folder / path.relative_to(staging)).parent.mkdir(exist_ok=True)
                path.rename(target)


def older_weights(existing: list[str], new: list[str]) -> list[str]:
    """Return the files of ``existing`` that hold an older model's weights, of the same kinds as those in ``new``."""
    kinds = {match[1] for name in new if (match := _WEIGHTS.fullmatch(name))}
    matches = [match for name in existing if (match := _WEIGHTS.fullmatch(name)) and name not in new]
    return [match[0] for match in matches if match[1] in kinds]


# ---- shards


def write_state(shards: Mapping[str, Any], folder: Path, runtime: Runtime) -> None:
    """Write the shards of `Runtime.local_shards` to ``folder``; all processes take part, from any thread.

    Raises:
        OSError: On all ranks if one could not write.
    """
    writer = _ShardWriter(str(folder), save_distributed=True)
    with _checkpointing():
        dcp.save(dict(shards), storage_writer=writer, **runtime.checkpoint_arguments(saves=True))


def read_state(tensors: Mapping[str, torch.Tensor], folder: Path, runtime: Runtime) -> None:
    """Read named tensors from the safetensors files of ``folder`` in place; all processes take part.

    Raises:
        OSError: A tensor is missing, has another shape or cannot be read; on all ranks if on one.
    """
    reader = reader_of(folder)
    runtime.step_boundary()
    with _checkpointing(), torch.no_grad():
        dcp.load(dict(tensors), storage_reader=reader, **runtime.checkpoint_arguments(saves=False))
    runtime.step_boundary()
    runtime.all_gather_object(None)


class _OwnFiles(FileSystem):
    """Lists a model's files and shards only: a user may have added others, with tensors of any name."""

    def ls(self, path: Any) -> list[str]:
        return [file for file in super().ls(path) if _READ.fullmatch(Path(file).name)]


def reader_of(folder: Path) -> HuggingFaceStorageReader:
    """Return a reader of the tensors in safetensors files of ``folder``, full or in shards."""
    reader = HuggingFaceStorageReader(str(folder))
    reader.fs = _OwnFiles()
    return reader


def tensors_in(folder: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors in safetensors files of ``folder`` whose names begin with ``prefix``, on the meta device."""
    saved = reader_of(folder).read_metadata().state_dict_metadata if folder.is_dir() else {}
    return {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype, device="meta")
        for name, tensor in saved.items()
        if isinstance(tensor, TensorStorageMetadata) and name.startswith(prefix)
    }


def join_shards(shards: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Join the shards of `Runtime.local_shards` if this process has all of them; tied tensors stay tied."""
    unique = {id(held): held if isinstance(held, torch.Tensor) else held.join() for held in shards.values()}
    return {name: unique[id(held)] for name, held in shards.items()}


def to_host(state: Mapping[str, torch.Tensor], runtime: Runtime, *, keeps: bool = True) -> dict[str, torch.Tensor]:
    """Return a state dict as full host tensors; tied tensors stay tied. Nothing if not ``keeps``.

    All processes take part. Several gather one tensor at a time, so that only those that keep all hold all.
    """
    if runtime.topology().process_count == 1:
        return join_shards(runtime.local_shards(state)) if keeps else {}
    host: dict[int, torch.Tensor] = {}
    for tensor in {id(tensor): tensor for tensor in state.values()}.values():
        full = runtime.constrain(tensor, (None,) * tensor.dim())  # none of several processes has all shards
        copy = join_shards(runtime.local_shards({"": full}))[""]
        if keeps:
            host[id(tensor)] = copy
    return {name: host[id(tensor)] for name, tensor in state.items()} if keeps else {}


@contextmanager
def _checkpointing() -> Iterator[None]:
    """Run torch's distributed checkpoint without its warnings, and raise its failures as ordinary errors.

    Its CheckpointException derives from BaseException and passes every ``except Exception``. The ignored warnings are
    about a process that saves alone, as intended, and about torch's use of its own deprecated storage.
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
    """Writes a file per host and device: torch writes one per host, in which shards of a tensor would collide."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        of_device: dict[int, list[WriteItem]] = {}
        for item in plan.items:
            of_device.setdefault(item.index.index or 0, []).append(item)
        files: Queue = Queue()
        for device, items in of_device.items():
            name = f"host-{plan.storage_data['shard_index'] - 1:05d}-device-{device:03d}.safetensors"
            files.put((self.fs.concat_path(self.path, name), name, items))
        return self._write_data(planner, files)


# ---- weights and optimizer state by name


def trained_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of the model, or of its adapters, by name; tied tensors under each of their names."""
    reshard(model)
    weights = model.state_dict(keep_vars=True)
    if is_peft_model(model):
        kept = adapter_names(model, weights)
        weights = {name: tensor for name, tensor in weights.items() if name in kept}
    return weights


def whole_weights(model: nn.Module, runtime: Runtime, *, keeps: bool) -> dict[str, torch.Tensor]:
    """Return `trained_weights` as `to_host` does; weights of stacked layers are named after each layer."""
    return by_layer(model, to_host(trained_weights(model), runtime, keeps=keeps))


def gather_weights_on_save(model: nn.Module, runtime: Runtime) -> None:
    """Let ``model.state_dict()``, and so ``save_pretrained``, copy the full weights to the host.

    A device's tensors have no memory that safetensors could read. With ``keep_vars=True`` it returns them as they are.
    """

    def copy_to_host(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        if any(isinstance(value, nn.Parameter) for value in state.values()):  # keep_vars
            return
        weights = module.state_dict(keep_vars=True)
        for name in weights:
            del state[prefix + name]
        host = by_layer(module, to_host(weights, runtime))
        state.update({prefix + name: tensor for name, tensor in host.items()})

    without_adapters(model).register_state_dict_post_hook(copy_to_host)


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


def once(tensors: Mapping[str, Any], prefer: Set[str] = frozenset()) -> dict[str, Any]:
    """Return each tensor once: under its first name, or if tied under one that is in ``prefer``."""
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in names or (name in prefer and names[id(tensor)] not in prefer):
            names[id(tensor)] = name
    return {name: tensors[name] for name in names.values()}


def optimizer_tensors(optimizer: Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of the optimizer's state, named ``optimizer.{parameter}.{kind}``."""
    return {name: value for name, value in _optimizer_state(optimizer, model) if isinstance(value, torch.Tensor)}


def optimizer_numbers(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return the optimizer's class, its settings, and the part of its state that is no tensor, for JSON."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    numbers = {name: value for name, value in _optimizer_state(optimizer, model) if not torch.is_tensor(value)}
    state = by_layer(model, numbers)
    return {"class": type(optimizer).__name__, "groups": groups, "state": state}


def _optimizer_state(optimizer: Optimizer, model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, parameter in _trained_parameters(optimizer, model):
        for kind, value in optimizer.state.get(parameter, {}).items():
            yield f"{OPTIMIZER_PREFIX}{name}.{kind}", value


def _trained_parameters(optimizer: Optimizer, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    reshard(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[id(parameter)], parameter


# ---- reading


def read_weights(model: nn.Module, checkpoint: str | Path, runtime: Runtime) -> None:
    """Load the weights of a checkpoint into the model, which keeps its layout.

    Raises:
        UserError: It is of another model; names the tensors that differ.
    """
    folder, prefix = Path(checkpoint, STATE_FOLDER), WEIGHT_PREFIX
    if not (saved := tensors_in(folder, prefix)):
        folder, prefix = Path(checkpoint), ""
        saved = tensors_in(folder)
    weights: Any = trained_weights(model)
    if not prefix and is_peft_model(model):
        adapter: Any = model.active_adapter
        weights = {name: weights[key] for name, key in names_in_file(model, weights, adapter).items()}
    weights = once(weights, prefer={name.removeprefix(prefix) for name in saved})
    tensors: Tensors = {f"{prefix}{name}": tensor.detach() for name, tensor in weights.items()}
    here, there = ({name: list(tensor.shape) for name, tensor in some.items()} for some in (tensors, saved))
    # torch would not read tensors that only the checkpoint has
    if differing := sorted(name for name in here | there if here.get(name) != there.get(name)):
        some = [f"{name} is {there.get(name, 'not')} there and {here.get(name, 'not')} here" for name in differing[:3]]
        raise UserError(
            f"The checkpoint {checkpoint} is of another model: {len(differing)} weights differ ({'; '.join(some)}). "
            "Give the model, and the adapters, that it was trained with."
        )
    read_state(tensors, folder, runtime)


def read_optimizer(
    optimizer: Optimizer, model: nn.Module, checkpoint: str | Path, numbers: Mapping[str, Any], runtime: Runtime
) -> None:
    """Load the optimizer's state. State that does not exist yet is made, laid out like its parameters.

    Args:
        numbers: The result of `optimizer_numbers`.

    Raises:
        UserError: It is the state of another optimizer.
    """
    if (name := type(optimizer).__name__) != numbers["class"]:
        raise UserError(
            f"The checkpoint {checkpoint} is of another optimizer, {numbers['class']}, and this is {name}. Choose the "
            "`optim` that it was trained with, or start from its weights: give its folder as the model."
        )
    folder, parameters = Path(checkpoint, STATE_FOLDER), dict(_trained_parameters(optimizer, model))
    for name, tensor in tensors_in(folder, OPTIMIZER_PREFIX).items():
        key, kind = _parameter_and_kind(name)
        if key not in parameters:
            raise UserError(
                f"The checkpoint {checkpoint} has optimizer state of {key}, which is not trained now. "
                "Train the same parameters, or start from its weights: give its folder as the model."
            )
        state, parameter = optimizer.state[parameters[key]], parameters[key]
        if kind not in state and tensor.shape == parameter.shape:
            # torch's optimizers compute in the weights' type, and `optim_state_dtype` stored the checkpoint's moments
            is_torchs = type(optimizer).__module__.startswith("torch.optim.")
            state[kind] = zeros_laid_out_like(parameter).to(parameter.dtype if is_torchs else tensor.dtype)
        elif kind not in state:
            state[kind] = torch.zeros_like(tensor, device="cpu")
            groups = optimizer.param_groups
            on_device = any(group.get(option) for group in groups for option in ("fused", "capturable"))
            if tensor.dim() > 0 or on_device:  # else torch keeps Adam's step on the host
                state[kind] = runtime.to_device(state[kind], parameter.device)
    if tensors := optimizer_tensors(optimizer, model):
        read_state(tensors, folder, runtime)
    for name, value in numbers["state"].items():
        key, kind = _parameter_and_kind(name)
        optimizer.state[parameters[key]][kind] = value
    _update_groups(optimizer, numbers["groups"])


def read_torch_optimizer(optimizer: Optimizer, scheduler: Any, checkpoint: str | Path, runtime: Runtime) -> None:
    """Load the files of transformers' Trainer into existing state, which keeps its layout.

    Raises:
        UserError: Its groups of parameters are not this optimizer's.
    """
    saved = torch.load(Path(checkpoint, OPTIMIZER_NAME), map_location="cpu", weights_only=True)
    sizes = [[len(group["params"]) for group in each] for each in (saved["param_groups"], optimizer.param_groups)]
    if sizes[0] != sizes[1]:  # state is by the parameters' numbers, which would be others' here
        raise UserError(
            f"The optimizer in {checkpoint} has groups of {sizes[0]} parameters, and this run's has {sizes[1]}: the "
            "same parameters have to be trained, on a mesh without a tensor axis. Or start from its weights: give "
            "its folder as the model."
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    with torch.no_grad():
        for index, values in saved["state"].items():
            state = optimizer.state[parameters[index]]
            for kind, value in values.items():
                state[kind] = state[kind].copy_(value) if isinstance(state.get(kind), torch.Tensor) else value
    _update_groups(optimizer, saved["param_groups"])
    read_scheduler(scheduler, checkpoint)
    runtime.step_boundary()


def read_scheduler(scheduler: Any, checkpoint: str | Path) -> None:
    """Load the step of the learning rate's schedule; the rate that it starts from is the new run's."""
    saved = torch.load(Path(checkpoint, SCHEDULER_NAME), map_location="cpu", weights_only=True)
    if type(scheduler) is not LambdaLR:  # the rate of any other may depend on those before
        scheduler.load_state_dict(saved)
        return
    factors = [factor_at(saved["last_epoch"]) for factor_at in scheduler.lr_lambdas]
    rates = [rate * factor for rate, factor in zip(scheduler.base_lrs, factors, strict=True)]
    scheduler.load_state_dict(saved | {"base_lrs": scheduler.base_lrs, "_last_lr": rates})
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _parameter_and_kind(name: str) -> tuple[str, str]:
    parameter, _, kind = name.removeprefix(OPTIMIZER_PREFIX).rpartition(".")
    return parameter, kind


def _update_groups(optimizer: Optimizer, saved_groups: list[dict[str, Any]]) -> None:
    """Take the groups' settings from a checkpoint, except for those that the run's arguments give.

    Raises:
        UserError: There are more or fewer groups than there were, and what they had was not the same.
    """
    groups = [{name: saved[name] for name in saved.keys() - set(_OF_ARGUMENTS)} for saved in saved_groups]
    if len(groups) != len(optimizer.param_groups):  # transformers splits them by the parameters' meshes
        if any(group != groups[0] for group in groups):
            raise UserError(
                f"The checkpoint's optimizer has {len(groups)} groups of parameters with settings of their own, and "
                f"this one has {len(optimizer.param_groups)}. Make the groups that it was trained with, or start from "
                "its weights: give its folder as the model."
            )
        groups = groups[:1] * len(optimizer.param_groups)
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        # JSON has no tuples
        group |= {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
