"""A user's sharding plan: patterns decide, "auto" leaves to the model's plan, and whatever does not fit is refused."""

import re
from pathlib import Path

import pytest

from trl_tpu.parallel.mesh import MeshShape
from trl_tpu.parallel.sharding_plan import Plan, Rules

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
    plan.check(SHAPES)
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
    names = ["base_model.model.score.modules_to_save.default.weight", "base_model.model.q.lora_A.default.weight"]
    plan.check(names)
    assert plan.place(names[0], (1, 64)).axes == (None, "tensor")
    assert plan.place(names[1], (8, 64)).axes == (None, "fsdp")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model.*: auto", "no pattern matches score.weight. Add patterns, or as the last line '\"*\": auto'"),
        ("q_proj: auto\n'*': auto", "q_proj match(es) no parameter, or only what earlier patterns"),
    ],
)
def test_a_pattern_or_a_parameter_that_nothing_matches_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Plan(MESH, rules=rules(tmp_path, text)).check(SHAPES)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "score.weight: [fsdp, null]",
            "'score.weight': [fsdp, null] does not fit score.weight of shape [1, 64] on the mesh "
            "'data=1,fsdp=4,tensor=2': 1 / 4 is no whole number.",
        ),
        ("score.weight: [fsdp]", "'score.weight': [fsdp] has 1 dimension(s), but score.weight has the shape [1, 64]"),
    ],
)
def test_a_rule_that_does_not_fit_the_shape_shows_the_equation(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Plan(MESH, rules=rules(tmp_path, text)).place("score.weight", (1, 64))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must map patterns of parameter names to lists of mesh axes"),
        ("score.weight: fsdp", "'score.weight': 'fsdp' is not 'auto', nor a list of a mesh axis, a list of"),
        ("score.weight: [null, expert]", "'score.weight': [None, 'expert'] is not 'auto'"),
        ("score.weight: [fsdp, [tensor, fsdp]]", "dimension: the axes are data, fsdp, tensor, each once"),
        ("score.weight: [1, null]", "'score.weight': [1, None] is not 'auto'"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        rules(tmp_path, text)
    assert str(caught.value).startswith(f"sharding plan '{tmp_path / 'plan.yaml'}'")


def test_a_file_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere.yaml"):
        Rules.read(tmp_path / "nowhere.yaml")
