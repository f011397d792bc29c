"""Saves that fail, saves that someone watches, and checkpoints that must be refused: each for real, in plain torch."""

import copy
import json
import os
import pickle
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import saving
import tiny
import torch
from accelerate.state import GradientState
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save_file
from stopping import At
from transformers import AutoModelForSequenceClassification, TrainerCallback

from trl_tpu import RewardConfig, RewardTrainer, score
from trl_tpu.checkpoint import folders
from trl_tpu.checkpoint.folders import MANIFEST_FILE, RemoteRun, describe_files, files_in, find_faults, publish
from trl_tpu.errors import BEST_LOST, NOT_SAVED, UserError
from trl_tpu.scripts import reward, synthetic
from trl_tpu.training import saving as saving_trainer


def make_trainer(
    model: Any, folder: Path | str, kind: type[RewardTrainer] = RewardTrainer, peft: Any = None, **given: Any
) -> RewardTrainer:
    """A trainer of 64 pairs; ``given`` are its arguments, and settings of its config."""
    names = given.keys() & {"callbacks", "optimizer_cls_and_kwargs"}
    arguments = {name: given.pop(name) for name in names}
    defaults = {"max_steps": 6, "save_steps": 2, "logging_steps": 3, "learning_rate": 1e-3, "report_to": "none"}
    defaults |= {"per_device_train_batch_size": 2, "disable_tqdm": True}
    args, pairs = RewardConfig(str(folder), **(defaults | given)), tiny.made_up_pairs(64)
    return kind(model, args, train_dataset=pairs, eval_dataset=pairs.select(range(8)), peft_config=peft, **arguments)


