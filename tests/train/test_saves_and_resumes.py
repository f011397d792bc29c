"""Real failing saves, overridden saves, resumes, and checkpoints that must be rejected, in plain torch."""

import copy
import json
import os
import pickle
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import checkpoints
import fsspec
import pytest
import tiny
import torch
from accelerate.state import GradientState
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save_file
from training import At, trained
from transformers import AutoModelForSequenceClassification, TrainerCallback

from trl_tpu import RewardConfig, RewardTrainer, score
from trl_tpu.checkpoint import folders
from trl_tpu.checkpoint.folders import MANIFEST_FILE, RemoteRun, find_faults
from trl_tpu.errors import BEST_LOST, NOT_SAVED, UserError
from trl_tpu.scripts import reward, synthetic
from trl_tpu.training import saving as saving_trainer


class Runs(NamedTuple):
    """Builds trainers of 64 pairs, by default of one model in one folder."""

    model: str
    folder: Path

    def make(self, name: str = "", model: Any = None, kind: Any = RewardTrainer, **given: Any) -> Any:
        """Build a trainer; ``name`` is a subfolder, a path or a URL, ``given`` holds arguments and settings."""
        names = given.keys() & {"callbacks", "optimizer_cls_and_kwargs", "peft_config"}
        arguments = {name: given.pop(name) for name in names}
        defaults = {"max_steps": 6, "save_steps": 2, "logging_steps": 3, "learning_rate": 1e-3, "report_to": "none"}
        defaults |= {"per_device_train_batch_size": 2, "disable_tqdm": True}
        args = RewardConfig(name if "/" in name else str(self.folder / name), **(defaults | given))
        data = {"train_dataset": tiny.made_up_pairs(64), "eval_dataset": tiny.made_up_pairs(8)}
        return kind(model or self.model, args, **data, **arguments)

    def train(self, *given: Any, resume: Any = None, **settings: Any) -> RewardTrainer:
        """Build a trainer and train it."""
        return trained(self.make(*given, **settings), resume)


@pytest.fixture
def runs(model_folder: str, tmp_path: Path) -> Runs:
    return Runs(model_folder, tmp_path)


