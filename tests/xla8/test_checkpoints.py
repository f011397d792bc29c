"""Checkpoints of a mesh: sharded, saved without compiling, resumed on the same mesh, others and plain torch."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import killed_runs
import pytest
import subprocesses
import tiny
from counters import CountSaves
from safetensors import safe_open
from training import differing, logged, trained

from trl_tpu import RewardTrainer
from trl_tpu.checkpoint.state_dict import to_host

MESH = "data=2,fsdp=2,tensor=2"
SETTINGS = {
    "max_steps": 8,
    "logging_steps": 3,
    "save_strategy": "steps",
    "save_steps": 2,
    "learning_rate": 1e-3,
    "bf16": False,
    "max_shapes": 1,  # a save executes the step before it, which compiles if its shape is new
}


@pytest.fixture(scope="module")
def uninterrupted_run(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> CountSaves:
    """Return an uninterrupted run on data=2,fsdp=2,tensor=2."""
    from trl_tpu import RewardConfig

    folder = tmp_path_factory.mktemp("whole")
    args = RewardConfig(str(folder), mesh=MESH, per_device_train_batch_size=2, report_to="none", **SETTINGS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # torch_xla's own way to read a shard warns
        trainer: CountSaves = trained(CountSaves(model_folder, args, train_dataset=tiny.made_up_pairs(64)))
    assert not trainer.checkpointer.failed
    return trainer


def test_save_compiles_nothing(uninterrupted_run: CountSaves) -> None:
    assert uninterrupted_run.compiles_of_saves == [0, 0, 0, 0]


def test_every_shard_is_written_once(uninterrupted_run: CountSaves) -> None:
    """Files hold shards of split weights, and every element exactly once."""
    elements: dict[str, int] = {}
    files = sorted((Path(uninterrupted_run.args.output_dir) / "checkpoint-2" / "state").iterdir())
    for file in files:
        with safe_open(file, framework="pt") as parts:
            for name in parts.keys():  # noqa: SIM118  # not a mapping
                elements[name] = elements.get(name, 0) + parts.get_tensor(name).numel()
    parameters = dict(uninterrupted_run.model.named_parameters())
    assert len(files) == 4  # fsdp x tensor; the other half of `data` has copies
    for name, parameter in parameters.items():
        assert elements[f"optimizer.{name}.exp_avg"] == parameter.numel(), name
    assert not any(name.startswith("model.") for name in elements)  # a single process writes them to model.safetensors
    with safe_open(files[0], framework="pt") as parts:
        largest = max(parameters, key=lambda name: parameters[name].numel())
        assert parts.get_tensor(f"optimizer.{largest}.exp_avg").numel() == parameters[largest].numel() // 4


def test_same_mesh_resumes_bitwise_in_the_same_layout(
    uninterrupted_run: CountSaves, model_folder: str, config: Callable[..., Any]
) -> None:
    args = config(mesh=MESH, **SETTINGS | {"per_device_train_batch_size": 2})
    trainer = RewardTrainer(model_folder, args, train_dataset=tiny.made_up_pairs(64))
    trainer.train(resume_from_checkpoint=f"{uninterrupted_run.args.output_dir}/checkpoint-4")
    assert differing(uninterrupted_run, trainer) == []
    assert logged(trainer) == logged(uninterrupted_run)
    layouts = [_layouts(each) for each in (uninterrupted_run, trainer)]
    assert layouts[0] == layouts[1]


@pytest.mark.parametrize(
    ("devices", "settings"),
    [
        pytest.param(4, {"mesh": "fsdp=4", "per_device_train_batch_size": 2}, marks=pytest.mark.long),
        (4, {"mesh": "fsdp=2,tensor=2", "per_device_train_batch_size": 4}),
        (0, {"per_device_train_batch_size": 8}),
    ],
    ids=["fsdp=4", "fsdp=2,tensor=2", "plain torch"],
)
def test_other_meshes_and_plain_torch_resume_up_to_rounding(
    uninterrupted_run: CountSaves, model_folder: str, tmp_path: Path, devices: int, settings: dict[str, Any]
) -> None:
    """Losses of about 0.5 differ by at most 1e-5: sums have another order over four steps of Adam."""
    environment = {"CPU_NUM_DEVICES": str(devices)} if devices else {"USE_TORCH_XLA": "0"}
    words = [
        model_folder,
        f"{uninterrupted_run.args.output_dir}/checkpoint-4",
        str(tmp_path),
        json.dumps(SETTINGS | settings),
    ]
    found = json.loads(subprocesses.run("resume_elsewhere.py", *words, **environment).stdout.splitlines()[-1])
    for ours, theirs in zip(logged(uninterrupted_run), found["logs"], strict=True):
        assert theirs == pytest.approx(ours, abs=1e-5, rel=1e-4), ours["step"]
    weights = to_host(dict(uninterrupted_run.model.named_parameters()), uninterrupted_run.trl_tpu.runtime)
    for name, total in found["sums"].items():
        assert total == pytest.approx(weights[name].double().abs().sum().item(), rel=1e-4), name


@pytest.mark.long
def test_killed_runs_on_a_mesh_resume_bitwise(tmp_path: Path) -> None:
    kills = 25
    settings = {"mesh": "fsdp=4,tensor=2", "per_device_train_batch_size": 1, "max_shapes": 1}
    report = killed_runs.report(tmp_path, kills, {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}, **settings)
    assert report["kills"] >= kills and report["saves_hit"] >= 1 and report["resumes"] >= 1, report


def _layouts(trainer: RewardTrainer) -> list[str]:
    import torch_xla

    parameters = list(trainer.model.parameters())
    state = trainer.optimizer.optimizer.state
    tensors = parameters + [state[parameter]["exp_avg"] for parameter in parameters]
    return [torch_xla._XLAC._get_xla_sharding_spec(tensor) for tensor in tensors]
