"""Parameter placement: `tensor` by the model's plan, `fsdp` along one remaining dimension, or replicated.

Patterns of the user's sharding plan take precedence. Rules and meshes that do not fit are rejected.
"""

import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from trl_tpu.errors import UserError
from trl_tpu.modeling.heads import model_without_weights
from trl_tpu.parallel import mesh as meshes
from trl_tpu.parallel.mesh import AXES, BATCH_AXES, MeshShape, Plan, Rules, bare_name, parse_mesh, parse_topology
from trl_tpu.parallel.shard import ShardReport, place_model, plan_model
from trl_tpu.runtime import PartitionSpec
from trl_tpu.runtime.native import Runtime

sizes = st.integers(1, 40) | st.sampled_from([48, 64, 96, 128, 256])
shapes = st.lists(sizes, max_size=4).map(tuple)


@given(shapes, st.integers(2, 16))
def test_fsdp_splits_rows_in_whole_tiles_or_the_largest_dimension(shape: tuple[int, ...], fsdp: int) -> None:
    """A tile has 16 rows. The last dimension has no tiles."""
    placement = Plan(MeshShape(fsdp=fsdp)).place("w", shape)
    divisible = [dim for dim, size in enumerate(shape) if size % fsdp == 0]
    in_tiles = [dim for dim in divisible if shape[dim] % (16 * fsdp) == 0 and shape[dim + 1 :]]
    split, *_ = [*in_tiles, *sorted(divisible, key=lambda dim: -shape[dim]), None]
    assert placement.axes == tuple("fsdp" if dim == split else None for dim in range(len(shape)))
    assert (f"fsdp={fsdp}" in placement.reason) is (split is None)


MESH = MeshShape(fsdp=4, tensor=2)
LAYER = {"q": "colwise", "o": "rowwise", "qkv": "packed_colwise", "norm": "replicated_with_grad_allreduce"}
LAYER |= {"sinks": "colwise", "experts": "moe_tp_experts"}
LAYER |= {"experts.gate_up": "packed_colwise", "experts.down": "rowwise"}
LAYER = {f"layers.*.{name}": style for name, style in LAYER.items()}


PLACED = [
    ("layers.0.q.weight", (64, 32), ("tensor", "fsdp")),
    ("layers.11.q.bias", (64,), ("tensor",)),
    ("layers.0.o.weight", (32, 64), ("fsdp", "tensor")),
    ("layers.0.o.bias", (32,), ("fsdp",)),
    ("layers.0.qkv.weight", (96, 32), ("tensor", "fsdp")),
    ("layers.0.q.weight", (33, 32), (None, "fsdp")),
    ("layers.0.norm.weight", (6,), (None,)),
    ("layers.0.other.weight", (8, 16), (None, "fsdp")),
    ("layers.0.sinks", (8,), ("tensor",)),
    ("layers.0.experts.gate_up", (6, 64, 32), (None, "tensor", "fsdp")),
    ("layers.0.experts.down", (6, 32, 64), (None, "fsdp", "tensor")),
    # adapters: B has the output dimension split by colwise layers, A the input dimension split by rowwise layers
    ("layers.0.q.lora_A.default.weight", (4, 32), (None, "fsdp")),
    ("layers.0.q.lora_B.default.weight", (64, 4), ("tensor", "fsdp")),
    ("layers.0.o.lora_A.default.weight", (4, 64), ("fsdp", "tensor")),
    ("layers.0.o.lora_B.default.weight", (32, 4), ("fsdp", None)),
]


@pytest.mark.parametrize(("name", "shape", "axes"), PLACED)
def test_tensor_axis_is_placed_before_fsdp(name: str, shape: tuple[int, ...], axes: PartitionSpec) -> None:
    plan = Plan(MESH, LAYER)
    assert plan.place(name, shape).axes == axes
    wrapped = f"base_model.model.{name}" if "lora" in name else name.replace(".weight", ".base_layer.weight")
    assert plan.place(wrapped, shape).axes == axes


def test_experts_are_split_over_tensor_if_it_divides_them() -> None:
    """The expert-parallel plan takes precedence over the tensor-parallel plan, as in transformers."""
    plan = Plan(MESH, LAYER, {"layers.*.experts.gate_up": "grouped_gemm"})
    assert plan.place("layers.0.experts.gate_up", (8, 64, 32)).axes == ("tensor", "fsdp", None)
    assert plan.place("layers.0.experts.gate_up", (7, 64, 32)).axes == (None, "tensor", "fsdp")