@pytest.fixture(scope="module")
def run(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> RewardTrainer:
    """Return a trainer that has saved checkpoints 2, 4 and 6."""
    return Runs(model_folder, tmp_path_factory.mktemp("run")).train()


@pytest.fixture
def checkpoint(run: RewardTrainer, tmp_path: Path) -> Path:
    """Return a copy of checkpoint 4 for tests that change it."""
    return Path(shutil.copytree(f"{run.args.output_dir}/checkpoint-4", tmp_path / "copy" / "checkpoint-4"))


def assert_same(one: RewardTrainer, other: RewardTrainer) -> None:
    """Check that the weights of two trainers are bitwise equal."""
    for (name, weight), same in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        assert torch.equal(weight, same), name


# ---- contents of a checkpoint


def test_checkpoint_with_overridden_saves_resumes_bitwise(runs: Runs) -> None:
    """Resumes are exact although the subclass saves the weights in half precision.

    torch's Adafactor creates its state in step 1: sums of rows and columns, with other shapes than the parameters.
    """
    own = {"kind": checkpoints.OverriddenSaves, "optimizer_cls_and_kwargs": (torch.optim.Adafactor, {"lr": 1e-2})}
    whole = runs.train(**own)
    whole.save_model()
    checkpoints.check_overridden_saves(runs.folder, "checkpoint-4")
    assert_same(whole, runs.train("resumed", **own, resume=str(runs.folder / "checkpoint-4")))


def test_user_files_in_a_checkpoint_are_not_read_as_weights(run: RewardTrainer, checkpoint: Path, runs: Runs) -> None:
    """The files hold tensors of the same or other names, and are listed before and after the model's file."""
    weights = load_file(checkpoint / "model.safetensors")
    (state,) = (checkpoint / "state").iterdir()
    assert all(name.startswith("optimizer.") for name in load_file(state)), "weights are saved once"
    zeros = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for number in range(16):
        save_file(zeros | {"of another": torch.zeros(1)}, checkpoint / f"average-{number}.safetensors")
    resumed = runs.train("resumed", resume=str(checkpoint))
    assert_same(run, resumed)


class ProjectedSGD(torch.optim.SGD):
    """Keeps an object in its state, like GaLore."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["projector"] = torch.nn.Identity()
        return super().step(closure)


def test_adapters_of_any_name_are_saved_as_by_peft_and_resume(runs: Runs) -> None:
    def adapted() -> Any:
        torch.manual_seed(0)
        base = AutoModelForSequenceClassification.from_pretrained(runs.model, num_labels=1)
        model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=4), adapter_name="first")
        model.add_adapter("second", LoraConfig(task_type="SEQ_CLS", r=2))
        return model

    whole, resumed = (runs.make(name, adapted()) for name in ("whole", "resumed"))
    whole.train()
    resumed.train(resume_from_checkpoint=str(runs.folder / "whole" / "checkpoint-4"))
    assert_same(whole, resumed)
    (state,) = (runs.folder / "whole" / "checkpoint-4" / "state").iterdir()
    assert all("lora" in name or "score" in name for name in load_file(state))
    resumed.save_model()
    whole.model.save_pretrained(runs.folder / "peft")
    for saved in (runs.folder / "whole" / "checkpoint-6", runs.folder / "resumed"):
        for name in ("first", "second"):
            assert (saved / name / "adapter_config.json").is_file()
            ours, theirs = (load_file(at / name / "adapter_model.safetensors") for at in (saved, runs.folder / "peft"))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_optimizer_with_object_state_saves_only_the_model(runs: Runs) -> None:
    sgd: Any = {"optimizer_cls_and_kwargs": (ProjectedSGD, {}), "max_steps": 2}
    trainer, checkpoint = runs.train(**sgd), runs.folder / "checkpoint-2"
    assert trainer.trl_tpu.checkpointer.failed == [str(checkpoint)] and not checkpoint.exists()
    alone = runs.train("alone", save_only_model=True, **sgd)
    assert alone.trl_tpu.checkpointer.failed == [] and find_faults(runs.folder / "alone" / "checkpoint-2") == []


def test_finished_run_takes_no_further_step(run: RewardTrainer, runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    """transformers would take and save a seventh step of six."""
    shutil.copytree(f"{run.args.output_dir}/checkpoint-6", runs.folder / "checkpoint-6")
    for resume, settings in ((True, {}), (None, {"resume_from_checkpoint": "auto"})):
        resumed = runs.make(**settings)
        result = resumed.train(resume_from_checkpoint=resume)
        assert resumed.state.global_step == result.global_step == 6
        assert [path.name for path in runs.folder.glob("checkpoint-*")] == ["checkpoint-6"]
        assert_same(run, resumed)
        assert f"Resuming from {runs.folder}/checkpoint-6, at step 6 of 6: the run is finished already" in caplog.text
        caplog.clear()


# ---- the run that owns a folder


def test_new_run_in_an_old_runs_folder_is_the_one_resumed(run: RewardTrainer, runs: Runs) -> None:
    """The older run has more steps, so its checkpoint would look like the end of the new run."""
    shutil.copytree(f"{run.args.output_dir}/checkpoint-6", runs.folder / "checkpoint-6")
    new = runs.make(seed=7)
    new.add_callback(At("on_step_end", 3, lambda: setattr(new.control, "should_training_stop", True)))
    new.train()
    assert [path.name for path in runs.folder.glob("checkpoint-*")] == ["checkpoint-2"]
    resumed = runs.train(seed=7, resume=True)
    assert [log["step"] for log in resumed.state.log_history if "loss" in log] == [3, 6]
    whole = runs.train("whole", seed=7)
    assert torch.equal(resumed.model.score.weight, whole.model.score.weight)
    (older,) = runs.folder.glob("_earlier/*/checkpoint-6")
    assert find_faults(older) == []


def test_run_stopped_before_its_first_checkpoint_restarts(runs: Runs) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runs.train(callbacks=[At("on_step_end", 1, interrupt)])
    again = runs.train(resume=True)
    assert again.state.global_step == 6
    with pytest.raises(ValueError, match="resume_from_checkpoint"):  # no run has started in this folder
        runs.train("elsewhere", resume=True)


def test_changed_settings_are_named_and_used(run: RewardTrainer, caplog: pytest.LogCaptureFixture, runs: Runs) -> None:
    shutil.copytree(f"{run.args.output_dir}/checkpoint-4", runs.folder / "checkpoint-4")
    changed = {"learning_rate": 5e-4, "weight_decay": 0.1, "adam_beta2": 0.9, "center_rewards_coefficient": 0.1}
    with pytest.raises(UserError, match="learning_rate was .*weight_decay was"):
        runs.train(**changed, resume="auto")
    with pytest.raises(UserError, match="the model was .* and is another"):
        runs.train(model=str(shutil.copytree(runs.model, runs.folder / "another")), resume="auto")
    resumed = runs.train(**changed, resume=True)
    assert all(f"{name} was {getattr(run.args, name)}" in caplog.text for name in changed)
    assert resumed.state.log_history[-2]["learning_rate"] == pytest.approx(5e-4 / 6)
    group = resumed.optimizer.param_groups[0]
    assert group["betas"] == (0.9, 0.9) and group["weight_decay"] == 0.1


NO_STEPS = [{"dataloader_drop_last": True, "per_device_train_batch_size": 100}, {"max_steps": 0}, {}]


@pytest.mark.parametrize("settings", NO_STEPS)
def test_training_without_a_step_is_not_a_success(settings: Any, runs: Runs) -> None:
    trainer = runs.make(**settings)
    if not settings:
        trainer.train_dataset = trainer.train_dataset.to_iterable_dataset().filter(lambda row: False)
    with pytest.raises(ValueError, match="max_steps"):
        trainer.train()


# ---- the best model

BEST = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
# the first evaluation is the best
BEST |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}


def assert_best(trainer: RewardTrainer, checkpoint: Path) -> None:
    best = load_file(checkpoint / "model.safetensors")
    assert trainer.trl_tpu.best_model_lost is None
    assert torch.equal(best["score.weight"], trainer.model.score.weight.cpu())


def test_best_model_is_found_after_the_folder_moved(monkeypatch: pytest.MonkeyPatch, runs: Runs) -> None:
    monkeypatch.chdir(runs.folder)
    runs.train("./out//", max_steps=4, **BEST | {"load_best_model_at_end": False})
    (runs.folder / "out").rename(runs.folder / "moved")
    (runs.folder / "out").mkdir()
    resumed = runs.train("moved", **BEST, resume=True)
    assert [path.name for path in (runs.folder / "moved").glob("checkpoint-*")] == ["checkpoint-2"]
    assert_best(resumed, runs.folder / "moved" / "checkpoint-2")


def test_best_models_config_has_its_own_reward_scale(runs: Runs) -> None:
    trainer = runs.train(max_steps=4, **BEST)
    trainer.save_model()
    of_best, of_last = (row for row in trainer.state.log_history if "eval_mean_reward" in row)
    config = json.loads((runs.folder / "config.json").read_text())
    saved = json.loads((runs.folder / "checkpoint-2" / "config.json").read_text())
    for key in ("mean", "std", "problem_type", "sentence_transformers", "rope_theta"):
        assert saved[key] == config[key]
    assert config["mean"] == pytest.approx(of_best["eval_mean_reward"]) != of_last["eval_mean_reward"]
    trainer.create_model_card()
    assert f"mean of {config['mean']:.4g}" in (runs.folder / "README.md").read_text()


@pytest.mark.parametrize("how", ["flipped", "removed"])
def test_damaged_best_model_is_not_loaded(how: str, runs: Runs) -> None:
    def spoil() -> None:
        weights = runs.folder / "checkpoint-2" / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-2] ^= 0x40
        weights.write_bytes(content) if how == "flipped" else shutil.rmtree(weights.parent)

    trainer = runs.train(callbacks=[At("on_step_end", 6, spoil)], **BEST)
    assert trainer.trl_tpu.best_model_lost is not None and "checkpoint-2" in trainer.trl_tpu.best_model_lost
    last = load_file(runs.folder / "checkpoint-6" / "model.safetensors")
    assert torch.equal(last["score.weight"], trainer.model.score.weight.cpu())


def test_best_adapters_of_model_only_saves_are_loaded(runs: Runs, caplog: pytest.LogCaptureFixture) -> None:
    """Resuming from such a checkpoint logs what is missing."""
    lora = LoraConfig(task_type="SEQ_CLS", r=2, target_modules="all-linear")
    bare: Any = {"peft_config": lora, "save_only_model": True}
    trainer, last = runs.train(**bare, **BEST | {"save_total_limit": None}), runs.folder / "checkpoint-6"
    assert trainer.trl_tpu.best_model_lost is None
    best = load_file(runs.folder / "checkpoint-2" / "adapter_model.safetensors")
    own = {name: weight for name, weight in trainer.model.state_dict().items() if "lora_B" in name}
    assert own and all(torch.equal(best[name.replace(".default", "")], weight.cpu()) for name, weight in own.items())
    assert (last / "adapter_model.safetensors").is_file() and not (last / "state").exists() and find_faults(last) == []
    assert runs.train(**bare, max_steps=8, resume=str(last)).state.global_step == 8 and "checkpoint-6" in caplog.text


def test_best_model_of_the_resumed_run_is_preferred(run: RewardTrainer, runs: Runs) -> None:
    """The best model of another run, with the same name, is moved away and not used."""
    all_stay = BEST | {"load_best_model_at_end": False, "save_total_limit": None}
    runs.train("one", max_steps=4, **all_stay)
    shutil.copytree(f"{run.args.output_dir}/checkpoint-2", runs.folder / "two" / "checkpoint-2")
    resumed = runs.train("two", **BEST, resume=str(runs.folder / "one" / "checkpoint-4"))
    assert_best(resumed, runs.folder / "one" / "checkpoint-2")


# ---- saves that fail


@pytest.fixture
def limit_files() -> Iterator[Callable[..., None]]:
    """Return a function that limits file sizes, as on a full disk; a call without a number removes the limit."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size=before: resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


@pytest.mark.parametrize("size", [2_000, 20_000, 200_000], ids=["before", "during training", "optimizer"])
def test_full_disk_is_reported(size: int, limit_files: Any, caplog: pytest.LogCaptureFixture, runs: Runs) -> None:
    """There is space for no file, for the files written before training continues, or for these and the weights."""
    found = []

    class Watches(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            limit_files()  # training has waited for the save because of this callback
            found.append(find_faults(runs.folder / f"checkpoint-{state.global_step}") == [])

    trainer = runs.train(callbacks=[At("on_step_end", 4, lambda: limit_files(size)), Watches()])
    assert trainer.state.global_step == 6
    assert trainer.trl_tpu.checkpointer.failed == [str(runs.folder / "checkpoint-4")] and found == [True, False, True]
    assert sorted(path.name for path in runs.folder.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-6"]
    assert not (runs.folder / "_unfinished").exists()  # partial files are removed
    assert "checkpoint-4" in caplog.text


def test_unwritable_folder_is_reported_and_training_continues(runs: Runs) -> None:
    (runs.folder / "_unfinished").write_text("a file where a folder has to be")
    (runs.folder / "README.md").mkdir()  # the model card cannot be written, either
    trainer = runs.train()
    assert trainer.state.global_step == 6 and len(trainer.trl_tpu.checkpointer.failed) == 3


def test_model_save_without_disk_space_keeps_the_old_files(run: RewardTrainer, limit_files: Any, runs: Runs) -> None:
    run.save_model(str(runs.folder / "saved"))
    before = {path.name: path.read_bytes() for path in (runs.folder / "saved").iterdir()}
    other = runs.make("other")
    limit_files(20_000)
    with pytest.raises((OSError, SafetensorError)):
        other.save_model(str(runs.folder / "saved"))
    limit_files()
    assert {path.name: path.read_bytes() for path in (runs.folder / "saved").iterdir()} == before


@pytest.mark.parametrize("own", ["", "# Mine"])
def test_saved_adapters_have_the_users_card_or_ours(own: str, runs: Runs) -> None:
    """peft's stub card overwrites the user's, and its local base model is rejected by the Hub."""
    out, other = runs.folder / "out", runs.folder / "other"
    for folder in (out, other) if own else ():
        folder.mkdir()
        (folder / "README.md").write_text(own)
    if not own:
        model = AutoModelForSequenceClassification.from_pretrained(runs.model, num_labels=1)
        get_peft_model(model, LoraConfig(task_type="SEQ_CLS")).save_pretrained(other)  # with peft's stub card
    trainer = runs.train("out", max_steps=2, peft_config=LoraConfig(task_type="SEQ_CLS", r=2))
    for place in (None, str(other), str(runs.folder / "new")):
        trainer.save_model(place)
    for folder in (out, other, runs.folder / "new", out / "checkpoint-2"):
        card = (folder / "README.md").read_text()
        assert card == own if own else "reward-trainer" in ModelCard(card).data.tags, folder
        assert ModelCard(card).data.base_model is None and "More Information Needed" not in card
    trainer.create_model_card("second")
    assert ("# second" in (out / "README.md").read_text()) == (not own)  # a generated card is generated again


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda trainer: pickle.loads(pickle.dumps(trainer))])
def test_copied_trainer_trains_independently(copied: Callable[[RewardTrainer], RewardTrainer], runs: Runs) -> None:
    """As with TRL's trainer. After training, accelerate holds objects that can be copied but not pickled."""
    model = AutoModelForSequenceClassification.from_pretrained(runs.model, num_labels=1)
    GradientState._reset_state()
    trainer = runs.make("", model)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    other = copied(trainer)
    other.train()
    assert other.state.global_step == 6 and find_faults(runs.folder / "checkpoint-6") == []
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.model.state_dict().items())
    assert not torch.equal(other.model.score.weight, before["score.weight"])
    # the copy's weights may be aligned otherwise, and kernels may then add in another order
    assert copy.deepcopy(other).evaluate()["eval_loss"] == pytest.approx(other.evaluate()["eval_loss"], abs=1e-6)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


