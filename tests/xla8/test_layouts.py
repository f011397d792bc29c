"""On eight devices every layout trains like one device, in one program a batch shape, holding no more than planned.

Five families on five meshes in four variants are 100 runs of some 10 s. These cover every family and every axis of a
mesh; those marked `long` cover every variant and more combinations, and
`python tests/support/layouts.py OUT MODEL:MESH:VARIANT ...` runs any other.

The losses are compared with plain torch on one device, with padded rows and no accumulation. Tolerance 1e-5 over 6
steps of Adam at a rate of 1e-3 in float32: sums in another order. The losses themselves fall from 0.7 to below 0.2.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import apart
import pytest
from chosen import chosen

RUNS = [
    "llama:fsdp=4,tensor=2:padded+lion",  # which makes its state in its first step
    "llama:data=2,fsdp=2,tensor=2:packed+accumulated",
    "llama_lora:fsdp=8:packed",
    "qwen3:slices=2,fsdp=4:padded+accumulated",
    "gemma3_text:fsdp=4,tensor=2:padded",
    "llama_grouped:fsdp=8:packed+accumulated+scanned",
    "llama:data=4,tensor=2:packed+accumulated+ranked",  # a mesh of its own: an update is one program for all losses
    "llama:data=2,fsdp=2,tensor=2:packed+attributes",
    "qwen3:data=2,fsdp=2,tensor=2:padded+steps",
]
LONG_RUNS = [
    "qwen3:data=2,fsdp=2,tensor=2:packed+steps",
    "llama:data=2,fsdp=2,tensor=2:padded+attributes",
    "qwen3:fsdp=8:padded+ranked",
    "qwen3_moe:tensor=8:packed+accumulated",
    "llama_grouped:tensor=8:packed+expanded",
    "qwen3:data=2,fsdp=2,tensor=2:padded+dots+scanned",
    "llama:fsdp=8:packed+accumulated+scanned",
    "llama:fsdp=4,tensor=2:packed+expanded",
    "llama_grouped:data=2,fsdp=2,tensor=2:packed+expanded",
    "qwen3:tensor=8:padded",
    "gemma3_text:fsdp=8:packed+accumulated",
    "qwen3_moe:data=2,fsdp=2,tensor=2:packed",
    "llama_lora:tensor=8:padded",
    "llama_lora:fsdp=8:packed+accumulated+scanned",
]

OTHER_LOSSES = ("+lion", "+ranked", "+attributes", "+steps")

Results = dict[str, dict[str, Any]]
every_run = pytest.mark.parametrize("run", [*RUNS, *(pytest.param(run, marks=pytest.mark.long) for run in LONG_RUNS)])


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Results]:
    """What happened on eight devices and on one in the runs that were chosen, side by side in two processes."""
    folder = tmp_path_factory.mktemp("layouts")
    runs = chosen(request, "run")
    one_device = sorted({on_one_device(run) for run in runs})
    with ThreadPoolExecutor() as pool:
        eight = pool.submit(train, folder / "eight.json", runs, PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8")
        one = pool.submit(train, folder / "one.json", one_device, USE_TORCH_XLA="0")
    return eight.result(), one.result()


def on_one_device(run: str) -> str:
    kind = next((kind for kind in OTHER_LOSSES if run.endswith(kind)), "")
    return f"{run.partition(':')[0]}:fsdp=-1:padded{kind}"


def train(out: Path, runs: list[str], **variables: str) -> Results:
    apart.run("layouts.py", str(out), *runs, timeout=3000, **variables)
    return json.loads(out.read_text())


@pytest.fixture
def result(results: tuple[Results, Results], run: str) -> dict[str, Any]:
    found = results[0][run]
    assert "error" not in found, found["error"]
    return found


@every_run
def test_losses_are_those_of_one_device(results: tuple[Results, Results], result: dict[str, Any], run: str) -> None:
    one = results[1][on_one_device(run)]
    assert "error" not in one, one["error"]
    assert len(one["losses"]) == 6
    assert one["losses"][0] > 0.6 > 2 * one["losses"][-1] or any(kind in run for kind in ("lora", *OTHER_LOSSES))
    assert result["losses"] == pytest.approx(one["losses"], abs=1e-5)
    assert result["evaluated"] == pytest.approx(one["evaluated"], abs=1e-5)


@every_run
def test_one_program_a_batch_shape_and_one_read_a_log(result: dict[str, Any], run: str) -> None:
    compiles, reads = zip(*result["counts"], strict=True)
    # the update of several micro-batches is its own program; so is one that is read before it, of a state to be made
    more = {1, 2} if run.endswith("lion") else {int("accumulated" in run)}
    assert compiles[-1] - compiles[0] - result["shapes"] in more
    assert reads[2] == reads[0] + run.endswith("lion")
    assert reads[3] == reads[2] + 1  # step 3 logs
    assert reads[5] == reads[3]


@every_run
def test_no_device_holds_more_of_a_tensor_than_planned(result: dict[str, Any], run: str) -> None:
    kinds = Counter(tensor["kind"] for tensor in result["tensors"] if tensor["trained"])
    weights = kinds["weight"]
    # buffers of gradients, where a step takes several passes: micro-batches, or packed rows of this length
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
    # but for norms, routers and the inner halves of adapters, which `tensor` leaves whole
    large = [tensor for tensor in result["tensors"] if tensor["whole"] > 4 * 56 * 56 and "lora" not in tensor["name"]]
    assert large
    for tensor in large:
        assert tensor["planned"] * parts == tensor["whole"], tensor["name"]


def axis_sizes(run: str) -> dict[str, int]:
    return {axis: int(size) for axis, size in (part.split("=") for part in run.split(":")[1].split(","))}


# ---- what the devices say to each other


def explain(collective: dict[str, Any], tokens: int) -> str | None:
    """Why a collective is there, by the rule of `layouts`: features are multiples of 7, and nothing else is."""
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
def test_no_activation_is_gathered_over_fsdp_and_no_logits_anywhere(result: dict[str, Any], run: str) -> None:
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
    # where `tensor` is more than the key heads, each device attends with all: queries there and outputs, twice a layer
    assert len(found["heads for whole keys"]) == (4 if run == "llama_grouped:tensor=8:packed+expanded" else 0)
    # the table is looked up where it lies: once forward, and back where it is trained
    assert len(found["embeddings for rows"]) <= 2
    assert len(found["embeddings made whole"]) <= 1
