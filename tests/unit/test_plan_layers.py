"""What two depths cost is extended to all layers, exactly where costs are a straight line."""

from dataclasses import replace
from typing import Any

import pytest
from planned import workload
from transformers import AutoConfig, AutoModelForSequenceClassification

from trl_tpu.packing.lengths import PairLengths
from trl_tpu.parallel.chips import parse_topology
from trl_tpu.parallel.mesh import MeshShape
from trl_tpu.plan import layers
from trl_tpu.plan.compile import CompiledProgram
from trl_tpu.plan.layers import extend, two_depths, with_layers
from trl_tpu.plan.needs import least_memory
from trl_tpu.plan.workload import Layout
from trl_tpu.runtime import Remat


def program(layers: int) -> CompiledProgram:
    return CompiledProgram(10 + 3 * layers, 1, 1000 + 7 * layers, 5 + layers)


@pytest.mark.parametrize("depths", [(2, 4), (6, 12)])
def test_a_straight_line_is_extended_exactly_and_never_below_zero(depths: tuple[int, int]) -> None:
    asked = []

    def compile_layers(layers: int) -> CompiledProgram:
        asked.append(layers)
        return program(layers)

    assert extend(compile_layers, depths, 48) == program(48)
    assert asked == list(depths)
    falling = {depths[0]: replace(program(2), temporary=60), depths[1]: replace(program(4), temporary=40)}
    assert extend(falling.__getitem__, depths, 480).temporary == 0


def test_memory_is_no_less_than_what_all_layers_need() -> None:
    """As where two layers need most for their embeddings, and 48 for what they keep."""
    straight = extend(program, (2, 4), 48)
    assert extend(program, (2, 4), 48, least=1000) == straight
    raised = extend(program, (2, 4), 48, least=5000)
    assert raised.peak == 5000 + raised.generated_code
    assert raised == replace(straight, temporary=raised.temporary)


def config(model_type: str, layers: int, **settings: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "vocab_size": 64}
    return AutoConfig.for_model(model_type, num_hidden_layers=layers, num_labels=1, **sizes, **settings)


def test_few_layers_are_compiled_as_they_are_and_many_by_two_depths() -> None:
    assert two_depths(config("llama", 8)) is None
    assert two_depths(config("llama", 32)) == (2, 4)
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 4
    assert two_depths(config("gemma3_text", 24, layer_types=kinds)) == (6, 12)
    assert two_depths(config("gemma3_text", 26, layer_types=kinds + kinds[:2])) == (8, 14)
    assert two_depths(config("gemma3_text", 25, layer_types=kinds + kinds[:1])) == (7, 13)
    assert two_depths(config("gemma3_text", 12, layer_types=kinds[:12])) is None


def test_a_config_with_fewer_layers_makes_such_a_model_and_leaves_the_config_alone() -> None:
    whole = config("gemma3_text", 12, layer_types=["sliding_attention", "full_attention"] * 6, head_dim=8)
    model = AutoModelForSequenceClassification.from_config(with_layers(whole, 4))
    assert len(model.model.layers) == 4
    assert whole.num_hidden_layers == len(whole.layer_types) == 12


def test_where_gradients_accumulate_the_optimizers_state_is_counted_beside_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A micro-batch's program does not take it."""
    model = AutoModelForSequenceClassification.from_config(config("llama", 2))
    monkeypatch.setattr(layers, "trace_step", lambda request: None)
    monkeypatch.setattr(layers, "compile_for", lambda traced, topology: program(2))
    for accumulation, is_idle in ((1, False), (4, True)):
        planned = workload(model, PairLengths.of_size(64), gradient_accumulation_steps=accumulation)
        layout = Layout(planned, parse_topology("v6e:1x1"), MeshShape(), Remat.FULL, 1)
        made = layers.compile_layout(layout, {}, None, None)
        assert made.arguments == program(2).arguments + is_idle * least_memory(layout).optimizer
