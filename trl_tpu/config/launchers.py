"""Turn what accelerate's launcher or its settings shard into a mesh: this package shards in one way only."""

from typing import Any

from accelerate import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin, parse_flag_from_env, patch_environment
from torch.distributed.fsdp import CPUOffload, OffloadPolicy, ShardingStrategy

from ..errors import UserError

#: Variables by which accelerate and transformers shard a model, or load it in only one process.
_SHARDING = (
    *("ACCELERATE_USE_FSDP", "ACCELERATE_USE_PARALLELISM_CONFIG"),
    *("FSDP_CPU_RAM_EFFICIENT_LOADING", "FSDP_SYNC_MODULE_STATES"),
)


def without_fsdp() -> Any:
    """Return a context manager and decorator in which accelerate and transformers do not shard."""
    return patch_environment(**dict.fromkeys(_SHARDING, "false"))


def launched_mesh(sizes: ParallelismConfig | None) -> str | None:
    """Return the mesh that `parallelism_config` or accelerate's launcher asks for; None if both do not.

    Raises:
        UserError: They split sequences.
    """
    if sizes is None and not parse_flag_from_env("ACCELERATE_USE_PARALLELISM_CONFIG"):
        return "fsdp=-1" if parse_flag_from_env("ACCELERATE_USE_FSDP") else None
    sizes = sizes or ParallelismConfig()
    if sizes.cp_size * sizes.sp_size > 1:
        raise UserError(
            f"cp_size={sizes.cp_size} and sp_size={sizes.sp_size} of accelerate's config are not supported: sequences "
            "are not split. Leave them out, or split layers with mesh='fsdp=-1,tensor=2'."
        )
    return f"data={sizes.dp_replicate_size},fsdp={sizes.dp_shard_size},tensor={sizes.tp_size}"


def apply_fsdp(args: Any, launched: str | None) -> None:
    """Set `mesh` and the settings that FSDP's options stand for, and turn off `fsdp` and `parallelism_config`.

    Which weights are gathered together, and when, is transformers' plan. Each checkpoint has the sharded state and the
    full model, for any `state_dict_type`.

    Args:
        args: The settings. `mesh` is kept if it is set.
        launched: The mesh from `launched_mesh`.

    Raises:
        UserError: An option is not supported.
    """
    if not args.fsdp and launched is None:
        return
    by_variables = dict.fromkeys(("cpu_ram_efficient_loading", "sync_module_states"))
    plugin: Any = FullyShardedDataParallelPlugin(**(args.fsdp_plugin_args or {}) | by_variables)
    strategy = plugin.sharding_strategy if plugin.reshard_after_forward is None else plugin.reshard_after_forward
    shards_fully = args.mesh or strategy in (True, ShardingStrategy.FULL_SHARD)
    keeps_all = plugin.cpu_offload in (OffloadPolicy(), CPUOffload()) and plugin.ignored_modules is None
    if not shards_fully or not keeps_all:
        raise UserError(
            f"FSDP's reshard_after_forward={strategy}, cpu_offload={plugin.cpu_offload}, ignored_modules="
            f"{plugin.ignored_modules} is not supported. Shard fully (FULL_SHARD, true) or within nodes by "
            "mesh='data=NODES,fsdp=DEVICES_OF_A_NODE', and leave cpu_offload and ignored_modules out."
        )
    if plugin.activation_checkpointing:
        args.gradient_checkpointing = args.activation_checkpointing = True
    args.activation_offloading |= getattr(plugin, "activation_checkpointing_offload", False)  # since accelerate 1.15
    args.mesh = args.mesh or launched or "fsdp=-1"
    args.fsdp = args.fsdp_plugin_args = args.parallelism_config = None