def test_adapters_on_a_checkpoint_train_in_another_folder(run: RewardTrainer, runs: Runs) -> None:
    out = Path(shutil.copytree(str(run.args.output_dir), runs.folder / "out"))
    base = str(out / "checkpoint-6")
    with pytest.raises(UserError, match="output_dir"):
        runs.train("out", base, peft_config=LoraConfig(task_type="SEQ_CLS", r=2))
    assert Path(base, "config.json").is_file()
    runs.train("out", base, max_steps=2)  # a full model, without a base model
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-2"}


# ---- rejected checkpoints


PICKLES = ["rng_state.pth", "scheduler.pt", "training_args.bin", "optimizer.pt", "pytorch_model.bin"]


@pytest.mark.parametrize("file", [*PICKLES, "state/.metadata"])
def test_hostile_pickle_never_runs(file: str, checkpoint: Path, runs: Runs) -> None:
    """Pickles never run even if the manifest matches: the files are ignored or rejected."""
    mark = runs.folder / "code ran"
    (checkpoint / file).write_text(f"cos\nmkdir\n(V{mark}\ntR.")  # creates a folder when unpickled
    if file in ("optimizer.pt", "pytorch_model.bin"):
        (checkpoint / "progress.json").unlink()  # checkpoints of transformers do not have it
    if file == "pytorch_model.bin":
        (checkpoint / "model.safetensors").unlink()
        shutil.rmtree(checkpoint / "state")
    checkpoints.reseal(checkpoint)
    try:
        runs.train("out", resume=str(checkpoint))
    except Exception as error:  # noqa: BLE001  # whatever says no
        assert "eights" in str(error) or "unpickl" in str(error).lower(), error
    assert not mark.exists()
    pickle.loads((checkpoint / file).read_bytes())
    assert mark.exists()  # proves that unpickling the file has an effect