EMBEDDINGS = [
    (MeshShape(fsdp=8), (1000, 64), (None, "fsdp")),
    (MeshShape(tensor=8), (1000, 64), (None, "tensor")),
    (MeshShape(data=2, fsdp=2, tensor=2), (1000, 64), (None, ("tensor", "fsdp"))),
    (MeshShape(fsdp=8), (1000, 60), ("fsdp", None)),  # 8 does not divide 60
    (MeshShape(data=8), (1000, 64), (None, None)),
]


@pytest.mark.parametrize(("mesh", "shape", "axes"), EMBEDDINGS)
def test_embedding_table_is_split_by_features(mesh: MeshShape, shape: tuple[int, int], axes: PartitionSpec) -> None:
    plan = Plan(mesh, {"embed": "embedding_rowwise"}, embeddings={"embed.weight"})
    assert plan.place("embed.weight", shape).axes == plan.place("embed.base_layer.weight", shape).axes == axes


def test_every_transformers_parallel_style_is_known() -> None:
    how_modules_communicate = {
        *("replicate", "replicated_with_grad_allreduce", "sequence_parallel", "mla_kv_a_proj", "all_reduce"),
        *("local_params", "moe_tp_experts", "moe_identity_expert", "ep_dispatch_experts"),
    }
    assert set(ALL_PARALLEL_STYLES.keys()) <= meshes._SPLITS.keys() | how_modules_communicate
    placed = Plan(MeshShape(tensor=2), {"q": "replicate"}).place("q.weight", (4, 4))
    assert placed.axes == (None, None) and placed.reason == "replicate leaves it whole"


# ---- real models on the meta device


def on_meta(model_type: str, **sizes: Any) -> Any:
    return model_without_weights(AutoConfig.for_model(model_type, num_labels=1, pad_token_id=0, **sizes), "float32")


EIGHT = {"num_key_value_heads": 8}
MODELS = dict.fromkeys(("llama", "qwen3", "phi3"), EIGHT) | {"mistral": {}}
MODELS |= {"gemma3_text": EIGHT | {"num_attention_heads": 8}, "qwen3_moe": EIGHT | {"num_hidden_layers": 4}}


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize(
    "mesh", [MeshShape(fsdp=8), MeshShape(data=2, fsdp=4, tensor=2), MeshShape(tensor=8)], ids=str
)
def test_real_models_replicate_almost_no_parameters(model_type: str, mesh: MeshShape) -> None:
    model = on_meta(model_type, **MODELS[model_type])
    plan = plan_model(model, mesh)
    whole = parts = 0
    for name, parameter in model.named_parameters():
        placement = plan.place(name, tuple(parameter.shape))
        for size, over in zip(parameter.shape, placement.axes, strict=True):
            names = (over,) if isinstance(over, str) else over or ()
            assert size % prod(mesh.sizes[each] for each in names) == 0, name
        whole += parameter.numel()
        parts += parameter.numel() // placement.parts(mesh)
    devices = mesh.fsdp * mesh.tensor
    assert whole / devices <= parts < 1.02 * whole / devices


def test_model_without_a_plan_is_rejected_on_a_tensor_axis_only() -> None:
    model = on_meta("gpt2", n_layer=1, n_embd=64, n_head=4)
    plan_model(model, MeshShape(fsdp=8))
    with pytest.raises(ValueError, match="GPT2ForSequenceClassification .* tensor=2"):
        plan_model(model, MeshShape(fsdp=4, tensor=2))


def test_tensor_axis_never_splits_within_attention_heads() -> None:
    model = on_meta("qwen3", num_attention_heads=20, num_key_value_heads=2, num_hidden_layers=1)
    with pytest.raises(ValueError, match="num_attention_heads=20 / tensor=8"):
        plan_model(model, MeshShape(tensor=8))
    plan, parameters = plan_model(model, MeshShape(fsdp=2, tensor=4)), dict(model.named_parameters())
    whole, split = ("fsdp", None), ("tensor", "fsdp")
    for name, axes in {"k_proj": whole, "v_proj": whole, "q_proj": split, "o_proj": split[::-1]}.items():
        weight = f"model.layers.0.self_attn.{name}.weight"
        assert plan.place(weight, tuple(parameters[weight].shape)).axes == axes, name


