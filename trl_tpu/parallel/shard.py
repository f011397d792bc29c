"""Shard a model's parameters: by annotations on XLA, or by transformers over several processes."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import align_module_device, broadcast_object_list
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import UserError, explaining
from ..runtime import Runtime, Value
from .mesh import BATCH_AXES, MeshShape, Placement, Plan, Rules, as_axes, bare_name, names_of


@dataclass(frozen=True)
class ShardReport:
    """Placements and sizes of a model's parameters. Sizes exclude gradients and optimizer state.

    Attributes:
        sizes: Bytes of each full parameter by name. A tied parameter counts once.
    """

    mesh: MeshShape
    placements: dict[str, Placement]
    sizes: dict[str, int]

    @property
    def bytes_per_device(self) -> int:
        return sum(size // self.placements[name].parts(self.mesh) for name, size in self.sizes.items())

    def __str__(self) -> str:
        """Return the total sizes and, on several devices, the axes of the parameters as lines of a sharding plan.

        The same parameter of all layers is one line.
        """
        part, total = (f"{size / 2**20:.2f} MiB" for size in (self.bytes_per_device, sum(self.sizes.values())))
        lines = [f"mesh {self.mesh} on {self.mesh.devices} device(s): {part} of parameters per device, {total} in all"]
        if self.mesh.devices > 1:
            placed = (f"  {parameter_pattern(name)}: {placement}" for name, placement in self.placements.items())
            lines += dict.fromkeys(placed)
        return "\n".join(lines)


def parameter_pattern(name: str) -> str:
    """Return a parameter's name with layer numbers replaced by ``*``: ``model.layers.*.mlp.up_proj.weight``."""
    return re.sub(r"(?<![^.])\d+(?=\.|$)", "*", name)


#: Mesh axes by their names in transformers.
_AXES = {"dp_replicate": "data", "fsdp": "fsdp", "tp": "tensor"}
_HEADS = ("num_attention_heads", "num_key_value_heads")  # in configs
_SHARDED_HERE = "_trl_tpu_sharded"  # attribute of models that `shard_model` has sharded


def distributed_config(mesh: MeshShape) -> DistributedConfig:
    """Return transformers' sharding config for ``mesh``."""
    return DistributedConfig(dp_replicate_size=mesh.data, fsdp_size=mesh.fsdp, tp_size=mesh.tensor)


def mesh_of(model: Any) -> MeshShape | None:
    """Return the mesh over which transformers has sharded ``model``; None if it is not sharded."""
    if getattr(model, "_device_mesh", None) is None:
        return None
    config = model.config.distributed_config
    return MeshShape(config.dp_replicate_size, config.fsdp_size, config.tp_size)


def shard_model(model: Any, mesh: MeshShape, runtime: Runtime, device: torch.device) -> ShardReport:
    """Shard ``model`` over processes, in place. A model that is already sharded keeps its sharding.

    The values come from process 0, as with DDP. Adapters are sharded like their base layers.

    Raises:
        UserError: The `tensor` axis would split an attention head, transformers has loaded wrong rows into the shards,
            or its plan for `tensor` changes the rewards.
    """
    base, whole, expected, length = _base_of(model), dict[str, torch.Tensor](), None, next(_lengths)
    if mesh_of(base) is None:
        whole = _tensors_of(model)  # process 0's are the values of all
        if mesh.tensor > 1:
            for tensor in whole.values():
                tensor.data.copy_(_from_first(tensor, device))
            expected = _rewards_of(model, length)
        else:  # no process has weights now: TorchTPU cannot move them within FSDP2
            _replace_tensors(model, lambda _, tensor: torch.empty_like(tensor, device="meta"))
        distribute(model, mesh)
        if mesh.tensor == 1:
            _replace_tensors(model, lambda _, tensor: torch.empty_like(tensor, device=device))
            for name, tensor in _tensors_of(model).items():
                fill(tensor, _from_first(whole[name], device))
        setattr(base, _SHARDED_HERE, True)
    elif min(mesh.fsdp, mesh.tensor) > 1 and issubclass(_StridedShard, Shard) and not hasattr(base, _SHARDED_HERE):
        raise UserError(
            f"The model was loaded with distributed_config=DistributedConfig(fsdp_size={mesh.fsdp}, "
            f"tp_size={mesh.tensor}). On torch {torch.__version__} transformers reads the wrong rows with it, because "
            f"it confuses the two splits of a dimension. Give the trainer the model's name and mesh='{mesh}', or "
            "install a newer torch."
        )
    reshard(model)  # a trial of packed rows may have left gathered weights
    # tensors that are in no plan
    _replace_tensors(model, lambda _, tensor: tensor if isinstance(tensor, DTensor) else tensor.to(device))
    if whole:
        _check_values(model, whole)
    if expected is not None:
        _check_rewards(model, mesh, length, expected)
    runtime.set_mesh(mesh.sizes, mesh.slices)
    placements = {name: _placement(parameter, mesh) for name, parameter in model.named_parameters()}
    return ShardReport(mesh, placements, {name: tensor.nbytes for name, tensor in model.named_parameters()})


