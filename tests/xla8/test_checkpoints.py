"""Checkpoints of a mesh: sharded, saved without compiling, resumed on the same mesh, others and plain torch."""

import json
import warnings
from pathlib import Path
from typing import Any

import killed_runs
import pytest
import subprocesses
import tiny
import torch
from counters import CountSaves
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file
from training import differing, logged, state_of, trained, untimed
from transformers import AutoModelForSequenceClassification, TrainerCallback

from trl_tpu import RewardTrainer
from trl_tpu.checkpoint.state_dict import gather_full_weights, tensors_in, to_host, trained_weights, write_state
from trl_tpu.runtime import current

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


def test_save_compiles_nothing(whole: CountSaves, runs: dict[bool, CountSaves]) -> None:
    assert (whole.compiles_of_saves, runs[True].compiles_of_saves) == ([0] * 4, [0] * 2)


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


# ---- layers that run as a loop are stacked in memory, but saved separately


OF_SCANS: dict[str, Any] = {"mesh": "data=2,fsdp=2,tensor=2", "packing": False, "pad_to_multiple_of": 64}
OF_SCANS |= {"max_steps": 4, "logging_steps": 2, "save_strategy": "steps", "save_steps": 2}
OF_SCANS |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
OF_SCANS |= {"weight_decay": 0.1}  # applies to all but norms and biases


@pytest.fixture(scope="module")
def runs(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, CountSaves]:
    """Return runs of four steps with a checkpoint after two, without and with the loop."""
    from trl_tpu import RewardConfig

    made = {}
    for scan in (False, True):
        folder = str(tmp_path_factory.mktemp(f"scan-{scan}"))
        args = RewardConfig(folder, bf16=False, report_to="none", scan_layers=scan, learning_rate=1e-3, **OF_SCANS)
        made[scan] = CountSaves(model_folder, args, train_dataset=tiny.made_up_pairs(64))
        made[scan].train()
    return made


def test_checkpoints_name_every_layer_separately(runs: dict[bool, CountSaves]) -> None:
    states, exports = {}, {}
    for scan, trainer in runs.items():
        folder = Path(str(trainer.args.output_dir), "checkpoint-4")
        states[scan] = {name: tensor.shape for name, tensor in tensors_in(folder / "state").items()}
        exports[scan] = load_file(folder / "model.safetensors")
        for name, weight in state_of(trainer).items():
            assert " " in name or torch.equal(exports[scan][name], weight), name  # skips optimizer state
    assert states[True] == states[False]
    assert exports[True].keys() == exports[False].keys()
    assert any("optimizer.model.layers.1." in name and name.endswith(".exp_avg_sq") for name in states[True])


@pytest.mark.parametrize("scan", [True, False])
def test_scanned_and_unscanned_runs_resume_each_other(runs: Any, config: Any, model_folder: str, scan: bool) -> None:
    """Resumes are bitwise from the same kind of run.

    From the other kind, weights of about 1 differ by at most 1e-5: sums have another order over two steps of Adam.
    """
    for begun in (scan, not scan):
        args = config(scan_layers=scan, **OF_SCANS | {"save_strategy": "no"})
        resumed = RewardTrainer(model_folder, args, train_dataset=tiny.made_up_pairs(64))
        resumed.train(resume_from_checkpoint=f"{runs[begun].args.output_dir}/checkpoint-2")
        assert begun != scan or differing(resumed, runs[begun]) == []
        assert_close(state_of(resumed), state_of(runs[begun]))


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-4, msg=name)


class SavingCallback(TrainerCallback):
    """Saves the model between steps, as a user's callback may."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_step_end(self, _args: Any, state: Any, _control: Any, *, model: Any, **_: Any) -> None:
        if state.global_step == state.max_steps:
            current().step_boundary()  # otherwise each tensor would be computed separately, with different rounding
            state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
            model.save_pretrained(self._folder, state_dict=state)


def test_adapters_are_saved_by_layer_and_the_best_are_loaded(config: Any, model_folder: str, tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "greater_is_better": False}
    args = config(scan_layers=True, **OF_SCANS, metric_for_best_model="loss", **best)
    pairs = tiny.made_up_pairs(64)
    lora = LoraConfig(task_type="SEQ_CLS", r=4, target_modules="all-linear")
    data = {"train_dataset": pairs, "eval_dataset": pairs.select(range(16)), "peft_config": lora}
    trainer = RewardTrainer(model_folder, args, **data, callbacks=[SavingCallback(tmp_path / "elsewhere")])
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    folders = {name: tmp_path / name for name in ("saved", "checkpoint-4", "elsewhere", "checkpoint-2")}
    adapters = {name: load_file(folder / "adapter_model.safetensors") for name, folder in folders.items()}
    saved = adapters.pop("saved")
    assert any(".layers.1." in name and "lora_B" in name for name in saved)
    differing = {
        folder: [name for name, weight in saved.items() if not torch.equal(others[name], weight)]
        for folder, others in adapters.items()
        if others.keys() == saved.keys()
    }
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    assert differing.pop("checkpoint-2")
    assert differing == {"checkpoint-4": [], "elsewhere": []}