# ---- placement, and its report


def place(model: nn.Module, mesh: MeshShape, device: str = "cpu") -> ShardReport:
    return place_model(model, plan_model(model, mesh), Runtime(), torch.device(device))


def test_report_gives_bytes_and_sharding_plan_lines() -> None:
    layers = [nn.Linear(64, 1024, bias=False), nn.Linear(64, 1024, bias=False), nn.Linear(1024, 5)]
    report = place(nn.ModuleDict({"layers": nn.ModuleList(layers)}), MeshShape(data=2, fsdp=4))
    assert sum(report.sizes.values()) == (2 * 64 * 1024 + 1024 * 5 + 5) * 4
    assert report.bytes_per_device == (2 * 64 * 1024 + 1024 * 5) * 4 // 4 + 5 * 4
    rules = [yaml.safe_load(line) for line in str(report).splitlines()[1:]]
    weight, bias = "layers.*.weight", "layers.*.bias"
    assert rules == [{weight: ["fsdp", None]}, {weight: [None, "fsdp"]}, {bias: [None]}]
    assert str(place(nn.Linear(4, 4), MeshShape())).count("\n") == 0


def test_tied_parameters_stay_tied_and_count_once() -> None:
    model: Any = nn.ModuleDict({"embed": nn.Embedding(8, 16), "head": nn.Linear(16, 8, bias=False)}).to(torch.bfloat16)
    model["head"].weight = model["embed"].weight
    model["embed"].weight.requires_grad_(False)
    model.register_buffer("steps", torch.zeros(3))
    report = place(model, MeshShape(fsdp=8), device="meta")  # any other device than the model's
    assert report.sizes == {"embed.weight": 8 * 16 * 2} and report.bytes_per_device == 16 * 2
    assert report.placements["embed.weight"].axes == (None, "fsdp")
    assert model["head"].weight is model["embed"].weight
    assert model["head"].weight.device.type == model.steps.device.type == "meta"
    assert not model["head"].weight.requires_grad


# ---- a user's sharding plan


SHAPES = {
    "model.embed_tokens.weight": (128, 64),
    "model.layers.0.mlp.down_proj.weight": (64, 96),
    "model.layers.1.mlp.down_proj.weight": (64, 96),
    "model.norm.weight": (64,),
    "score.weight": (1, 64),
}


def rules(folder: Path, text: str) -> Rules:
    path = folder / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    return Rules.read(path)


def test_first_matching_pattern_decides_and_auto_uses_the_derived_plan(tmp_path: Path) -> None:
    text = "model.embed_tokens.weight: [tensor, fsdp]\nmodel.layers.1.*: [null, [fsdp, tensor]]\n"
    given = rules(tmp_path, f"{text}model.layers.*.down_proj.weight: [data, null]\n'*': auto")
    plan = Plan(MESH, {"model.norm": "replicate"}, rules=given)
    given.check(SHAPES)
    placed = {name: plan.place(name, shape) for name, shape in SHAPES.items()}
    assert {name: placement.axes for name, placement in placed.items()} == {
        "model.embed_tokens.weight": ("tensor", "fsdp"),
        "model.layers.0.mlp.down_proj.weight": (None, None),  # `data` has size 1 in this mesh
        "model.layers.1.mlp.down_proj.weight": (None, ("fsdp", "tensor")),
        "model.norm.weight": ("fsdp",),
        "score.weight": (None, "fsdp"),
    }
    assert placed["model.layers.1.mlp.down_proj.weight"].reason == "rule 'model.layers.1.*'"
    assert placed["model.layers.1.mlp.down_proj.weight"].parts(MESH) == 8
    assert placed["model.norm.weight"].reason == "replicate leaves it whole; largest divisible dimension"


def test_sharding_plan_uses_names_of_the_bare_model(tmp_path: Path) -> None:
    given = rules(tmp_path, "score.weight: [null, tensor]\n'*.lora_A.*': [null, fsdp]")
    plan = Plan(MESH, rules=given)
    heads = [f"base_model.model.score.{part}.weight" for part in ("modules_to_save.default", "original_module")]
    adapter = "base_model.model.q.lora_A.default.weight"
    given.check(map(bare_name, [*heads, adapter]))
    assert [plan.place(head, (1, 64)).axes for head in heads] == [(None, "tensor")] * 2
    assert plan.place(adapter, (8, 64)).axes == (None, "fsdp")