def distribute(model: Any, mesh: MeshShape) -> None:
    """Split the parameters of ``model`` over processes by its plans in transformers. It may be without weights.

    Raises:
        UserError: The model cannot be split over the mesh.
    """
    base, names = _base_of(model), _tensors_of(model).keys()
    _check_heads(base, mesh)
    if getattr(base, "is_quantized", False):  # torch's shards lose the quantization's state
        raise UserError(
            f"mesh='{mesh}' cannot shard quantized weights. Leave `mesh` out: each process then has them all."
        )
    if mesh.tensor > 1 and (packed := [name for name, style in base.tp_plan.items() if style == "packed_rowwise"]):
        raise UserError(  # torch takes this style's strided shard of the last dimension for a plain one
            f"mesh='{mesh}' cannot shard {type(base).__name__}: its plan in transformers has {packed[0]}: "
            "'packed_rowwise', and torch splits such weights into wrong parts. Leave `tensor` out."
        )
    if any(map(_reads_embedding, base.modules())):  # keep the embedding whole, with FSDP2 in the root
        base.fsdp_plan, base.tp_plan = (
            {name: style for name, style in plan.items() if "embed_tokens" not in name}
            for plan in (base.fsdp_plan, base.tp_plan)
        )
    groups = connect(mesh)  # outside: the error of a lost process is not about the model
    with explaining(f"mesh='{mesh}' cannot shard {type(base).__name__}", "Choose another mesh."):
        base.maybe_distribute_model(base, distributed_config(mesh), groups)
    if separated := sorted(_tensors_of(model).keys() - names):
        raise UserError(
            f"{type(base).__name__} cannot be sharded: its layers share parameters, and sharded layers would not "
            f"({separated[0]}). Leave mesh={str(mesh)!r} out: each process then has the whole model (DDP)."
        )


def connect(mesh: MeshShape) -> Any:
    """Connect the processes of a mesh, and return transformers' form of it.

    Call it before anything that may fail on one process alone: others would wait for that process to connect, but
    connected processes notice at once that it has ended.
    """
    return _process_groups(mesh, dist.group.WORLD)


@cache
def _process_groups(mesh: MeshShape, world: Any) -> Any:
    """Return transformers' mesh of the processes in ``world``. They are made once: groups hold sockets."""
    return PreTrainedModel.prepare_distribute_model(distributed_config(mesh))[2]


def _base_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _reads_embedding(module: nn.Module) -> bool:
    """Return whether a module's forward reads a row of the embedding's weight itself, as Gemma 4's does."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and {"embed_tokens", "weight"} <= {*code.co_names}


def of_first_process(decide: Callable[[], Value], model: nn.Module, shares: bool) -> Value:
    """Return what process 0 decides by computing with ``model``, whose weights it alone may have."""
    decided: list[Any] = [None if has_no_weights(model) else decide()]
    if shares:
        broadcast_object_list(decided)
    return decided[0]


def has_no_weights(model: nn.Module) -> bool:
    """Return whether a model is a shell that receives its weights from process 0, or that a step is planned for."""
    return any(parameter.is_meta for parameter in model.parameters())


@contextmanager
def trial_mode(model: nn.Module) -> Iterator[None]:
    """Let ``model`` compute in evaluation mode and without gradients while the context is open."""
    training = [module for module in model.modules() if module.training]
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        for module in training:
            module.training = True


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def _from_first(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return process 0's value of a tensor; it may be on the meta device in other processes."""
    value = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device).contiguous()
    dist.broadcast(value, src=0)
    return value


