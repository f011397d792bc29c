"""Checkpoints of a mesh: sharded, saved without compiling, resumed on the same mesh, others and plain torch."""

import json
import warnings
from pathlib import Path
from typing import Any

import killed_runs
import pytest
import subprocesses
import tiny
from counters import CountSaves
from safetensors import safe_open
from safetensors.torch import load_file
from training import differing, logged, trained, untimed
from transformers import AutoModelForSequenceClassification

from trl_tpu import RewardTrainer
from trl_tpu.checkpoint.state_dict import gather_full_weights, to_host, trained_weights, write_state

MESH = "data=2,fsdp=2,tensor=2"
SETTINGS = {"max_steps": 8, "logging_steps": 3, "save_strategy": "steps", "save_steps": 2, "total_batch_size": 8}
# a save executes the step before it, which compiles if its shape is new
SETTINGS |= {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "bf16": False, "max_shapes": 1}


@pytest.fixture(scope="module")
def whole(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> CountSaves:
    """Return an uninterrupted run on data=2,fsdp=2,tensor=2."""
    from trl_tpu import RewardConfig

    folder = tmp_path_factory.mktemp("whole")
    args = RewardConfig(str(folder), mesh=MESH, report_to="none", **SETTINGS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # torch_xla's own way to read a shard warns
        trainer: CountSaves = trained(CountSaves(model_folder, args, train_dataset=tiny.made_up_pairs(39)))
    assert not trainer.checkpointer.failed
    return trainer


def test_save_compiles_nothing(whole: CountSaves) -> None:
    assert whole.compiles_of_saves == [0, 0, 0, 0]


def test_every_shard_is_written_once(whole: CountSaves) -> None:
    """Files hold shards of split weights, and every element exactly once."""
    elements: dict[str, int] = {}
    files = sorted((Path(whole.args.output_dir) / "checkpoint-2" / "state").iterdir())
    for file in files:
        with safe_open(file, framework="pt") as parts:
            for name in parts.keys():  # noqa: SIM118  # not a mapping
                elements[name] = elements.get(name, 0) + parts.get_tensor(name).numel()
    parameters = dict(whole.model.named_parameters())
    assert len(files) == 4  # fsdp x tensor; the other half of `data` has copies
    for name, parameter in parameters.items():
        assert elements[f"optimizer.{name}.exp_avg"] == parameter.numel(), name
    assert not any(name.startswith("model.") for name in elements)  # a single process writes them to model.safetensors
    with safe_open(files[0], framework="pt") as parts:
        largest = max(parameters, key=lambda name: parameters[name].numel())
        assert parts.get_tensor(f"optimizer.{largest}.exp_avg").numel() == parameters[largest].numel() // 4


def test_same_mesh_resumes_bitwise_in_the_same_layout(whole: CountSaves, model_folder: str, config: Any) -> None:
    args = config(mesh=MESH, **SETTINGS | {"per_device_train_batch_size": 2})
    trainer = RewardTrainer(model_folder, args, train_dataset=tiny.made_up_pairs(39))
    trainer.train(resume_from_checkpoint=f"{whole.args.output_dir}/checkpoint-4")
    assert differing(whole, trainer) == []
    assert logged(trainer) == logged(whole)
    layouts = [_layouts(each) for each in (whole, trainer)]
    assert layouts[0] == layouts[1]


@pytest.mark.parametrize("mesh", [pytest.param("fsdp=4", marks=pytest.mark.long), "fsdp=2,tensor=2", None], ids=str)
def test_other_meshes_resume_up_to_rounding(whole: CountSaves, model_folder: str, tmp_path: Path, mesh: Any) -> None:
    """Losses of about 0.5 differ by at most 1e-5: sums have another order over four steps of Adam."""
    resume = {"output_dir": str(tmp_path), "resume": f"{whole.args.output_dir}/checkpoint-4"}
    environment = {"CPU_NUM_DEVICES": "4"} if mesh else {"USE_TORCH_XLA": "0"}
    settings = json.dumps(SETTINGS | resume | {"mesh": mesh})
    subprocesses.run("saved_ranks.py", model_folder, settings, **environment)
    logs = json.loads((tmp_path / "checkpoint-8" / "trainer_state.json").read_text())["log_history"]
    for ours, theirs in zip(logged(whole), map(untimed, logs), strict=True):
        assert theirs == pytest.approx(ours, abs=1e-5, rel=1e-4), ours["step"]
    weights = to_host(dict(whole.model.named_parameters()), whole.trl_tpu.runtime)
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        expected = weights[name].double().abs().sum().item()
        assert weight.double().abs().sum().item() == pytest.approx(expected, rel=1e-4), name


WITHOUT_XLA = """
import sys
assert "torch_xla" not in sys.modules
sys.modules["torch_xla"] = None  # as if it were not installed
from trl_tpu.cli import main
sys.exit(main(["export", *sys.argv[1:]]))
"""


def test_saves_from_the_devices_and_from_shards_equal_the_model(whole: CountSaves, tmp_path: Path) -> None:
    """The second is an export without torch_xla of a state as several hosts write it."""
    model, runtime = whole.model, whole.trl_tpu.runtime
    before = runtime.compile_count()
    whole.save_model(str(tmp_path / "live"))
    assert runtime.compile_count() == before
    expected = gather_full_weights(model, runtime, keeps=True)
    found = AutoModelForSequenceClassification.from_pretrained(tmp_path / "live", num_labels=1).state_dict()
    assert found.keys() == expected.keys() and all(expected[name].equal(found[name]) for name in found)

    model.save_pretrained(tmp_path / "sharded", state_dict={})
    weights = {f"model.{name}": tensor for name, tensor in trained_weights(model).items()}
    write_state(runtime.local_shards(weights), tmp_path / "sharded" / "state", runtime)
    assert len(list((tmp_path / "sharded" / "state").glob("*.safetensors"))) > 1
    subprocesses.run("-c", WITHOUT_XLA, str(tmp_path / "sharded"), str(tmp_path / "offline"), USE_TORCH_XLA="0")
    live, offline = (tmp_path / way / "model.safetensors" for way in ("live", "offline"))
    assert live.read_bytes() == offline.read_bytes()


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
