"""On eight devices every layout trains like one device, with one program per batch shape and planned memory.

Five families on five meshes in four variants would be 100 runs of about 10 s. These cases cover every family and every
mesh axis; those marked `long` cover every variant and more combinations. Any other combination can be run by
`python tests/support/layouts.py OUT MODEL:MESH:VARIANT ...`.

The reference is plain torch on one device, with padded rows and no accumulation. The tolerance is 1e-5 over 6 steps of
Adam at a rate of 1e-3 in float32, since sums have another order. The losses fall from 0.7 to below 0.2.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import pytest
import subprocesses
from subprocesses import selected_cases

RUNS = [
    "llama:fsdp=4,tensor=2:padded+lion",  # creates its state in its first step
    "llama:data=2,fsdp=2,tensor=2:packed+accumulated",
    "llama_lora:fsdp=8:packed",
    "qwen3:slices=2,fsdp=4:padded+accumulated",
    "gemma3_text:fsdp=4,tensor=2:padded",
    "llama_grouped:fsdp=8:packed+accumulated+scanned",
    "llama:data=4,tensor=2:packed+accumulated+ranked",  # one update program for all losses
    "llama:data=2,fsdp=2,tensor=2:packed+attributes",
    "qwen3:data=2,fsdp=2,tensor=2:padded+steps",
]
LONG_RUNS = [
    "qwen3_moe:tensor=8:packed+accumulated",
    "llama_grouped:tensor=8:packed+expanded",
    "qwen3:data=2,fsdp=2,tensor=2:padded+dots+scanned",
    "llama:fsdp=8:packed+accumulated+scanned",
    "llama:fsdp=4,tensor=2:packed+expanded",
    "llama_grouped:data=2,fsdp=2,tensor=2:packed+expanded",
    "qwen3_moe:data=2,fsdp=2,tensor=2:packed",
    "llama_lora:fsdp=8:packed+accumulated+scanned",
]

OTHER_LOSSES = ("+lion", "+ranked", "+attributes", "+steps")

Results = dict[str, dict[str, Any]]
every_run = pytest.mark.parametrize("run", [*RUNS, *(pytest.param(run, marks=pytest.mark.long) for run in LONG_RUNS)])


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Results]:
    """Return the results of the selected runs on eight devices and on one, from two concurrent processes."""
    folder = tmp_path_factory.mktemp("layouts")
    runs = selected_cases(request, "run")
    one_device = sorted({on_one_device(run) for run in runs})
    with ThreadPoolExecutor() as pool:
        eight = pool.submit(train, folder / "eight.json", runs, PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8")
        one = pool.submit(train, folder / "one.json", one_device, USE_TORCH_XLA="0")
    return eight.result(), one.result()


def on_one_device(run: str) -> str:
    kind = next((kind for kind in OTHER_LOSSES if run.endswith(kind)), "")
    return f"{run.partition(':')[0]}:fsdp=-1:padded{kind}"


def train(out: Path, runs: list[str], **variables: str) -> Results:
    subprocesses.run("layouts.py", str(out), *runs, timeout=3000, **variables)
    return json.loads(out.read_text())


@pytest.fixture
def result(results: tuple[Results, Results], run: str) -> dict[str, Any]:
    found = results[0][run]
    assert "error" not in found, found["error"]
    return found


@every_run
def test_losses_equal_those_of_one_device(results: tuple[Results, Results], result: dict[str, Any], run: str) -> None:
    one = results[1][on_one_device(run)]
    assert "error" not in one, one["error"]
    assert len(one["losses"]) == 6
    assert one["losses"][0] > 0.6 > 2 * one["losses"][-1] or any(kind in run for kind in ("lora", *OTHER_LOSSES))
    assert result["losses"] == pytest.approx(one["losses"], abs=1e-5)
    assert result["evaluated"] == pytest.approx(one["evaluated"], abs=1e-5)


@every_run
def test_one_program_per_batch_shape_and_one_read_per_log(result: dict[str, Any], run: str) -> None:
    compiles, reads = zip(*result["counts"], strict=True)
    # extra programs: the update of several micro-batches, and the first read of optimizer state that is created
    more = {1, 2} if run.endswith("lion") else {int("accumulated" in run)}
    assert compiles[-1] - compiles[0] - result["shapes"] in more
    assert reads[2] == reads[0] + run.endswith("lion")
    assert reads[3] == reads[2] + 1  # the log at step 3
    assert reads[5] == reads[3]


@every_run
def test_devices_hold_no_more_of_a_tensor_than_planned(result: dict[str, Any], run: str) -> None:
    kinds = Counter(tensor["kind"] for tensor in result["tensors"] if tensor["trained"])
    weights = kinds["weight"]
    # gradient buffers exist if a step has several micro-batches, as packed rows of this length have
    takes_passes = "accumulated" in run or "padded" not in run
    gradients = {"gradient": weights} if takes_passes else {}
    moments = ["exp_avg", "exp_avg_sq"][: 1 if run.endswith("lion") else 2]
    assert kinds == dict.fromkeys(["weight", *moments], weights) | gradients
    assert {tensor["kind"] for tensor in result["tensors"] if not tensor["trained"]} <= {"weight"}
    for tensor in result["tensors"]:
        assert tensor["shards"] == [tensor["planned"]] * 8, tensor["name"]
        assert tensor["spec"] == tensor["spec of the weight"], tensor["name"]
    mesh = axis_sizes(run)
    parts = mesh.get("fsdp", 1) * mesh.get("tensor", 1)
    # except norms, routers and inner dimensions of adapters, which `tensor` replicates
    large = [tensor for tensor in result["tensors"] if tensor["whole"] > 4 * 56 * 56 and "lora" not in tensor["name"]]
    assert large
    for tensor in large:
        assert tensor["planned"] * parts == tensor["whole"], tensor["name"]


def axis_sizes(run: str) -> dict[str, int]:
    return {axis: int(size) for axis, size in (part.split("=") for part in run.split(":")[1].split(","))}


# ---- collectives


def explain(collective: dict[str, Any], tokens: int) -> str | None:
    """Return the reason for a collective. In `layouts.py` only feature dimensions are multiples of 7."""
    axes, kind = set(collective["axes"]), collective["kind"]
    shape = max(collective["shapes"], key=prod)
    elements = sum(map(prod, collective["shapes"]))
    features = sum(size % 7 == 0 for size in shape)
    is_weight = features >= 2 or 328 in shape  # the vocabulary
    if features == 0 and elements <= tokens:
        return "ids, masks and sums"
    if features == 0 and len(shape) == 3 and elements <= shape[-1] * tokens:
        return "scores of all tokens of packed rows"
    if not is_weight and (len(shape) == 1 or elements <= 8 * 56):
        return "vectors, routers and the score head"
    if len(shape) == 3 and shape[-2:] in ([2, 56], [4, 56], [5, 56]):
        return "hidden states at the last tokens of pairs, of four answers or of five steps"
    reasons: dict[str, Callable[[], bool]] = {
        "weights for use": lambda: is_weight and kind == "all-gather" and axes == {"fsdp"},
        "gradients of weights": lambda: is_weight and kind == "all-reduce" and axes <= {"data", "fsdp"},
        "sums over heads and features": lambda: not is_weight and kind == "all-reduce" and axes == {"tensor"},
        "embeddings for rows": lambda: not is_weight and kind == "all-to-all" and axes == {"fsdp"},
        "heads for whole keys": lambda: len(shape) == 4 and 14 in shape and axes == {"tensor"},
        "embeddings made whole": lambda: not is_weight and kind == "all-gather" and axes == {"tensor"},
    }
    return next((reason for reason, holds in reasons.items() if holds()), None)


@every_run
def test_collectives_gather_neither_activations_nor_logits(result: dict[str, Any], run: str) -> None:
    assert not [size for size in result["sizes"] if size % 7 == 0]
    found: dict[str | None, list[Any]] = defaultdict(list)
    for collective in result["collectives"]:
        found[explain(collective, result["tokens"])].append(collective)
    assert not found.pop(None, [])
    mesh = axis_sizes(run)
    expected = {"weights for use", "gradients of weights", "embeddings for rows"} if "fsdp" in mesh else set()
    expected |= {"sums over heads and features", "embeddings made whole"} if "tensor" in mesh else set()
    expected |= {"gradients of weights"} if "data" in mesh or "slices" in mesh else set()
    assert expected <= set(found)
    # if `tensor` exceeds the key heads, each device attends with all heads: gathers queries and outputs in each layer
    assert len(found["heads for whole keys"]) == (4 if run == "llama_grouped:tensor=8:packed+expanded" else 0)
    # embedding lookup in the sharded table: once in the forward, and in the backward if it is trained
    assert len(found["embeddings for rows"]) <= 2
    assert len(found["embeddings made whole"]) <= 1