def _check_values(model: nn.Module, whole: Mapping[str, torch.Tensor]) -> None:
    """Compare all processes' shards with process 0's tensors, which it has loaded as a single process does.

    The sum of a tensor's bits is exact in any order, so the shards' sums add up to that of each whole copy.

    Raises:
        UserError: The bits of a parameter or buffer differ.
    """
    tensors, sums, processes = _tensors_of(model), list[torch.Tensor](), dist.get_world_size()
    for name, tensor in tensors.items():
        local, copies = tensor, processes
        if isinstance(tensor, DTensor):
            sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
            local, copies = tensor.to_local(), processes // prod(size for at, size in sizes if not at.is_replicate())
        sums.append(_sum_of_bits(local))
        if dist.get_rank() == 0:
            sums[-1] -= copies * _sum_of_bits(whole[name].to(local.device))
    differences = torch.stack(sums)
    dist.all_reduce(differences)
    if wrong := [name for name, each in zip(tensors, differences.tolist(), strict=True) if each]:
        raise UserError(
            f"{len(wrong)} of {len(sums)} tensors, such as {wrong[0]}, differ from those that process 0 has loaded. "
            "Leave `mesh` out: each process then loads the whole model."
        )


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's numbers as 32-bit integers, modulo 2**32. Shorter numbers count as float32."""
    numbers = tensor.detach() if tensor.element_size() >= 4 else tensor.detach().float()
    return numbers.contiguous().flatten().view(torch.int32).sum(dtype=torch.int32)


# torch takes the sharded embeddings of two models for one if their outputs have the same shape
_lengths = count(16)


def _rewards_of(model: nn.Module, length: int) -> torch.Tensor:
    """Compute the rewards of made-up sequences of ``length`` tokens."""
    base = _base_of(model)
    ids_BL = torch.arange(8 * length, device=base.device).view(8, -1) % base.config.get_text_config().vocab_size
    with trial_mode(model):
        return full_tensor(model(input_ids=ids_BL, use_cache=False).logits).cpu()


def _check_rewards(model: nn.Module, mesh: MeshShape, length: int, expected: torch.Tensor) -> None:
    """Compare the rewards of a model that is split by `tensor` with those before: a family's plan may be wrong.

    Raises:
        UserError: They differ, or the split model cannot compute them.
    """
    fault, fix = f"mesh='{mesh}' cannot shard {type(_base_of(model)).__name__}", "Leave `tensor` out."
    with explaining(fault, fix):
        rewards = _rewards_of(model, length)
    error, largest = (rewards - expected).abs().max(), expected.abs().max()
    # the parts are summed in another order; rewards that are not finite have no error
    if not error <= largest * torch.finfo(rewards.dtype).eps ** 0.5:
        raise UserError(f"{fault}: with its plan in transformers, rewards change by {error / largest:.1%}. {fix}")
    reshard(model)


def fill(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy an unsharded value into a tensor, or into its shard."""
    value = value.to(tensor.device)
    if isinstance(tensor, DTensor):
        value = distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.detach().copy_(value)


@torch.no_grad()
def _replace_tensors(model: nn.Module, replace: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Replace parameters and buffers. Shared ones stay shared; ``model.to`` separates them on meta and on TorchTPU.

    Modules are replaced one after another. Parameters that are still in the checkpoint's files, see `load_classifier`,
    are read for their module only.

    Args:
        replace: Takes the tensor's first name and the tensor; returns the tensor itself to keep it.
    """
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    new = dict[str, torch.Tensor]()
    for module in model.modules():
        places = [
            (tensors, leaf, names[id(tensor)])
            for tensors in (module._parameters, module._buffers)
            for leaf, tensor in tensors.items()
            if tensor is not None
        ]
        with align_module_device(module):
            for tensors, leaf, name in places:
                if name not in new:
                    tensor: Any = tensors[leaf]
                    replaced = replace(name, tensor)
                    if replaced is not tensor and isinstance(tensor, nn.Parameter):
                        replaced = nn.Parameter(replaced, tensor.requires_grad)
                    new[name] = replaced
        for tensors, leaf, name in places:
            tensors[leaf] = new[name]  # type: ignore[assignment]


def _placement(parameter: nn.Parameter, mesh: MeshShape) -> Placement:
    axes: list[list[str]] = [[] for _ in parameter.shape]
    if isinstance(parameter, DTensor):
        for name, placement in zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True):
            if isinstance(placement, Shard) and mesh.sizes[_AXES[name]] > 1:
                axes[placement.dim].append(_AXES[name])
    return Placement(tuple(map(as_axes, axes)), "by transformers")


