"""Read and write tensors as safetensors: model files as transformers writes them, and shards planned by torch.

Reading torch's own distributed checkpoint format needs pickle. Here each file is a safetensors file that records the
offsets of its shards. A checkpoint therefore cannot run code, and a checkpoint that was written on one mesh loads on
any other mesh and in plain torch.
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
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from ..errors import UserError
from ..modeling.adapters import adapter_names, names_in_file
from ..modeling.head_spec import is_peft_model, without_adapters
from ..modeling.layers import by_layer
from ..parallel.shard import reshard, zeros_sharded_like
from ..runtime import Runtime

_MODEL_FILE = re.compile(r"(model|adapter_model)(?:-\d{5}-of-\d{5})?\.safetensors(?:\.index\.json)?")
_TENSOR_FILE = re.compile(r"((adapter_)?model(-\d+-of-\d+)?|host-\d{5}-device-\d{3})\.safetensors")
#: Maximum size of a model file. While a file is written, the host holds its tensors twice.
_FILE_SIZE = "5GB"

PROGRESS_FILE = "progress.json"
STATE_FOLDER = "state"
WEIGHT_PREFIX = "model."
OPTIMIZER_PREFIX = "optimizer."
#: Settings of optimizer groups that come from the new run's arguments instead of the checkpoint.
_GROUP_SETTINGS_OF_RUN = ("params", "initial_lr", "weight_decay", "betas", "eps", "capturable", "foreach", "fused")


# ---- model files


def write_model(model: Any, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write full host weights to ``folder`` as ``model.save_pretrained`` does, but keep the folder's config."""
    with tempfile.TemporaryDirectory(dir=folder) as staging:  # peft would read the user's model card in `folder`
        model.save_pretrained(staging, state_dict=dict(weights), max_shard_size=_FILE_SIZE)
        for path in Path(staging).rglob("*"):
            # skip the config (it may have changed since the weights were copied) and peft's README stub
            if path.is_file() and path.name not in ("config.json", "README.md"):
                (target := folder / path.relative_to(staging)).parent.mkdir(exist_ok=True)
                path.rename(target)


def older_weights(existing: list[str], new: list[str]) -> list[str]:
    """Return the weight files in ``existing`` that an older model left behind.

    Model files count only if ``new`` has model files, and adapter files only if it has adapter files.
    """
    kinds = {match[1] for name in new if (match := _MODEL_FILE.fullmatch(name))}
    matches = [match for name in existing if (match := _MODEL_FILE.fullmatch(name)) and name not in new]
    return [match[0] for match in matches if match[1] in kinds]


# ---- shards


def write_state(shards: Mapping[str, Any], folder: Path, runtime: Runtime) -> None:
    """Write shards from `Runtime.local_shards` to ``folder``. All ranks must call it; any thread may.

    Raises:
        OSError: A rank could not write; raised on all ranks.
    """
    writer = _ShardWriter(str(folder), save_distributed=True)
    with _checkpointing():
        dcp.save(dict(shards), storage_writer=writer, **runtime.checkpoint_arguments(saves=True))


def read_state(tensors: Mapping[str, torch.Tensor], folder: Path, runtime: Runtime) -> None:
    """Read tensors by name from the safetensors files in ``folder``, in place. All ranks must call it.

    Raises:
        OSError: On one rank, a tensor is missing, has another shape or cannot be read; raised on all ranks.
    """
    runtime.step_boundary(wait=True)  # torch_xla cannot read a shard while it is computed
    with _checkpointing(), torch.no_grad():
        dcp.load(dict(tensors), storage_reader=tensor_reader(folder), **runtime.checkpoint_arguments(saves=False))
    runtime.step_boundary()
    runtime.all_gather_object(None)


class _TensorFiles(FileSystem):
    """Lists only model files and shards: users may add other safetensors files, with tensors of any name."""

    def ls(self, path: Any) -> list[str]:
        return [file for file in super().ls(path) if _TENSOR_FILE.fullmatch(Path(file).name)]


def tensor_reader(folder: Path) -> dcp.HuggingFaceStorageReader:
    """Return a reader for the full or sharded tensors in the safetensors files of ``folder``."""
    reader = dcp.HuggingFaceStorageReader(str(folder))
    reader.fs = _TensorFiles()
    return reader


