"""A mesh over several processes of plain torch computes and counts the same as one process."""

import json
import math
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import recent_families
import shared_weights
import subprocesses
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import trl_tpu
from trl_tpu.errors import UserError
from trl_tpu.parallel.mesh import parse_mesh

FEW = 4  # maximum number of processes in tests that are not marked `long`
RunProcesses = Callable[[int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that processes write to, with a language model in it."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig.from_pretrained(model_folder)).save_pretrained(folder / "causal")
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.save_pretrained(folder / "causal")
    for family in ranks.FAMILIES:
        vocabulary = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), len(tokenizer))
        shared_weights.language_model(family, **vocabulary, pad_token_id=tokenizer.pad_token_id).save_pretrained(
            folder / family
        )
        tokenizer.save_pretrained(folder / family)
    shutil.copytree(folder / "causal", folder / "value head")
    head = {"v_head.summary.weight": torch.ones(1, LlamaConfig.from_pretrained(model_folder).hidden_size)}
    save_file(head, folder / "value head" / "value_head.safetensors")
    return folder


@pytest.fixture(scope="module")
def alone(model_folder: str, folder: Path) -> dict[str, Any]:
    subprocesses.run("ranks.py", model_folder, str(folder), "1", USE_TORCH_XLA="0")
    return json.loads((folder / "alone of 1.json").read_text())


@pytest.fixture(scope="module")
def run_processes(model_folder: str, folder: Path) -> RunProcesses:
    """Return a function that starts processes once and returns the results of each."""

    @cache
    def of(count: int) -> list[dict[str, Any]]:
        commands = [("ranks.py", model_folder, str(folder), str(count), str(rank)) for rank in range(count)]
        subprocesses.run_ranks(*commands, USE_TORCH_XLA="0")
        return [json.loads((folder / f"{rank} of {count}.json").read_text()) for rank in range(count)]

    return of


def test_new_heads_and_adapters_equal_those_of_one_process(alone: dict[str, Any], run_processes: RunProcesses) -> None:
    """Each process reads its shard of a named model. New weights are bitwise those drawn for the full model."""
    one = alone["new"]
    assert [found["new"] for found in run_processes(2)] == [one, one]
    assert {len(weights["score.weight"]) for weights in (one["plain"], one["steps"])} == {1, 2}
    assert any("lora_A" in name for name in one["adapters"])
    assert {*one["value head"]["score.weight"][0]} == {1.0}


def test_models_of_all_families_have_the_weights_of_one_process(tmp_path: Path) -> None:
    """All parameters and buffers, and the new head, of a model that is loaded by name on a mesh, or the rejection."""
    families = [*recent_families.SETTINGS, *recent_families.MULTIMODAL]
    commands = [("shared_weights.py", rank, str(tmp_path), *families) for rank in "01"]
    subprocesses.run_ranks(*commands, USE_TORCH_XLA="0")
    found = json.loads((tmp_path / "weights of 0.json").read_text())
    assert "rewards change by 100.0%" in found.pop("computed wrongly")["tensor=2"]
    errors = {(family, mesh): found[family].pop(mesh) for family in families for mesh in rejected_meshes(family)}
    assert found == {
        family: dict.fromkeys({*shared_weights.MESHES} - rejected_meshes(family), []) for family in families
    }
    assert all(re.search("share parameters|has no `tp_plan`|packed_rowwise", error) for error in errors.values())


def rejected_meshes(family: str) -> set[str]:
    if family in ("zamba", "zamba2"):  # their layers share parameters
        return {*shared_weights.MESHES}
    plan = recent_families.tiny_config(family).get_text_config().base_model_tp_plan or {}
    return set() if plan and "packed_rowwise" not in plan.values() else {"tensor=2"}


def test_own_loop_equals_the_trainer(run_processes: RunProcesses, folder: Path) -> None:
    """The processes themselves compare, with a replicated and with a sharded model."""
    assert len(run_processes(2)) == 2
    assert sorted(path.parent.parent.name for path in folder.glob("own loop/*/own/model.safetensors")) == [
        "None",
        "fsdp=2",
    ]