def change_weights(checkpoint: Path, change: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]) -> None:
    file = checkpoint / "model.safetensors"
    save_file(dict(change(*item) for item in load_file(file).items()), file)


def change_progress(checkpoint: Path, **values: Any) -> None:
    numbers = json.loads((checkpoint / "progress.json").read_text())
    (checkpoint / "progress.json").write_text(json.dumps(numbers | values))


def test_optional_files_may_be_missing(run: RewardTrainer, checkpoint: Path, caplog: Any, runs: Runs) -> None:
    for path in checkpoint.iterdir():
        if path.name.startswith(("rng_state", "tokenizer", "training_args", "chat_template")):
            path.unlink()
    trainer = runs.train("out", resume=str(checkpoint))
    assert "lacks rng_state.pth" in caplog.text and "lacks tokenizer.json" in caplog.text
    assert_same(run, trainer)
    for name in ("scheduler.pt", "trainer_state.json", "progress.json", "model.safetensors"):
        (checkpoint / name).rename(runs.folder / name)
        assert find_faults(checkpoint) == [f"{name} is missing"]
        (runs.folder / name).rename(checkpoint / name)


def keep_files(checkpoint: Path, *left: str) -> None:
    """Keep only these files, the weights and the config, as in an interrupted copy."""
    for path in checkpoint.iterdir():
        if path.name not in {*left, "model.safetensors", "config.json"}:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