def trained(*given: Any, resume: Any = None, **settings: Any) -> RewardTrainer:
    """A trainer that `make_trainer` has made and that has trained."""
    trainer = make_trainer(*given, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture(scope="module")
def run(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> RewardTrainer:
    """A run with the checkpoints 2, 4 and 6."""
    return trained(model_folder, tmp_path_factory.mktemp("run"))


@pytest.fixture
def checkpoint(run: RewardTrainer, tmp_path: Path) -> Path:
    """A copy of checkpoint 4, to be spoilt."""
    return Path(shutil.copytree(f"{run.args.output_dir}/checkpoint-4", tmp_path / "copy" / "checkpoint-4"))


def assert_same(one: RewardTrainer, other: RewardTrainer) -> None:
    """See that two trainers' weights are the same bit by bit."""
    for (name, weight), same in zip(one.model.named_parameters(), other.model.parameters(), strict=True):
        assert torch.equal(weight, same), name


def reseal(folder: Path) -> None:
    """A manifest that agrees with whatever the files are now."""
    (folder / MANIFEST_FILE).unlink()
    aside = folder.rename(folder.with_name("aside"))
    publish(aside, folder, describe_files(aside, files_in(aside)))


# ---- what is in a checkpoint


def test_a_checkpoint_has_what_a_subclass_saves_and_resumes_to_the_bit(model_folder: str, tmp_path: Path) -> None:
    """Though the subclass saves the weights coarser than they are."""
    whole = trained(model_folder, tmp_path, kind=saving.Saving)
    whole.save_model()
    saving.check(tmp_path, "checkpoint-4")
    resumed = trained(model_folder, tmp_path / "resumed", kind=saving.Saving, resume=str(tmp_path / "checkpoint-4"))
    assert_same(whole, resumed)


def test_what_a_user_puts_into_a_checkpoint_is_not_read_for_the_model(
    run: RewardTrainer, model_folder: str, checkpoint: Path, tmp_path: Path
) -> None:
    """Tensors of the same names, in files that a folder lists before and behind the model's, and of other names."""
    weights = load_file(checkpoint / "model.safetensors")
    zeros = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for number in range(16):
        save_file(zeros | {"of another": torch.zeros(1)}, checkpoint / f"average-{number}.safetensors")
    resumed = trained(model_folder, tmp_path / "resumed", resume=str(checkpoint))
    assert_same(run, resumed)


class ProjectedSGD(torch.optim.SGD):
    """Keeps an object in its state, as GaLore does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["projector"] = torch.nn.Identity()
        return super().step(closure)


def test_sums_of_rows_and_columns_resume_to_the_bit(model_folder: str, tmp_path: Path) -> None:
    """torch's Adafactor makes its state in step 1, some of it of other shapes than its parameter's."""
    own = {"optimizer_cls_and_kwargs": (torch.optim.Adafactor, {"lr": 1e-2})}
    whole = trained(model_folder, tmp_path / "whole", **own)
    resumed = trained(model_folder, tmp_path / "resumed", **own, resume=str(tmp_path / "whole" / "checkpoint-4"))
    assert_same(whole, resumed)


def test_adapters_of_any_name_are_saved_as_peft_does_and_resume(model_folder: str, tmp_path: Path) -> None:
    def adapted() -> Any:
        torch.manual_seed(0)
        base = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1)
        model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=4), adapter_name="first")
        model.add_adapter("second", LoraConfig(task_type="SEQ_CLS", r=2))
        return model

    whole, resumed = (make_trainer(adapted(), tmp_path / name) for name in ("whole", "resumed"))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert_same(whole, resumed)
    (state,) = (tmp_path / "whole" / "checkpoint-4" / "state").iterdir()
    assert all("lora" in name or "score" in name for name in load_file(state))
    resumed.save_model()
    whole.model.save_pretrained(tmp_path / "peft")
    for saved in (tmp_path / "whole" / "checkpoint-6", tmp_path / "resumed"):
        for name in ("first", "second"):
            assert (saved / name / "adapter_config.json").is_file()
            written = [load_file(each / name / "adapter_model.safetensors") for each in (saved, tmp_path / "peft")]
            assert written[0].keys() == written[1].keys()
            assert all(torch.equal(tensor, written[1][key]) for key, tensor in written[0].items())


def test_an_optimizer_with_more_than_tensors_and_numbers_saves_the_model_alone(
    model_folder: str, tmp_path: Path
) -> None:
    sgd: Any = {"optimizer_cls_and_kwargs": (ProjectedSGD, {}), "max_steps": 2}
    trainer = trained(model_folder, tmp_path, **sgd)
    assert trainer.checkpointer.failed == [str(tmp_path / "checkpoint-2")] and not (tmp_path / "checkpoint-2").exists()
    alone = trained(model_folder, tmp_path / "alone", save_only_model=True, **sgd)
    assert alone.checkpointer.failed == [] and find_faults(tmp_path / "alone" / "checkpoint-2") == []


def test_a_run_that_is_resumed_at_its_end_trains_no_more(
    run: RewardTrainer, model_folder: str, tmp_path: Path
) -> None:
    """transformers would take a seventh step of six, and save that."""
    shutil.copytree(f"{run.args.output_dir}/checkpoint-6", tmp_path / "checkpoint-6")
    resumed = make_trainer(model_folder, tmp_path)
    result = resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == result.global_step == 6
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-6"]
    assert_same(run, resumed)


def test_save_only_model_leaves_state_out_and_a_resume_says_so(
    model_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(model_folder, tmp_path, save_only_model=True)
    assert (tmp_path / "checkpoint-6" / "model.safetensors").is_file()
    assert not (tmp_path / "checkpoint-6" / "state").exists()
    assert find_faults(tmp_path / "checkpoint-6") == []
    resumed = trained(model_folder, tmp_path, max_steps=8, resume=True)
    assert resumed.state.global_step == 8
    assert "checkpoint-6" in caplog.text


# ---- the run that a folder is of


def test_a_new_run_beside_an_older_one_s_checkpoints_is_the_one_that_is_resumed(
    run: RewardTrainer, model_folder: str, tmp_path: Path
) -> None:
    """The older one got further, and would be taken for the end of the new one."""
    shutil.copytree(f"{run.args.output_dir}/checkpoint-6", tmp_path / "checkpoint-6")
    new = make_trainer(model_folder, tmp_path, seed=7)

    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 3

    new.add_callback(Stops())
    new.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    resumed = trained(model_folder, tmp_path, seed=7, resume=True)
    assert [log["step"] for log in resumed.state.log_history if "loss" in log] == [3, 6]
    whole = trained(model_folder, tmp_path / "whole", seed=7)
    assert torch.equal(resumed.model.score.weight, whole.model.score.weight)
    (older,) = tmp_path.glob("_earlier/*/checkpoint-6")
    assert find_faults(older) == []


def test_a_run_that_was_stopped_before_its_first_checkpoint_begins_anew(model_folder: str, tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(model_folder, tmp_path, callbacks=[At("on_step_end", 1, interrupt)])
    again = trained(model_folder, tmp_path, resume=True)
    assert again.state.global_step == 6
    with pytest.raises(ValueError, match="resume_from_checkpoint"):  # nothing ever began here
        trained(model_folder, tmp_path / "elsewhere", resume=True)


def test_new_settings_hold_in_a_resumed_run_and_are_named(
    run: RewardTrainer, model_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(f"{run.args.output_dir}/checkpoint-4", tmp_path / "checkpoint-4")
    changed = {"learning_rate": 5e-4, "weight_decay": 0.1, "adam_beta2": 0.9, "center_rewards_coefficient": 0.1}
    resumed = trained(model_folder, tmp_path, **changed, resume=True)
    assert all(f"{name} was {getattr(run.args, name)}" in caplog.text for name in changed)
    assert resumed.state.log_history[-2]["learning_rate"] == pytest.approx(5e-4 / 6)
    group = resumed.optimizer.param_groups[0]
    assert group["betas"] == (0.9, 0.9) and group["weight_decay"] == 0.1


@pytest.mark.parametrize(
    "settings", [{"dataloader_drop_last": True, "per_device_train_batch_size": 100}, {"max_steps": 0}, {}]
)
def test_training_that_takes_no_step_is_no_success(settings: Any, model_folder: str, tmp_path: Path) -> None:
    trainer = make_trainer(model_folder, tmp_path, **settings)
    if not settings:
        trainer.train_dataset = trainer.train_dataset.to_iterable_dataset().filter(lambda row: False)
    with pytest.raises(ValueError, match="max_steps"):
        trainer.train()


# ---- the best model

BEST = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 1}
# the first evaluation is the best, and the last the newest
BEST |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}


def assert_best(trainer: RewardTrainer, checkpoint: Path) -> None:
    best = load_file(checkpoint / "model.safetensors")
    assert trainer.trl_tpu.best_model_lost is None
    assert torch.equal(best["score.weight"], trainer.model.score.weight)


def test_the_best_model_is_found_by_another_path(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained(model_folder, "./out//", max_steps=4, **BEST | {"load_best_model_at_end": False})
    (tmp_path / "out").rename(tmp_path / "moved")
    (tmp_path / "out").mkdir()
    resumed = trained(model_folder, tmp_path / "moved", **BEST, resume=True)
    assert [path.name for path in (tmp_path / "moved").glob("checkpoint-*")] == ["checkpoint-2"]
    assert_best(resumed, tmp_path / "moved" / "checkpoint-2")


def test_the_best_models_config_says_how_large_its_own_rewards_are(model_folder: str, tmp_path: Path) -> None:
    trainer = trained(model_folder, tmp_path, max_steps=4, **BEST)
    trainer.save_model()
    of_best, of_last = (row for row in trainer.state.log_history if "eval_mean_reward" in row)
    config = json.loads((tmp_path / "config.json").read_text())
    saved = json.loads((tmp_path / "checkpoint-2" / "config.json").read_text())
    for key in ("mean", "std", "problem_type", "sentence_transformers", "rope_theta"):
        assert saved[key] == config[key]
    assert config["mean"] == pytest.approx(of_best["eval_mean_reward"]) != of_last["eval_mean_reward"]
    trainer.create_model_card()
    assert f"mean of {config['mean']:.4g}" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("how", ["flipped", "removed"])
def test_a_best_model_that_is_damaged_is_not_taken(how: str, model_folder: str, tmp_path: Path) -> None:
    def spoil() -> None:
        weights = tmp_path / "checkpoint-2" / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-2] ^= 0x40
        weights.write_bytes(content) if how == "flipped" else shutil.rmtree(weights.parent)

    trainer = trained(model_folder, tmp_path, callbacks=[At("on_step_end", 6, spoil)], **BEST)
    assert trainer.trl_tpu.best_model_lost is not None and "checkpoint-2" in trainer.trl_tpu.best_model_lost
    last = load_file(tmp_path / "checkpoint-6" / "model.safetensors")
    assert torch.equal(last["score.weight"], trainer.model.score.weight)


def test_the_best_adapters_of_checkpoints_without_state_are_loaded(model_folder: str, tmp_path: Path) -> None:
    lora = LoraConfig(task_type="SEQ_CLS", r=2, target_modules="all-linear")
    trainer = trained(model_folder, tmp_path, peft=lora, save_only_model=True, **BEST)
    assert trainer.trl_tpu.best_model_lost is None
    best = load_file(tmp_path / "checkpoint-2" / "adapter_model.safetensors")
    own = {name: weight for name, weight in trainer.model.state_dict().items() if "lora_B" in name}
    assert own and all(torch.equal(best[name.replace(".default", "")], weight) for name, weight in own.items())


def test_the_best_beside_what_is_resumed_is_taken_first(run: RewardTrainer, model_folder: str, tmp_path: Path) -> None:
    """And not that of another run, which has the same name and is moved aside."""
    all_stay = BEST | {"load_best_model_at_end": False, "save_total_limit": None}
    trained(model_folder, tmp_path / "one", max_steps=4, **all_stay)
    shutil.copytree(f"{run.args.output_dir}/checkpoint-2", tmp_path / "two" / "checkpoint-2")
    resumed = trained(model_folder, tmp_path / "two", **BEST, resume=str(tmp_path / "one" / "checkpoint-4"))
    assert_best(resumed, tmp_path / "one" / "checkpoint-2")


# ---- saves that fail


class SmallFiles(TrainerCallback):
    """While step 4 is saved, no file can grow beyond some bytes, as on a full disk."""

    def __init__(self) -> None:
        self._limits, self.found = resource.getrlimit(resource.RLIMIT_FSIZE), []

    def limit(self, size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, self._limits[1]))

    def lift(self) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 4:
            self.limit(self.bytes)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.lift()  # training has waited for the save, since this callback watches it
        self.found.append(find_faults(Path(args.output_dir, f"checkpoint-{state.global_step}")) == [])


@pytest.fixture
def small_files() -> Iterator[SmallFiles]:
    callback = SmallFiles()
    yield callback
    callback.lift()


@pytest.mark.parametrize("limit", [2_000, 20_000, 200_000], ids=["before", "beside training", "optimizer"])
def test_full_disk_is_loud_and_training_goes_on(
    limit: int, model_folder: str, tmp_path: Path, small_files: SmallFiles, caplog: pytest.LogCaptureFixture
) -> None:
    """Room for none of the files, for those that are written before training goes on, or for the weights as well."""
    small_files.bytes = limit
    trainer = trained(model_folder, tmp_path, callbacks=[small_files])
    assert trainer.state.global_step == 6
    assert trainer.checkpointer.failed == [str(tmp_path / "checkpoint-4")] and small_files.found == [True, False, True]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-6"]
    assert not (tmp_path / "_unfinished").exists()  # what was half written takes no room
    assert "checkpoint-4" in caplog.text


def test_folder_that_cannot_be_written_is_loud_and_training_goes_on(model_folder: str, tmp_path: Path) -> None:
    (tmp_path / "_unfinished").write_text("a file where a folder has to be")
    (tmp_path / "README.md").mkdir()  # nor can the model card
    trainer = trained(model_folder, tmp_path)
    assert trainer.state.global_step == 6
    assert len(trainer.checkpointer.failed) == 3


def test_a_model_that_there_is_no_room_for_leaves_what_was_there(
    run: RewardTrainer, model_folder: str, tmp_path: Path, small_files: SmallFiles
) -> None:
    run.save_model(str(tmp_path / "saved"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    other = make_trainer(model_folder, tmp_path / "other")
    small_files.limit(20_000)
    with pytest.raises((OSError, SafetensorError)):
        other.save_model(str(tmp_path / "saved"))
    small_files.lift()
    assert {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()} == before


def test_the_users_own_readme_stays(model_folder: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("Notes of mine")
    trainer = trained(model_folder, tmp_path, max_steps=2)
    assert (tmp_path / "README.md").read_text() == "Notes of mine"
    (tmp_path / "README.md").unlink()
    for _ in range(2):  # one that was written by us is written anew
        trainer.create_model_card("first")
        trainer.create_model_card("second")
    assert "# second" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("own", ["", "# Mine"])
def test_saved_adapters_have_the_users_card_or_ours(own: str, model_folder: str, tmp_path: Path) -> None:
    """peft's stub names a local base model, which the Hub rejects, and replaced what the user had written."""
    out, other = tmp_path / "out", tmp_path / "other"
    for folder in (out, other) if own else ():
        folder.mkdir()
        (folder / "README.md").write_text(own)
    if not own:
        model = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1)
        get_peft_model(model, LoraConfig(task_type="SEQ_CLS")).save_pretrained(other)  # with its stub
    trainer = trained(model_folder, out, max_steps=2, peft=LoraConfig(task_type="SEQ_CLS", r=2))
    for place in (None, str(other), str(tmp_path / "new")):
        trainer.save_model(place)
    for folder in (out, other, tmp_path / "new", out / "checkpoint-2"):
        card = (folder / "README.md").read_text()
        assert card == own if own else "reward-trainer" in ModelCard(card).data.tags, folder
        assert ModelCard(card).data.base_model is None and "More Information Needed" not in card


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda trainer: pickle.loads(pickle.dumps(trainer))])
def test_a_copy_of_a_trainer_trains_by_itself(
    copied: Callable[[RewardTrainer], RewardTrainer], model_folder: str, tmp_path: Path
) -> None:
    """As with TRL's. After any training accelerate holds what cannot be pickled, but still be copied."""
    model = AutoModelForSequenceClassification.from_pretrained(model_folder, num_labels=1)
    GradientState._reset_state()
    trainer = make_trainer(model, tmp_path)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    other = copied(trainer)
    other.train()
    assert other.state.global_step == 6 and find_faults(tmp_path / "checkpoint-6") == []
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.model.state_dict().items())
    assert not torch.equal(other.model.score.weight, before["score.weight"])
    assert copy.deepcopy(other).evaluate()["eval_loss"] == other.evaluate()["eval_loss"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


def test_adapters_on_a_checkpoint_train_in_another_folder(run: RewardTrainer, tmp_path: Path) -> None:
    out = Path(shutil.copytree(str(run.args.output_dir), tmp_path / "out"))
    base = str(out / "checkpoint-6")
    with pytest.raises(UserError, match="output_dir"):
        trained(base, out, peft=LoraConfig(task_type="SEQ_CLS", r=2))
    assert Path(base, "config.json").is_file()
    trained(base, out, max_steps=2)  # all of the model, which names no base
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-2"}


# ---- checkpoints that are refused


class Marks:
    """Unpickled, it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self._mark),))


@pytest.mark.parametrize(
    "file",
    ["rng_state.pth", "scheduler.pt", "training_args.bin", "optimizer.pt", "pytorch_model.bin", "state/.metadata"],
)
def test_hostile_pickle_never_runs(file: str, checkpoint: Path, model_folder: str, tmp_path: Path) -> None:
    """Also where the manifest agrees with it: the files are either not read or refused."""
    mark = tmp_path / "code ran"
    (checkpoint / file).write_bytes(pickle.dumps(Marks(mark)))
    if file == "optimizer.pt":
        (checkpoint / "progress.json").unlink()  # as in a checkpoint of transformers
    if file == "pytorch_model.bin":
        (checkpoint / "model.safetensors").unlink()
        shutil.rmtree(checkpoint / "state")
        (checkpoint / "progress.json").unlink()
    reseal(checkpoint)
    try:
        trained(model_folder, tmp_path / "out", resume=str(checkpoint))
    except Exception as error:  # noqa: BLE001  # whatever says no
        assert "eights" in str(error) or "unpickl" in str(error).lower(), error
    assert not mark.exists()
    pickle.loads((checkpoint / file).read_bytes())
    assert mark.exists()  # the file would have


def weights(change: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]) -> Callable[[Path], None]:
    def spoil(checkpoint: Path) -> None:
        file = checkpoint / "model.safetensors"
        save_file(dict(change(*item) for item in load_file(file).items()), file)

    return spoil


def progress(name: str, value: Any) -> Callable[[Path], None]:
    def spoil(checkpoint: Path) -> None:
        numbers = json.loads((checkpoint / "progress.json").read_text())
        (checkpoint / "progress.json").write_text(json.dumps(numbers | {name: value}))

    return spoil


def test_a_checkpoint_is_resumed_without_what_no_resume_needs(
    run: RewardTrainer, checkpoint: Path, model_folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for path in checkpoint.iterdir():
        if path.name.startswith(("rng_state", "tokenizer", "training_args", "chat_template")):
            path.unlink()
    trainer = trained(model_folder, tmp_path / "out", resume=str(checkpoint))
    assert "lacks rng_state.pth" in caplog.text and "lacks tokenizer.json" in caplog.text
    assert_same(run, trainer)
    for name in ("scheduler.pt", "trainer_state.json", "progress.json", "model.safetensors"):
        (checkpoint / name).rename(tmp_path / name)
        assert find_faults(checkpoint) == [f"{name} is missing"]
        (tmp_path / name).rename(checkpoint / name)


def only(*left: str) -> Callable[[Path], None]:
    """As in a copy that was broken off, where the manifest is not there yet."""

    def spoil(checkpoint: Path) -> None:
        for path in checkpoint.iterdir():
            if path.name not in {*left, "model.safetensors", "config.json"}:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    return spoil


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "other names": (weights(lambda name, weight: (f"{name}.other", weight)), "another model"),
    "other shapes": (weights(lambda name, weight: (name, weight[:1].clone())), "another model"),
    "other batches": (progress("batches", "padded"), "`packing`"),
    "another optimizer": (progress("optimizer", {"class": "SGD"}), "`optim`"),
    "a copy without state": (only("progress.json"), "manifest.json"),
    "a copy without progress": (only("state"), "manifest.json"),
    "a copy without the last files": (only("progress.json", "state", "trainer_state.json"), "manifest.json"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_checkpoint_that_does_not_fit_is_refused(
    name: str, checkpoint: Path, model_folder: str, tmp_path: Path
) -> None:
    """Also where the manifest agrees: what it cannot see."""
    spoil, message = REFUSED[name]
    spoil(checkpoint)
    if (checkpoint / MANIFEST_FILE).exists():
        reseal(checkpoint)
    with pytest.raises(ValueError, match=message):
        trained(model_folder, tmp_path / "out", resume=str(checkpoint))


def test_a_model_is_no_checkpoint_to_go_on_from(model_folder: str, tmp_path: Path) -> None:
    for folder in (model_folder, str(tmp_path / "checkpoint-9")):
        with pytest.raises(ValueError, match=r"trainer_state.json"):
            trained(model_folder, tmp_path / "out", resume=folder)


# ---- runs at a URL


def test_a_run_at_a_url_is_kept_there_and_resumed_from_there(model_folder: str) -> None:
    """fsspec's file system in memory: nothing of the run is found on the disk."""
    url = "memory://bucket/run"
    files = fsspec.filesystem("memory")
    whole = trained(model_folder, url, save_total_limit=2)
    whole.save_model()
    staged = Path(whole.args.output_dir)
    assert sorted(RemoteRun(url).checkpoints()) == ["checkpoint-4", "checkpoint-6"]
    assert files.exists("/bucket/run/model.safetensors") and files.exists("/bucket/run/config.json")
    assert not list(staged.glob("checkpoint-*")) and not (staged / "_unfinished").exists()
    files.rm("/bucket/run/checkpoint-6/manifest.json")  # as while it is uploaded
    resumed = trained(model_folder, url, resume=True)
    assert resumed.state.global_step == 6
    assert_same(whole, resumed)
    by_name = trained(model_folder, "memory://elsewhere", resume=f"{url}/checkpoint-4")
    assert torch.equal(by_name.model.score.weight, whole.model.score.weight)
    assert not list(staged.glob("downloaded*/checkpoint-*"))


def test_a_url_is_refused_where_every_process_writes_a_part(
    model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As accelerate's FSDP does, which needs GPUs."""
    monkeypatch.setattr(saving_trainer, "keeps_state", lambda accelerator: False)
    with pytest.raises(UserError, match="output_dir"):
        make_trainer(model_folder, "memory://bucket/run")


def test_best_model_at_a_url_is_kept_and_loaded(model_folder: str) -> None:
    trainer = trained(model_folder, "memory://bucket/best", **BEST)
    assert Path(str(trainer.state.best_model_checkpoint)).name == "checkpoint-2"
    assert trainer.trl_tpu.remote.checkpoints() == ["checkpoint-2"]
    (saved,) = fsspec.filesystem("memory").glob("/bucket/best/checkpoint-2/model.safetensors")
    weights = load(fsspec.filesystem("memory").cat_file(saved))
    assert torch.equal(weights["score.weight"], trainer.model.score.weight)


@pytest.mark.parametrize("status", [BEST_LOST, NOT_SAVED])
def test_the_commands_status_tells_what_was_lost(status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best model or a checkpoint; training goes to its end all the same."""
    monkeypatch.setattr(synthetic, "TEST_NUMBER_PAIRS", 4)
    words = ["--model_name_or_path", "synthetic:tiny", "--dataset_name", "synthetic:numbers", "--report_to", "none"]
    words += ["--output_dir", str(tmp_path), "--max_steps", "2", "--save_steps", "2", "--eval_steps", "2"]
    if status == NOT_SAVED:
        monkeypatch.setattr(folders, "publish", lambda *_: os.mkdir(tmp_path))  # which exists
    else:
        lose = lambda trainer: setattr(trainer.trl_tpu, "best_model_lost", "gone")  # noqa: E731
        monkeypatch.setattr(RewardTrainer, "_load_best_model", lose)
        words += ["--eval_strategy", "steps", "--load_best_model_at_end"]
    with pytest.raises(SystemExit) as end:
        reward.run(words)
    assert end.value.code == status and (tmp_path / "model.safetensors").is_file()


def test_adapters_by_the_name_of_their_folder_are_trained_further(model_folder: str, tmp_path: Path) -> None:
    lora = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"])
    before = trained(model_folder, tmp_path / "before", peft=lora, bf16=False)
    before.save_model()
    rows = tiny.made_up_pairs(8, seed=1)
    trainer = make_trainer(str(tmp_path / "before"), tmp_path / "run", bf16=False, save_steps=3)
    assert trainer.predict(rows).predictions == pytest.approx(before.predict(rows).predictions, abs=1e-6)
    old = {name: each.detach().clone() for name, each in trainer.model.named_parameters() if each.requires_grad}
    assert any("lora_A" in name for name in old)
    trainer.train()
    trainer.save_model()
    assert not any(torch.equal(trainer.model.get_parameter(name), each) for name, each in old.items())
    rewards_P2 = trainer.predict(rows).predictions
    for folder in ("run", "run/checkpoint-6"):
        scored = [[row["reward_chosen"], row["reward_rejected"]] for row in score(str(tmp_path / folder), rows)]
        assert scored == pytest.approx(rewards_P2, abs=1e-6)
    resumed = make_trainer(str(tmp_path / "before"), tmp_path / "run", bf16=False, save_steps=3)
    resumed.train(str(tmp_path / "run/checkpoint-3"))
    assert resumed.predict(rows).predictions == pytest.approx(rewards_P2, abs=1e-6)
    with pytest.raises(UserError, match="peft_config"):
        make_trainer(str(tmp_path / "before"), tmp_path / "more", peft=lora)
    with pytest.raises(UserError, match="peft_config"):  # their LoRA would be frozen, and their checkpoints fail
        make_trainer(AutoModelForSequenceClassification.from_pretrained(tmp_path / "before"), tmp_path / "more")
