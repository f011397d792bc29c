"""Plan a training run on TPUs without having one: ``trl-tpu plan``.

Takes the arguments of the training, from flags or its YAML file, and the slice to plan for. The training step is
traced and compiled with the TPU's compiler; see `trl_tpu.plan`.
"""

import dataclasses
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice, product
from typing import Any

from datasets import Dataset
from transformers import AutoConfig

from trl_tpu.config.reward_config import RewardConfig, dataclass_with_help
from trl_tpu.data.length_stats import length_stats
from trl_tpu.errors import UserError, explaining
from trl_tpu.experimental.prm import PRMConfig
from trl_tpu.modeling.adapters import add_adapters, get_peft_config
from trl_tpu.modeling.build import build_dataset
from trl_tpu.modeling.head_spec import HeadSpec, hub_settings, without_adapters, write_head_spec
from trl_tpu.modeling.heads import model_without_weights
from trl_tpu.modeling.load import freeze, load_tokenizer, set_special_tokens
from trl_tpu.parallel.mesh import MeshShape, parse_mesh, parse_topology
from trl_tpu.plan import layouts
from trl_tpu.plan.compile import check_libraries
from trl_tpu.plan.layouts import Attempt, Layout
from trl_tpu.runtime import Remat
from trl_tpu.scripts import reward
from trl_tpu.scripts.parser import TrlParser
from trl_tpu.scripts.synthetic import resolve_model
from trl_tpu.scripts.utils import ScriptArguments, load_splits, pick_split
from trl_tpu.trainer.model_config import ModelConfig

_SET_BY_REMAT = {"gradient_checkpointing", "activation_checkpointing"}


@dataclass_with_help
class PlanArguments:
    """Arguments of the plan, in addition to the arguments of the training.

    Args:
        topology: The TPU slice: chip and shape, such as v5e:2x4, v5p:2x2x4 or v6e:4x4.
        pairs_in_dataset: Number of training rows, to estimate the hours. By default the size of the dataset, if any.
        search: Compile the training for each combination of `meshes`, `batch_sizes` and remat policies. Setting
            `meshes` or `batch_sizes` also starts a search.
        meshes: Meshes to search, such as fsdp=-1 fsdp=4,tensor=2. By default the mesh of the training.
        batch_sizes: Batch sizes per device to search. By default the batch size of the training, and half of it.
        compiles: Maximum number of layouts to compile in a search, or when the training does not fit.
        all_layers: Compile all layers of a deep model instead of two smaller depths. This takes minutes and tens of GB
            of memory.
    """

    topology: str
    pairs_in_dataset: int | None = None
    search: bool = False
    meshes: list[str] | None = None
    batch_sizes: list[int] | None = None
    compiles: int = 6
    all_layers: bool = False


def make_parser(config: type[RewardConfig] = RewardConfig) -> TrlParser:
    """Make the parser of the flags for planning and of the training flags of ``trl-tpu reward`` or ``trl-tpu prm``."""
    return reward.make_parser("trl-tpu plan", config, (PlanArguments, ScriptArguments))