INCOMPATIBLE: dict[str, tuple[Callable[[Path], None], str]] = {
    "names": (lambda at: change_weights(at, lambda name, weight: (f"{name}.other", weight)), "another model"),
    "shapes": (lambda at: change_weights(at, lambda name, weight: (name, weight[:1].clone())), "another model"),
    "batches": (lambda at: change_progress(at, batches="padded"), "`packing`"),
    "optimizer": (lambda at: change_progress(at, optimizer={"class": "SGD"}), "`optim`"),
    "no state": (lambda at: keep_files(at, "progress.json"), "manifest.json"),
    "no progress": (lambda at: keep_files(at, "state"), "manifest.json"),
    "no last files": (lambda at: keep_files(at, "progress.json", "state", "trainer_state.json"), "manifest.json"),
}


@pytest.mark.parametrize("name", INCOMPATIBLE)
def test_incompatible_checkpoint_is_rejected(name: str, checkpoint: Path, runs: Runs) -> None:
    """The manifest matches the files, so other checks must find the problem."""
    spoil, message = INCOMPATIBLE[name]
    spoil(checkpoint)
    if (checkpoint / MANIFEST_FILE).exists():
        checkpoints.reseal(checkpoint)
    with pytest.raises(ValueError, match=message):
        runs.train("out", resume=str(checkpoint))