def mark_long(ways: Any) -> list[Any]:
    """Mark cases that start many processes as `long`."""
    return [pytest.param(way, marks=[pytest.mark.long] if ranks.WAYS[way][0] > FEW else []) for way in ways]


@pytest.mark.parametrize("way", mark_long(ranks.WAYS))
def test_mesh_over_processes_equals_one_process(way: str, alone: dict[str, Any], run_processes: RunProcesses) -> None:
    count, name, _ = ranks.WAYS[way]
    # in bfloat16 the rounding depends on the other tokens of a row: rewards of 0.3 differ by 1e-3, close pairs swap
    only = {"loss", "eval_loss"} if name == "bf16" else None
    tolerance = 5e-3 if name == "bf16" else 1e-6
    for found in (each[way] for each in run_processes(count)):
        assert len(found["logged"]) == len(alone[name]["logged"])
        for ours, reference in zip(found["logged"], alone[name]["logged"], strict=True):
            assert close(ours, reference, tolerance, only), (ours, reference)
        predictions = (np.array(each["predictions"]) for each in (found, alone[name]))
        assert next(predictions) == pytest.approx(next(predictions), abs=tolerance, nan_ok=True)
        assert f"Training on {count} processes" in found["described"]
        batches = found["described"].splitlines()[-1]
        assert "packed" in batches or "padded" in name or ("planned" in way and "is a stream" in batches)


def close(ours: dict[str, float], reference: dict[str, float], tolerance: float, only: set[str] | None = None) -> bool:
    """Compare logs, or the named values in them. Gradient norms are 1 or more, with a relative tolerance of 1e-5."""
    return ours.keys() == reference.keys() and all(
        math.isclose(ours[key], value, abs_tol=tolerance, rel_tol=max(tolerance, 1e-5) if key == "grad_norm" else 0)
        for key, value in reference.items()
        if only is None or key in only
    )


def test_nonfinite_step_on_one_rank_is_skipped_on_all(alone: dict[str, Any], run_processes: RunProcesses) -> None:
    assert [log["nonfinite"] for log in alone["not finite"]["logged"] if "nonfinite" in log][2] == 1
    for found in run_processes(2):
        assert sum(log.get("nonfinite", 0) for log in found["not finite"]["logged"]) == 1


def test_start_log_describes_the_sharding(run_processes: RunProcesses) -> None:
    described = run_processes(2)[0]["fsdp=2"]["described"]
    assert "0.06 MiB of parameters per device, 0.11 MiB in all" in described
    assert "model.layers.*.mlp.up_proj.weight: [fsdp, null]" in described


def test_single_process_has_a_one_device_mesh(tmp_path: Path) -> None:
    args = trl_tpu.RewardConfig(str(tmp_path), use_cpu=True)
    assert (args.mesh, args.mesh_shape) == (None, parse_mesh("fsdp=-1", 1))
    with pytest.raises(UserError, match="fsdp=2"):
        trl_tpu.RewardConfig(str(tmp_path), use_cpu=True, mesh="fsdp=2")


def test_unsupported_settings_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_tpu.RewardConfig, "world_size", 2)
    for name in ("split_batches", "use_seedable_sampler"):
        with pytest.raises(UserError, match=name):
            accelerates = {"accelerator_config": {name: name == "split_batches"}}
            trl_tpu.RewardConfig(str(tmp_path), use_cpu=True, bf16=False, mesh="fsdp=2", **accelerates)


def test_wrongly_loaded_two_axis_model_is_rejected(alone: dict[str, Any], run_processes: RunProcesses) -> None:
    """torch 2.9 loads it wrongly. With newer versions it trains like the model of one process."""
    found = run_processes(FEW)[0]["two cuts"]
    if "rejected" in found:
        assert "fsdp_size=2, tp_size=2" in found["rejected"] and "mesh=" in found["rejected"]
    else:
        assert found["predictions"][0] == pytest.approx(alone["plain"]["predictions"][0], abs=1e-6)


def test_tensor_axis_that_splits_a_head_is_rejected(run_processes: RunProcesses) -> None:
    assert "num_key_value_heads=2 / tensor=4" in run_processes(FEW)[0]["tensor=4"]["rejected"]
