"""Optimizers on a mesh: their state is split like the weights, steps are one program, losses equal one device's.

An optimizer other than Adam makes its state in step 1, which costs a program more.

Compared with plain torch on one device over 8 steps, of which the first has a rate of 0 (warm-up). Tolerance 1e-5 in
float32: sums in another order, which Adagrad's first steps (a gradient by its own size) make larger than others do.
"""

import json
from math import prod
from typing import Any

import apart
import pytest

STATE = {"amsgrad": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, "lion": {"exp_avg"}}
MESH = {"fsdp": 4, "tensor": 2}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What happened on eight devices, and the losses on one."""
    folder = tmp_path_factory.mktemp("optimizers")
    found = []
    for name, environment in {
        "eight": {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"},
        "one": {"USE_TORCH_XLA": "0"},
    }.items():
        process = apart.run("optimizers.py", str(folder / name), *STATE, **environment)
        assert process.returncode == 0, process.stderr[-4000:]
        found.append(json.loads((folder / name).read_text()))
    return {name: found[0][name] | {"one": found[1][name]} for name in STATE}


@pytest.fixture
def result(results: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    return results[name]


every_optimizer = pytest.mark.parametrize("name", STATE)


@every_optimizer
def test_losses_are_those_of_one_device(result: dict[str, Any], name: str) -> None:
    losses = result["one"]["losses"]
    assert len(losses) == 8
    assert losses[0] > losses[-1] + 5e-3  # it trains
    assert result["losses"] == pytest.approx(losses, abs=1e-5)


@every_optimizer
def test_state_is_split_like_the_weights(result: dict[str, Any], name: str) -> None:
    before, after = result["state"]
    assert {tensor["kind"] for tensor in before} == (STATE[name] if name == "amsgrad" else set())
    assert {tensor["kind"] for tensor in after} == STATE[name]
    for tensor in [*before, *after]:
        axes = tensor["axes"]
        names = [each for part in axes if part for each in ([part] if isinstance(part, str) else part)]
        whole = prod(tensor["shape"])
        assert tensor["held"] == [whole // prod(MESH[each] for each in names)], tensor["name"]
        assert len(axes) == len(tensor["shape"])


@every_optimizer
def test_steps_compile_nothing_and_read_nothing_after_the_first(result: dict[str, Any], name: str) -> None:
    """A rate of 0 is the first step's; what makes its state there needs another program for the second.

    Such a first step is read, whether it is finite, before its update, which is then a program of its own.
    """
    compiles, reads = zip(*result["counts"], strict=True)
    makes_state = name != "amsgrad"
    assert compiles[1] - compiles[0] in ({1, 2} if makes_state else {1})
    assert compiles[2] - compiles[1] == makes_state
    assert compiles[-1] == compiles[2]
    assert reads[-1] == reads[3]  # what the test itself reads of the state, it reads before