def test_model_folder_is_rejected_as_a_checkpoint(runs: Runs) -> None:
    for folder in (runs.model, str(runs.folder / "checkpoint-9")):
        with pytest.raises(FileNotFoundError, match=r"trainer_state.json"):
            runs.train("out", resume=folder)


# ---- runs at a URL


def test_run_at_a_url_is_saved_and_resumed_there(runs: Runs) -> None:
    """fsspec's in-memory file system: no file of the run stays on the disk."""
    url = "memory://bucket/run"
    files = fsspec.filesystem("memory")
    whole = runs.train(url, save_total_limit=2, resume="auto")
    whole.save_model()
    staged = Path(whole.args.output_dir)
    assert sorted(RemoteRun(url).checkpoints()) == ["checkpoint-4", "checkpoint-6"]
    assert files.exists("/bucket/run/model.safetensors") and files.exists("/bucket/run/config.json")
    assert not list(staged.glob("checkpoint-*")) and not (staged / "_unfinished").exists()
    files.rm("/bucket/run/checkpoint-6/manifest.json")  # as during an upload
    resumed = runs.train(url, resume="auto")
    assert resumed.state.global_step == 6
    assert_same(whole, resumed)
    by_name = runs.train("memory://elsewhere", resume=f"{url}/checkpoint-4")
    assert torch.equal(by_name.model.score.weight, whole.model.score.weight)
    assert not list(staged.glob("downloaded*/checkpoint-*"))