WRONG_PLANS = [
    # a parameter without a pattern, and a pattern without a parameter
    ("model.*: auto", "score.weight"),
    ("q_proj: auto\n'*': auto", "q_proj"),
    # rules that do not fit the shape
    ("score.weight: [fsdp, null]\n'*': auto", "'score.weight': [fsdp, null]"),
    ("score.weight: [fsdp]\n'*': auto", "'score.weight': [fsdp]"),
    # unknown axes
    ("score.weight: [null, expert]\n'*': auto", "'score.weight': [null, expert]"),
]


@pytest.mark.parametrize(("text", "said"), WRONG_PLANS)
def test_wrong_sharding_plan_is_rejected_by_pattern_and_parameter(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        given = rules(tmp_path, text)
        given.check(SHAPES)
        Plan(MESH, rules=given).place("score.weight", SHAPES["score.weight"])
    assert str(caught.value).startswith(f"sharding plan '{tmp_path / 'plan.yaml'}'")


# ---- meshes and topologies


counts = st.integers(1, 16)


@given(counts, counts, counts, st.integers(1, 4))
def test_mesh_sizes_multiply_to_the_devices_or_are_inferred(within: int, fsdp: int, tensor: int, slices: int) -> None:
    """Slices are the outer part of the data axis."""
    data = slices * within
    devices = data * fsdp * tensor
    shape = MeshShape(data, fsdp, tensor, slices)
    for spec in (
        f"data={data},fsdp={fsdp},tensor={tensor}",
        f" tensor={tensor}, fsdp = {fsdp} , data={data}",
        f"data=-1,fsdp={fsdp},tensor={tensor}",
        f"data={data},fsdp=-1,tensor={tensor}",
        f"data={data},fsdp={fsdp},tensor=-1",
    ):
        assert parse_mesh(f"slices={slices},{spec}", devices) == shape
        assert parse_mesh(spec, devices, slices) == shape  # as detected by the runtime
    assert shape.devices == prod(shape.sizes.values()) == shape.batch_shards * tensor == devices
    assert parse_mesh("tensor=-1", devices) == MeshShape(tensor=devices)  # axes that are not named have size 1
    assert parse_mesh(f"slices={slices},fsdp=-1", devices) == MeshShape(slices, devices // slices, 1, slices)
    assert tuple(shape.sizes) == AXES == (*BATCH_AXES, "tensor")
    assert parse_mesh(str(shape), devices) == shape


WRONG_MESHES = [
    # sizes that do not multiply to the number of devices: the message shows the equation
    ("data=2,fsdp=3", 8, "8, but are data=2 x fsdp=3 x tensor=1"),
    ("fsdp=-1,tensor=3", 8, "8, but are data=1 x fsdp=-1 x tensor=3"),
    ("slices=2,fsdp=-1", 9, "9, but are data=2 x fsdp=-1 x tensor=1"),
    ("data=-1,fsdp=-1", 8, "8, but are data=-1 x fsdp=-1"),
    *((spec, 8, "AXIS=SIZE") for spec in ("", "fsdp:8", "fdsp=8", "fsdp=2,fsdp=4", "fsdp=0", "fsdp=2.5")),
    *((spec, 8, "AXIS=SIZE") for spec in ("fsdp=²", "slices=-1")),
]


@pytest.mark.parametrize(("spec", "devices", "rule"), WRONG_MESHES)
def test_wrong_mesh_is_rejected_with_its_text(spec: str, devices: int, rule: str) -> None:
    with pytest.raises(UserError, match=re.escape(rule)) as caught:
        parse_mesh(spec, devices)
    assert str(caught.value).startswith(f"mesh {spec!r}: ")


def test_topology_is_parsed_or_rejected_with_valid_choices() -> None:
    """libtpu has no one-chip slice: a chip of the smallest slice represents it."""
    for text, chips, compiled_as in (("v5p:4x8x8", 256, "v5p:4x8x8"), ("V6E:1x1", 1, "v6e:2x2")):
        topology = parse_topology(text)
        assert (topology.chips, str(topology), topology.compiled_as) == (chips, text.lower(), compiled_as)
    for text, works in (("v4:2x2x1", "v5e.*v5p.*v6e"), ("v6e:3x3", "v6e: 1x1, 2x2, 2x4, 4x4")):
        with pytest.raises(UserError, match=works):
            parse_topology(text)
