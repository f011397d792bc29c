"""A mesh over several processes of plain torch: what they compute, and count, is what one process does."""

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import apart
import numpy as np
import pytest
import ranks
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import trl_tpu
from trl_tpu.errors import UserError
from trl_tpu.parallel.mesh import parse_mesh

FEW = 4  # processes, of which tests by default start no more
Together = Callable[[int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where processes write to, with a language model in it."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig.from_pretrained(model_folder)).save_pretrained(folder / "causal")
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder / "causal")
    return folder


@pytest.fixture(scope="module")
def alone(model_folder: str, folder: Path) -> dict[str, Any]:
    apart.run("ranks.py", model_folder, str(folder), "1", USE_TORCH_XLA="0")
    return json.loads((folder / "alone of 1.json").read_text())


@pytest.fixture(scope="module")
def together(model_folder: str, folder: Path) -> Together:
    """Return what each of some processes gave, who are started once for all their ways."""

    @cache
    def of(count: int) -> list[dict[str, Any]]:
        commands = [("ranks.py", model_folder, str(folder), str(count), str(rank)) for rank in range(count)]
        apart.at_once(*commands, USE_TORCH_XLA="0")
        return [json.loads((folder / f"{rank} of {count}.json").read_text()) for rank in range(count)]

    return of


def test_new_heads_and_adapters_are_those_of_one_process(alone: dict[str, Any], together: Together) -> None:
    """A model by name, of which each process reads its part: what is drawn is drawn whole, to the bit."""
    one = alone["new"]
    assert [found["new"] for found in together(2)] == [one, one]
    assert {len(weights["score.weight"]) for weights in (one["plain"], one["steps"])} == {1, 2}
    assert any("lora_A" in name for name in one["adapters"])


def test_a_loop_of_ones_own_is_the_trainers(together: Together, folder: Path) -> None:
    """The processes compare; with a whole model in each, and with parts of one."""
    assert len(together(2)) == 2
    assert sorted(path.parent.parent.name for path in folder.glob("own loop/*/own/model.safetensors")) == [
        "None",
        "fsdp=2",
    ]


def in_time(ways: Any) -> list[Any]:
    """Mark those that start many processes."""
    return [pytest.param(way, marks=[pytest.mark.long] if ranks.WAYS[way][0] > FEW else []) for way in ways]


@pytest.mark.parametrize("way", in_time(ranks.WAYS))
def test_processes_with_a_mesh_give_what_one_gives(way: str, alone: dict[str, Any], together: Together) -> None:
    count, name, _ = ranks.WAYS[way]
    # in bfloat16 a row is rounded by what else is in it: a reward of 0.3 by 1e-3, and pairs as close change places
    only = {"loss", "eval_loss"} if name == "bf16" else None
    tolerance = 5e-3 if name == "bf16" else 1e-6
    for found in (each[way] for each in together(count)):
        assert len(found["logged"]) == len(alone[name]["logged"])
        for ours, reference in zip(found["logged"], alone[name]["logged"], strict=True):
            assert close(ours, reference, tolerance, only), (ours, reference)
        predictions = (np.array(each["predictions"]) for each in (found, alone[name]))
        assert next(predictions) == pytest.approx(next(predictions), abs=tolerance, nan_ok=True)
        assert f"Training on {count} processes" in found["described"]
        batches = found["described"].splitlines()[-1]
        assert "packed" in batches or "padded" in name or ("planned" in way and "is a stream" in batches)


def close(ours: dict[str, float], reference: dict[str, float], tolerance: float, only: set[str] | None = None) -> bool:
    """Compare logs, or some numbers of them; norms of gradients, which are of 1 and more, to 1e-5 of themselves."""
    return ours.keys() == reference.keys() and all(
        math.isclose(ours[key], value, abs_tol=tolerance, rel_tol=max(tolerance, 1e-5) if key == "grad_norm" else 0)
        for key, value in reference.items()
        if only is None or key in only
    )


def test_the_step_that_one_process_cannot_take_none_takes(alone: dict[str, Any], together: Together) -> None:
    assert [log["nonfinite"] for log in alone["not finite"]["logged"] if "nonfinite" in log][2] == 1
    for found in together(2):
        assert sum(log.get("nonfinite", 0) for log in found["not finite"]["logged"]) == 1


def test_the_start_log_says_what_is_spread(together: Together) -> None:
    described = together(2)[0]["fsdp=2"]["described"]
    assert "0.06 MiB of parameters per device, 0.11 MiB in all" in described
    assert "model.layers.*.mlp.up_proj.weight: [fsdp, null]" in described


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 8])
def test_processes_give_what_the_mesh_of_xla_gives(
    model_folder: str, folder: Path, together: Together, count: int
) -> None:
    """Losses of the same pairs; on XLA one process leads all devices."""
    devices = {"USE_TORCH_XLA": "1", "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(count)}
    apart.run("ranks.py", model_folder, str(folder), "1", **devices)
    on_xla = json.loads((folder / "alone on xla.json").read_text())["plain"]["logged"]
    ours = together(count)[0][f"fsdp={count}"]["logged"]
    losses = [[log[key] for log in logs for key in ("loss", "eval_loss") if key in log] for logs in (ours, on_xla)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_one_process_has_a_mesh_of_its_own_device(tmp_path: Path) -> None:
    args = trl_tpu.RewardConfig(str(tmp_path), use_cpu=True)
    assert (args.mesh, args.mesh_shape) == (None, parse_mesh("fsdp=-1", 1))
    with pytest.raises(UserError, match="fsdp=2"):
        trl_tpu.RewardConfig(str(tmp_path), use_cpu=True, mesh="fsdp=2")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"sharding_plan": "plan.yaml"}, "sharding_plan"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches"),
        ({"accelerator_config": {"use_seedable_sampler": False}}, "use_seedable_sampler"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy"),
        ({"bf16_full_eval": True}, "bf16_full_eval"),
    ],
)
def test_what_a_mesh_over_processes_cannot_honor_is_refused(
    settings: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl_tpu.RewardConfig, "world_size", 2)
    with pytest.raises(UserError, match=named):
        trl_tpu.RewardConfig(str(tmp_path), use_cpu=True, bf16=False, mesh="fsdp=2", **settings)


def test_a_model_that_was_read_wrongly_is_refused(alone: dict[str, Any], together: Together) -> None:
    """On torch 2.9; on newer ones it trains as what one process has does."""
    found = together(FEW)[0]["two cuts"]
    if "refused" in found:
        assert "fsdp_size=2, tp_size=2" in found["refused"] and "mesh=" in found["refused"]
    else:
        assert found["predictions"][0] == pytest.approx(alone["plain"]["predictions"][0], abs=1e-6)


def test_a_tensor_axis_through_a_head_is_refused(together: Together) -> None:
    assert "num_key_value_heads=2 / tensor=4" in together(FEW)[0]["tensor=4"]["refused"]