def run(argv: list[str], config: Mapping[str, Any] | None = None, compile_one: layouts.Compile | None = None) -> int:
    """Run the command ``trl-tpu plan``: plan, and print the report.

    Args:
        argv: The arguments after the command's name; ``prm`` before the flags plans a process reward model.
        config: Values of the YAML file, if `argv` no longer names it.
        compile_one: Function that compiles one layout; by default it uses the TPU's compiler.

    Returns:
        The exit status: 0 if the layout, or any layout of a search, fits, else 1.

    Raises:
        UserError: No model, a mesh that does not fit the slice or the model, several slices, or arguments that
            training or the compiler rejects, for another reason than memory.
    """
    is_prm = argv[:1] == ["prm"]
    parser, argv = make_parser(PRMConfig if is_prm else RewardConfig), argv[is_prm:]
    plan_args, script, args, model_args, data = parser.parse_args_and_config(argv, config=config)
    topology, mesh = parse_topology(plan_args.topology), args.mesh_shape
    if mesh.slices > 1:
        raise UserError(f"mesh '{mesh}': {topology} is one slice. Plan for one slice; the axis `data` spans several.")
    if compile_one is None:
        check_libraries()
    with tempfile.TemporaryDirectory() as folder:
        model, tokens = read_inputs(script, args, model_args, data, folder)
    lengths = layouts.typical_row(args) if tokens is None else length_stats(tokens).lengths
    planned = Layout(model, args, lengths, tokens, topology, mesh, args.remat_policy, args.per_device_train_batch_size)
    depths = layouts.depths_of(without_adapters(model).config, plan_args.all_layers or args.scan_layers)
    parsed = parser.parse_known_args(argv)[0]  # the values before `RewardConfig` changes them
    fields = {field.name for field in dataclasses.fields(args) if field.init} - _SET_BY_REMAT
    compile_one = compile_one or partial(
        layouts.compile_layout,
        arguments={name: value for name, value in vars(parsed).items() if name in fields}
        | {"gradient_accumulation_steps": args.gradient_accumulation_steps, "total_batch_size": None}
        | {"trust_remote_code": reward.model_init_kwargs(model_args, args)["trust_remote_code"]},
        peft_config=get_peft_config(model_args),
        depths=depths,
    )

    def try_each(meshes: Iterable[MeshShape], sizes: Iterable[int], policies: Iterable[Remat]) -> Iterator[Attempt]:
        for mesh, size, remat in islice(product(meshes, sizes, policies), plan_args.compiles):
            candidate = dataclasses.replace(planned, mesh=mesh, device_batch_size=size, remat=remat)
            yield layouts.attempt(candidate, compile_one)

    size = planned.device_batch_size
    if plan_args.search or plan_args.meshes or plan_args.batch_sizes:
        meshes = [parse_mesh(axes, topology.chips) for axes in plan_args.meshes or [str(mesh)]]
        # scanned layers are always recomputed
        policies = [policy for policy in Remat if policy != Remat.NONE or not args.scan_layers]
        sizes = plan_args.batch_sizes or dict.fromkeys([size, -(-size // 2)])
        attempts = list(try_each(meshes, sizes, policies))
        parts = [layouts.found(attempts)]
    else:
        attempts = [layouts.attempt(planned, compile_one)]
        parts = [layouts.report(attempts[0], rows_to_train(planned, plan_args))]
        if not attempts[0].fits:  # try full remat and weights sharded over all chips, with ever smaller batches
            smallest = [MeshShape(fsdp=mesh.batch_shards, tensor=mesh.tensor)]
            is_smallest = planned.remat == Remat.FULL and smallest == [mesh]
            sizes = [size // 2**halvings for halvings in range(is_smallest, size.bit_length())]
            alternatives = list[Attempt]()
            for alternative in try_each(smallest, sizes, [Remat.FULL]):
                alternatives.append(alternative)
                if alternative.fits:
                    break
            parts.append(f"What would fit:\n\n{layouts.found(alternatives)}")
    print("\n\n".join([*parts, layouts.notes(planned, depths)]))
    return 0 if any(attempt.fits for attempt in attempts) else 1


def rows_to_train(layout: Layout, plan_args: PlanArguments) -> float | None:
    """Return the number of rows in all steps; None if neither `max_steps` nor the size of the dataset is known."""
    args = layout.args
    if args.max_steps > 0:
        return args.max_steps * layout.batch_size * args.gradient_accumulation_steps
    rows = plan_args.pairs_in_dataset or (None if layout.tokens is None else len(layout.lengths))
    return rows and rows * args.num_train_epochs


def read_inputs(
    script: Any, args: RewardConfig, model_args: ModelConfig, data: Any, folder: str
) -> tuple[Any, Dataset | None]:
    """Return the model without weights, and the tokenized dataset; the dataset is None if the arguments name none.

    Args:
        script: Script arguments with the name of the dataset.
        args: Settings of the training.
        model_args: The model and its adapters.
        data: The dataset as a mixture.
        folder: Folder for a synthetic model.

    Raises:
        UserError: No model, or a model or data that the trainer rejects.
    """
    name, kwargs = resolve_model(model_args.model_name_or_path, folder), reward.model_init_kwargs(model_args, args)
    loading = hub_settings(kwargs) | {"trust_remote_code": kwargs["trust_remote_code"]}
    with explaining(f"{name} cannot be loaded as a reward model"):
        config = AutoConfig.from_pretrained(name, **loading)
    write_head_spec(config, HeadSpec.for_settings(args))
    dtype = (config.dtype if kwargs.get("dtype") == "auto" else kwargs.get("dtype")) or "float32"
    model = model_without_weights(config, dtype, loading["trust_remote_code"])
    tokens = None
    if script.dataset_name or data.datasets:
        splits, what = load_splits(script, data)
        dataset = pick_split(splits, script.dataset_train_split, what)
        tokenizer, _ = set_special_tokens(model, load_tokenizer(name, **loading), args)
        tokens = build_dataset(dataset, model, tokenizer, args, "train", False)
    if (peft_config := get_peft_config(model_args)) is not None:
        model = add_adapters(model, peft_config)
    freeze(model, args.frozen_parameters)
    return model, tokens