def _check_heads(base: Any, mesh: MeshShape, names: Sequence[str] = _HEADS) -> None:
    """Check that the ``tensor`` axis divides the numbers of attention heads.

    Args:
        base: The model, without adapters.
        mesh: The mesh.
        names: Names of the numbers in the model's config. A number that the config lacks is not checked.

    Raises:
        UserError: The axis would split an attention head. The message shows the equation.
    """
    for name in names:
        count = getattr(base.config.get_text_config(), name, None)
        if count is not None and count % mesh.tensor:
            raise UserError(
                f"mesh '{mesh}': `tensor` must not split attention heads, but {name}={count} / tensor={mesh.tensor} "
                f"is not a whole number. Choose a `tensor` that divides it."
            )


def reshard(model: nn.Module) -> None:
    """Free gathered weights of FSDP2: after a forward without a backward, the last weights are still gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def save_given_weights_only(model: Any) -> Iterator[None]:
    """Make ``save_pretrained`` write only the weights that it is given, while the context is open.

    transformers then does not gather a sharded model, and peft does not write its stub of a model card.
    """
    sharding_config = vars(model.config).pop("distributed_config", None)
    model.create_or_update_model_card = lambda _: None  # peft's method
    try:
        yield
    finally:
        vars(model).pop("create_or_update_model_card", None)
        if sharding_config is not None:
            model.config.distributed_config = sharding_config


def full_tensor(value: Any) -> Any:
    """Return a DTensor, such as a norm of sharded gradients, as a full plain tensor; other values unchanged."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def plan_model(model: Any, mesh: MeshShape, rules: Rules | None = None) -> Plan:
    """Return the sharding plan for ``model``, derived from its tensor- and expert-parallel plans in transformers.

    Args:
        model: The model, with or without adapters.
        mesh: The mesh.
        rules: User-defined rules; they take precedence.

    Raises:
        UserError: The `tensor` axis would split an attention head, or the model has no plan for this axis. Or a rule
            matches no parameter, or no rule matches a parameter.
    """
    if rules is not None:
        rules.check(bare_name(name) for name, _ in model.named_parameters())
    base = _base_of(model)
    styles, expert_styles = (getattr(base, name, None) or {} for name in ("tp_plan", "ep_plan"))
    if mesh.tensor > 1 and any("attn" in name and style == "colwise" for name, style in styles.items()):
        styles = _with_whole_heads(base, mesh, styles)
    if mesh.tensor > 1 and rules is None and not (styles or expert_styles):
        raise UserError(
            f"mesh '{mesh}': {type(base).__name__} has no tensor-parallel plan in transformers, so no parameter can "
            f"be split over tensor={mesh.tensor}. Leave `tensor` out, or write a `sharding_plan`."
        )
    tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    return Plan(mesh, styles, expert_styles, frozenset(bare_name(name) for name in tables), rules)


def _with_whole_heads(base: Any, mesh: MeshShape, styles: Mapping[str, str]) -> Mapping[str, str]:
    """Return a model's tensor-parallel styles, changed where `tensor` would split an attention head.

    Key and value projections are replicated if `tensor` does not divide the number of their heads. They are the small
    part of grouped-query attention (https://arxiv.org/abs/2305.13245), and every device computes all of them.

    Raises:
        UserError: `tensor` does not divide the number of query heads, or the number of key and value heads in a fused
            projection of queries, keys and values.
    """
    grouped = getattr(base.config.get_text_config(), "num_key_value_heads", None)
    shared = {name for name in styles if name.endswith((".k_proj", ".v_proj"))}
    replicates = bool(grouped is not None and grouped % mesh.tensor and shared)
    _check_heads(base, mesh, _HEADS[:1] if replicates else _HEADS)
    return {name: "replicate" if replicates and name in shared else style for name, style in styles.items()}


