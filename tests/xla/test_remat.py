"""What layers compute again: counted in the optimised programs, in a process of its own that has them written."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TESTS = Path(__file__).parents[1]
CASES = ["llama:packed", "llama_lora:padded", "qwen3_moe:padded"]
POLICIES = ["none", "full", "dots"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("remat") / "out.json"
    runs = [f'{case}:{{"remat": "{policy}"}}' for case in CASES for policy in POLICIES]
    process = subprocess.run(
        [sys.executable, str(TESTS / "remat_programs.py"), str(out), *runs],
        env=os.environ | {"CPU_NUM_DEVICES": "1", "PYTHONPATH": str(TESTS.parent)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(out.read_text())


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