def tensors_in(folder: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors stored in ``folder`` with names that begin with ``prefix``, as meta tensors by name.

    Raises:
        UserError: Shards of a tensor are missing. torch would leave its values there unchanged.
    """
    saved = tensor_reader(folder).read_metadata().state_dict_metadata if folder.is_dir() else {}
    tensors = {}
    for name, tensor in saved.items():
        if isinstance(tensor, dcp.TensorStorageMetadata) and name.startswith(prefix):
            tensors[name] = torch.empty(tensor.size, dtype=tensor.properties.dtype, device="meta")
            if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
                raise UserError(f"{folder} lacks shards of {name}. A file is missing: copy it again.")
    return tensors


def join_shards(shards: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Join shards from `Runtime.local_shards` into full tensors; this process must hold all of them.

    Tied tensors stay tied.
    """
    unique = {id(shard): shard if isinstance(shard, torch.Tensor) else shard.join() for shard in shards.values()}
    return {name: unique[id(shard)] for name, shard in shards.items()}


def to_host(state: Mapping[str, torch.Tensor], runtime: Runtime, *, keeps: bool = True) -> dict[str, torch.Tensor]:
    """Gather a state dict as full tensors on the host; tied tensors stay tied. All ranks must call it.

    Several processes gather one tensor at a time: a process without ``keeps`` never holds more than one full tensor.

    Args:
        keeps: Whether this process gets the tensors. If not, the result is empty.
    """
    if runtime.topology().process_count == 1:
        return join_shards(runtime.local_shards(state)) if keeps else {}
    host: dict[int, torch.Tensor] = {}
    for tensor in {id(tensor): tensor for tensor in state.values()}.values():
        full = runtime.constrain(tensor, (None,) * tensor.dim())  # no single process has all shards
        copy = join_shards(runtime.local_shards({"": full}))[""]
        if keeps:
            host[id(tensor)] = copy
    return {name: host[id(tensor)] for name, tensor in state.items()} if keeps else {}


@contextmanager
def _checkpointing() -> Iterator[None]:
    """Ignore warnings of torch.distributed.checkpoint, and raise its CheckpointException as an OSError.

    CheckpointException derives from BaseException, so ``except Exception`` does not catch it. The ignored warnings
    report that a process saves alone, as intended, that torch uses its own deprecated storage, and that torch_xla
    indexes shards by lists.
    """
    with warnings.catch_warnings():
        ignored = "torch.distributed is disabled|TypedStorage is deprecated|Using a non-tuple sequence"
        warnings.filterwarnings("ignore", message=ignored)
        try:
            yield
        except dcp.CheckpointException as error:
            rank, (failure, _) = next(iter(error.failures.items()))
            raise OSError(f"process {rank}: {type(failure).__name__}: {failure}") from error


class _ShardWriter(dcp.HuggingFaceStorageWriter):
    """Writes one file per host and device. In torch's one file per host, shards of a tensor would collide."""

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        items_by_device: dict[int, list[dcp.WriteItem]] = {}
        for item in plan.items:
            items_by_device.setdefault(item.index.index or 0, []).append(item)
        files: Queue = Queue()
        for device, items in items_by_device.items():
            name = f"host-{plan.storage_data['shard_index'] - 1:05d}-device-{device:03d}.safetensors"
            files.put((self.fs.concat_path(self.path, name), name, items))
        return self._write_data(planner, files)


# ---- weights and optimizer state by name


def trained_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's tensors by name; if it has adapters, only the adapters' tensors.

    A tied tensor appears under each of its names.
    """
    reshard(model)
    weights = model.state_dict(keep_vars=True)
    if is_peft_model(model):
        names = adapter_names(model, weights)
        weights = {name: tensor for name, tensor in weights.items() if name in names}
    return weights


def gather_full_weights(model: nn.Module, runtime: Runtime, *, keeps: bool) -> dict[str, torch.Tensor]:
    """Gather `trained_weights` on the host, see `to_host`. Stacked weights are split into one weight per layer."""
    return by_layer(model, to_host(trained_weights(model), runtime, keeps=keeps))


def gather_weights_on_save(model: nn.Module, runtime: Runtime) -> None:
    """Make ``model.state_dict()``, and thus ``save_pretrained``, gather the full weights on the host.

    safetensors cannot read the memory of device tensors. ``state_dict(keep_vars=True)`` still returns device tensors.
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
    """Return whether ``save_pretrained`` writes every weight under its name in the model.

    Then model files alone can restore the weights. They cannot for adapters (``save_pretrained`` shortens their names)
    or for models with weights that transformers merges or splits while loading (mixtures of experts).
    """
    changes_names = is_peft_model(model) or getattr(model, "_keys_to_ignore_on_save", None)
    if changes_names or not isinstance(model, PreTrainedModel):
        return False
    tensors = model.state_dict(keep_vars=True)
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    return revert_weight_conversion(model, dict(shapes)).keys() == shapes.keys()


def unique_tensors(tensors: Mapping[str, Any], prefer: Set[str] = frozenset()) -> dict[str, Any]:
    """Return each tensor under one name: its first name, or the first in ``prefer`` if it has such a name."""
    names: dict[int, str] = {}
    for name in sorted(tensors, key=lambda name: name not in prefer):  # a stable sort
        names.setdefault(id(tensors[name]), name)
    return {name: tensors[name] for name in names.values()}


def optimizer_tensors(optimizer: Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of the optimizer's state, named ``optimizer.{parameter}.{kind}``."""
    return {name: value for name, value in _optimizer_state(optimizer, model) if isinstance(value, torch.Tensor)}


def optimizer_numbers(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return the optimizer's class name, group settings and non-tensor state, for JSON."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    numbers = {name: value for name, value in _optimizer_state(optimizer, model) if not torch.is_tensor(value)}
    return {"class": type(optimizer).__name__, "groups": groups, "state": by_layer(model, numbers)}


def _optimizer_state(optimizer: Optimizer, model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, parameter in _trained_parameters(optimizer, model).items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            yield f"{OPTIMIZER_PREFIX}{name}.{kind}", value


def _trained_parameters(optimizer: Optimizer, model: nn.Module) -> dict[str, nn.Parameter]:
    reshard(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: parameter for group in optimizer.param_groups for parameter in group["params"]}


# ---- reading


def read_weights(model: nn.Module, checkpoint: str | Path, runtime: Runtime) -> None:
    """Load the weights of a checkpoint into the model; the sharding of the model stays.

    Raises:
        UserError: The checkpoint belongs to another model. The message names tensors that differ.
    """
    folder, prefix = Path(checkpoint, STATE_FOLDER), WEIGHT_PREFIX
    if not (saved := tensors_in(folder, prefix)):
        folder, prefix = Path(checkpoint), ""
        saved = tensors_in(folder)
    weights: Any = trained_weights(model)
    if not prefix and is_peft_model(model):
        adapter: Any = model.active_adapter
        weights = {name: weights[key] for name, key in names_in_file(model, weights, adapter).items()}
    weights = unique_tensors(weights, prefer={name.removeprefix(prefix) for name in saved})
    tensors: dict[str, torch.Tensor] = {f"{prefix}{name}": tensor.detach() for name, tensor in weights.items()}
    here, there = ({name: list(tensor.shape) for name, tensor in state.items()} for state in (tensors, saved))
    # torch silently ignores tensors that only the checkpoint has
    if names := sorted(name for name in here | there if here.get(name) != there.get(name)):
        raise UserError(
            f"The checkpoint {checkpoint} belongs to another model: {len(names)} weights have other names or shapes "
            f"({', '.join(names[:3])}). Pass the model, and the adapters, that it was trained with."
        )
    read_state(tensors, folder, runtime)


def read_optimizer(
    optimizer: Optimizer, model: nn.Module, checkpoint: str | Path, numbers: Mapping[str, Any], runtime: Runtime
) -> None:
    """Load the optimizer's state. Missing state tensors are created, sharded like their parameters.

    Args:
        numbers: The result of `optimizer_numbers` that the checkpoint stored.

    Raises:
        UserError: The state belongs to another optimizer.
        KeyError: It belongs to a parameter that is not trained now.
    """
    if (name := type(optimizer).__name__) != numbers["class"]:
        raise UserError(
            f"The checkpoint {checkpoint} has the state of another optimizer, {numbers['class']}, and this run uses "
            f"{name}. Set `optim` as in the checkpoint's run, or start from its weights: pass its folder as the model."
        )
    folder, parameters = Path(checkpoint, STATE_FOLDER), _trained_parameters(optimizer, model)
    for name, tensor in tensors_in(folder, OPTIMIZER_PREFIX).items():
        key, _, kind = name.removeprefix(OPTIMIZER_PREFIX).rpartition(".")
        state, parameter = optimizer.state[parameters[key]], parameters[key]
        if kind not in state and tensor.shape == parameter.shape:
            # torch's optimizers compute in the dtype of the weights, but the checkpoint has `optim_state_dtype`
            is_torchs = type(optimizer).__module__.startswith("torch.optim.")
            state[kind] = zeros_sharded_like(parameter).to(state_dtype(parameter) if is_torchs else tensor.dtype)
        elif kind not in state:
            state[kind] = torch.zeros_like(tensor, device="cpu")
            options = [group.get(option) for group in optimizer.param_groups for option in ("fused", "capturable")]
            if tensor.dim() > 0 or any(options):  # otherwise torch keeps Adam's step on the host
                state[kind] = runtime.to_device(state[kind], parameter.device)
    if tensors := optimizer_tensors(optimizer, model):
        read_state(tensors, folder, runtime)
    for name, value in numbers["state"].items():
        key, _, kind = name.removeprefix(OPTIMIZER_PREFIX).rpartition(".")
        optimizer.state[parameters[key]][kind] = value
    _update_groups(optimizer, numbers["groups"])


def state_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of torch's optimizer state: that of the parameter, but float32 for float16."""
    return torch.float32 if parameter.dtype == torch.float16 else parameter.dtype


def read_torch_optimizer(optimizer: Optimizer, scheduler: Any, checkpoint: str | Path, runtime: Runtime) -> None:
    """Load the optimizer and scheduler files of transformers' Trainer; existing state keeps its sharding.

    Raises:
        UserError: The sizes of the parameter groups differ from this optimizer's groups.
    """
    saved = torch.load(Path(checkpoint, OPTIMIZER_NAME), map_location="cpu", weights_only=True)
    sizes = [[len(group["params"]) for group in groups] for groups in (saved["param_groups"], optimizer.param_groups)]
    if sizes[0] != sizes[1]:  # state is stored by parameter index, and would load into the wrong parameters
        raise UserError(
            f"The optimizer in {checkpoint} has groups of {sizes[0]} parameters, and this run's has {sizes[1]}. Train "
            "the same parameters without a tensor axis, or pass the folder as the model."
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
    """Load the step of the learning rate schedule; the base learning rate stays as set by the new run."""
    saved = torch.load(Path(checkpoint, SCHEDULER_NAME), map_location="cpu", weights_only=True)
    if type(scheduler) is not LambdaLR:  # other schedulers may compute a rate from the rates before it
        scheduler.load_state_dict(saved)
        return
    factors = [factor_at(saved["last_epoch"]) for factor_at in scheduler.lr_lambdas]
    rates = [rate * factor for rate, factor in zip(scheduler.base_lrs, factors, strict=True)]
    scheduler.load_state_dict(saved | {"base_lrs": scheduler.base_lrs, "_last_lr": rates})
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _update_groups(optimizer: Optimizer, saved_groups: list[dict[str, Any]]) -> None:
    """Restore the groups' settings from a checkpoint, except those that the run's arguments set.

    Raises:
        ValueError: The number of groups differs, and the checkpoint's groups do not all have the same settings.
    """
    groups = [{name: saved[name] for name in saved.keys() - set(_GROUP_SETTINGS_OF_RUN)} for saved in saved_groups]
    if all(group == groups[0] for group in groups):  # transformers splits groups by the mesh of their parameters
        groups = groups[:1] * len(optimizer.param_groups)
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        # JSON stores tuples as lists
        group |= {name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()}
