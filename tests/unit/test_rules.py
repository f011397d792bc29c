"""A user's sharding plan: patterns decide, "auto" leaves to the model's plan, and whatever does not fit is refused."""

import re
from pathlib import Path

import pytest

from trl_tpu.errors import UserError
from trl_tpu.parallel.mesh import MeshShape
from trl_tpu.parallel.sharding_plan import Plan, Rules, bare_name

MESH = MeshShape(fsdp=4, tensor=2)
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


def test_the_first_pattern_decides_and_auto_leaves_it_to_the_derived_plan(tmp_path: Path) -> None:
    given = rules(
        tmp_path,
        """
        model.embed_tokens.weight: [tensor, fsdp]
        model.layers.1.*: [null, [fsdp, tensor]]
        model.layers.*.down_proj.weight: [data, null]
        "*": auto
        """,
    )
    plan = Plan(MESH, {"model.norm": "replicate"}, rules=given)
    given.check(SHAPES)
    placed = {name: plan.place(name, shape) for name, shape in SHAPES.items()}
    assert {name: placement.axes for name, placement in placed.items()} == {
        "model.embed_tokens.weight": ("tensor", "fsdp"),
        "model.layers.0.mlp.down_proj.weight": (None, None),  # the mesh has one device of `data`
        "model.layers.1.mlp.down_proj.weight": (None, ("fsdp", "tensor")),
        "model.norm.weight": ("fsdp",),
        "score.weight": (None, "fsdp"),
    }
    assert placed["model.layers.1.mlp.down_proj.weight"].reason == "rule 'model.layers.1.*'"
    assert placed["model.layers.1.mlp.down_proj.weight"].parts(MESH) == 8
    assert placed["model.norm.weight"].reason == "replicate leaves it whole; largest divisible dimension"


def test_names_are_those_of_the_bare_model(tmp_path: Path) -> None:
    given = rules(tmp_path, "score.weight: [null, tensor]\n'*.lora_A.*': [null, fsdp]")
    plan = Plan(MESH, rules=given)
    heads = [f"base_model.model.score.{part}.weight" for part in ("modules_to_save.default", "original_module")]
    adapter = "base_model.model.q.lora_A.default.weight"
    given.check(map(bare_name, [*heads, adapter]))
    assert [plan.place(head, (1, 64)).axes for head in heads] == [(None, "tensor")] * 2
    assert plan.place(adapter, (8, 64)).axes == (None, "fsdp")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # no pattern for a parameter, and a pattern for none
        ("model.*: auto", "no pattern matches score.weight"),
        ("q_proj: auto\n'*': auto", "q_proj match(es) no parameter"),
        # a rule that does not fit the shape
        ("score.weight: [fsdp, null]\n'*': auto", "'score.weight': [fsdp, null]"),
        ("score.weight: [fsdp]\n'*': auto", "'score.weight': [fsdp] has 1 dimension(s)"),
        # no plan at all
        ("", "must map patterns"),
        ("score.weight: fsdp", "'score.weight': 'fsdp' is not 'auto'"),
        ("score.weight: [null, expert]", "'score.weight': [None, 'expert'] is not 'auto'"),
        ("score.weight: [fsdp, [tensor, fsdp]]", "'score.weight'"),
        ("score.weight: [1, null]", "'score.weight': [1, None] is not 'auto'"),
    ],
)
def test_a_wrong_plan_is_rejected_by_pattern_and_parameter(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        given = rules(tmp_path, text)
        given.check(SHAPES)
        Plan(MESH, rules=given).place("score.weight", SHAPES["score.weight"])
    assert str(caught.value).startswith(f"sharding plan '{tmp_path / 'plan.yaml'}'")


def test_a_file_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere.yaml"):
        Rules.read(tmp_path / "nowhere.yaml")
