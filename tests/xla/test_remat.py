"""What layers compute again: counted in the optimised programs, in a process of its own that has them written."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from chosen import chosen

CASES = [
    "llama:packed",
    *(pytest.param(case, marks=pytest.mark.long) for case in ("llama_lora:padded", "qwen3_moe:padded")),
]
POLICIES = ["none", "full", "dots"]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, steps_apart: Callable[[Sequence[str]], dict[str, Any]]) -> dict[str, Any]:
    """What one step gave, by case and policy, of the cases that were chosen."""
    runs = [f'{case}:{{"remat": "{policy}"}}' for case in chosen(request, "case") for policy in POLICIES]
    return steps_apart(runs)


@pytest.mark.parametrize("case", CASES)
def test_full_multiplies_again_and_dots_does_not(results: dict[str, Any], case: str) -> None:
    none, full, dots = (results[f'{case}:{{"remat": "{policy}"}}'] for policy in POLICIES)
    layers, dots_a_layer = 2, 5  # at least: XLA merges some products of the same factor, such as queries and keys
    assert full["dots"] >= none["dots"] + layers * dots_a_layer
    assert dots["dots"] == none["dots"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", ["full", "dots"])
def test_gradients_do_not_depend_on_what_is_kept(results: dict[str, Any], case: str, policy: str) -> None:
    none, other = (results[f'{case}:{{"remat": "{name}"}}'] for name in ("none", policy))
    assert other["loss"] == pytest.approx(none["loss"], abs=1e-6)
    assert other["gradients"].keys() == none["gradients"].keys()
    for name, gradient in none["gradients"].items():
        assert np.abs(gradient).max() > 0, name
        # differences of float32 weights around 1
        np.testing.assert_allclose(other["gradients"][name], gradient, atol=1e-6, rtol=1e-5, err_msg=name)