def place_model(model: nn.Module, plan: Plan, runtime: Runtime, device: torch.device) -> ShardReport:
    """Move ``model`` to the plan's mesh in place: parameters are sharded, buffers replicated.

    Tied parameters stay tied and count once. A module's parameters are freed on the host before the next module is
    moved, unless another object holds them.

    Raises:
        UserError: From `Plan.place`, or from `Runtime.set_mesh`.
    """
    runtime.set_mesh(plan.mesh.sizes, plan.mesh.slices)
    placements = {name: plan.place(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()}

    def place(name: str, tensor: torch.Tensor) -> torch.Tensor:
        axes = placements[name].axes if name in placements else (None,) * tensor.dim()
        placed = runtime.place(tensor.detach(), axes, device)
        return tensor if placed.device == tensor.device else placed

    _replace_tensors(model, place)
    return ShardReport(plan.mesh, placements, {name: tensor.nbytes for name, tensor in model.named_parameters()})


def shard_activations(model: nn.Module, plan: Plan, placements: Mapping[str, Placement], runtime: Runtime) -> None:
    """Keep activations sharded by forward hooks: rows over the batch axes, heads and inner features over `tensor`.

    Without these constraints GSPMD propagates the weights' sharding to the activations, and gathers the full batch on
    every device.
    """
    for name, module in model.named_modules():
        weight = placements.get(f"{name}.weight")
        if isinstance(module, nn.Embedding) and weight is not None and weight.axes[0] is None and weight.axes[1]:
            _look_up_features(module, weight.axes[1], plan.mesh, runtime)
        if isinstance(module, nn.Linear) and weight is not None:
            gathered = plan.gathers_outputs(f"{bare_name(name)}.weight")
            out = "tensor" if "tensor" in names_of(weight.axes[0]) and not gathered else None
            _constrain(module, BATCH_AXES, out, runtime)
        elif isinstance(module, GradientCheckpointingLayer | nn.Embedding):
            _constrain(module, BATCH_AXES, None, runtime)


def _look_up_features(module: nn.Embedding, axes: Any, mesh: MeshShape, runtime: Runtime) -> None:
    """Make each device look up only its own features, for all tokens of its part of `data`.

    Before the lookup only token ids are gathered, and they are small. After it, features are exchanged for rows over
    `fsdp`, then gathered over `tensor` by the constraint of all embeddings. The table and its gradient are never
    moved.

    Args:
        module: The embedding.
        axes: Mesh axes of the table's features.
        mesh: The mesh.
        runtime: The runtime that constrains tensors.
    """

    def gather_ids(_module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        ids, *rest = inputs
        return (runtime.constrain(ids, ("data", *([None] * (ids.dim() - 1)))), *rest)

    module.register_forward_pre_hook(gather_ids)
    _constrain(module, "data", axes, runtime)
    if mesh.tensor > 1:
        _constrain(module, BATCH_AXES, "tensor", runtime)


def _constrain(module: nn.Module, first: Any, last: Any, runtime: Runtime) -> None:
    """Shard the outputs of ``module``: the first dimension over the axes ``first``, the last over ``last``."""

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        hidden = output[0] if isinstance(output, tuple) else output
        if not isinstance(hidden, torch.Tensor) or hidden.dim() < 2:
            return output
        hidden = runtime.constrain(hidden, (first, *([None] * (hidden.dim() - 2)), last))
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    module.register_forward_hook(hook)


def zeros_sharded_like(parameter: torch.Tensor) -> torch.Tensor:
    """Return zeros with the shape, type and sharding of ``parameter``."""
    if isinstance(parameter, DTensor):
        return torch.zeros_like(parameter)  # a product would lose the order of rows split over two axes
    # on XLA a product keeps the parameter's sharding; the result of zeros_like would be replicated
    return (parameter.detach() * 0).nan_to_num(0.0)  # infinite weights make NaN