def test_url_is_rejected_if_every_process_writes_a_part(monkeypatch: pytest.MonkeyPatch, runs: Runs) -> None:
    """accelerate's FSDP does so, but needs GPUs."""
    monkeypatch.setattr(saving_trainer, "saves_state", lambda accelerator: False)
    with pytest.raises(UserError, match="output_dir"):
        runs.make("memory://bucket/run")


def test_best_model_at_a_url_is_kept_and_loaded(runs: Runs) -> None:
    trainer = runs.train("memory://bucket/best", **BEST)
    assert Path(str(trainer.state.best_model_checkpoint)).name == "checkpoint-2"
    assert trainer.trl_tpu.remote.checkpoints() == ["checkpoint-2"]
    (saved,) = fsspec.filesystem("memory").glob("/bucket/best/checkpoint-2/model.safetensors")
    weights = load(fsspec.filesystem("memory").cat_file(saved))
    assert torch.equal(weights["score.weight"], trainer.model.score.weight.cpu())


@pytest.mark.parametrize("status", [BEST_LOST, NOT_SAVED])
def test_exit_status_states_what_was_lost(status: int, monkeypatch: pytest.MonkeyPatch, runs: Runs) -> None:
    """The best model or a checkpoint is lost; training still finishes."""
    monkeypatch.setattr(synthetic, "TEST_NUMBER_PAIRS", 4)
    words = ["--model_name_or_path", "synthetic:tiny", "--dataset_name", "synthetic:numbers", "--report_to", "none"]
    words += ["--output_dir", str(runs.folder), "--max_steps", "2", "--save_steps", "2", "--eval_steps", "2"]
    if status == NOT_SAVED:
        monkeypatch.setattr(folders, "publish", lambda *_: os.mkdir(runs.folder))  # raises, because the folder exists
    else:
        lose = lambda trainer: setattr(trainer.trl_tpu, "best_model_lost", "gone")  # noqa: E731
        monkeypatch.setattr(RewardTrainer, "_load_best_model", lose)
        words += ["--eval_strategy", "steps", "--load_best_model_at_end"]
    with pytest.raises(SystemExit) as end:
        reward.run(words)
    assert end.value.code == status and (runs.folder / "model.safetensors").is_file()


def test_saved_adapters_are_trained_further(runs: Runs) -> None:
    lora = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"])
    before = runs.train("before", peft_config=lora, bf16=False)
    before.save_model()
    rows = tiny.made_up_pairs(8, seed=1)
    further: Any = {"name": "run", "model": str(runs.folder / "before"), "bf16": False, "save_steps": 3}
    trainer = runs.make(**further)
    assert trainer.predict(rows).predictions == pytest.approx(before.predict(rows).predictions, abs=1e-6)
    old = {name: each.detach().clone() for name, each in trainer.model.named_parameters() if each.requires_grad}
    assert any("lora_A" in name for name in old)
    trainer.train()
    trainer.save_model()
    assert not any(torch.equal(trainer.model.get_parameter(name), each) for name, each in old.items())
    rewards_P2 = trainer.predict(rows).predictions
    for folder in ("run", "run/checkpoint-6"):
        scored = [[row["reward_chosen"], row["reward_rejected"]] for row in score(str(runs.folder / folder), rows)]
        assert scored == pytest.approx(rewards_P2, abs=1e-6)
    resumed = runs.train(**further, resume=str(runs.folder / "run/checkpoint-3"))
    assert resumed.predict(rows).predictions == pytest.approx(rewards_P2, abs=1e-6)
    read = AutoModelForSequenceClassification.from_pretrained(runs.folder / "before")
    for model, more in ((further["model"], lora), (read, None)):  # else LoRA would be frozen
        with pytest.raises(UserError, match="peft_config"):
            runs.make("more", model, peft_config=more)
