"""Process rewards: packed rows, padded rows and transformers' token classification give equal numbers."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from datasets import Dataset
from label_formats import BATCH, by_transformers, load, save_model, settings, solutions
from peft import AutoPeftModelForTokenClassification, LoraConfig, TaskType
from training import logged, losses, trained
from transformers import AutoTokenizer, DataCollatorForTokenClassification

from trl_tpu import RewardConfig
from trl_tpu.errors import UserError
from trl_tpu.experimental.prm import PRMTrainer
from trl_tpu.modeling.head_spec import BASE_CONFIG
from trl_tpu.packing.shapes import BatchShape, ShapePlan
from trl_tpu.scoring.stream import REASON, score
from trl_tpu.scripts import export, report, reward
from trl_tpu.scripts.score import run as score_run

Make = Callable[..., PRMTrainer]
HEAD = "base_model.model.score.modules_to_save.default.weight"


class FixedRows(PRMTrainer):
    fixed_shapes = ShapePlan((BatchShape(1, 96),), (BatchShape(1, 128),))  # most batches need several


class OwnLoss(PRMTrainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)  # the inputs have labels, so the outputs have a loss
        return (outputs.loss, outputs) if return_outputs else outputs.loss


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make(model: str, tmp_path: Path) -> Make:
    """Return a function that builds a trainer of rows with settings."""

    def make(rows: Any, eval_dataset: Any = None, **more: Any) -> PRMTrainer:
        data = rows if isinstance(rows, Dataset) else Dataset.from_list(rows)
        return PRMTrainer(load(model), settings(tmp_path, **more), train_dataset=data, eval_dataset=eval_dataset)

    return make


def run_of(model: str, out: Path, kind: type[PRMTrainer] = PRMTrainer, **more: Any) -> Any:
    given = {name: more.pop(name) for name in ("data_collator", "peft_config") if name in more}
    given |= {"train_dataset": solutions(22), "eval_dataset": solutions(9, seed=1)}
    return trained(kind(load(model), settings(out, **more), **given))


def classifier(family: str, vocabulary: int, **more: Any) -> Any:
    """Return a token classifier of another family."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 4, "head_dim": 8, "vocab_size": vocabulary}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    config = getattr(transformers, f"{family}Config")(**sizes | tokens, num_labels=2, **more)
    return getattr(transformers, f"{family}ForTokenClassification")(config).eval()


def test_packed_and_padded_training_equal_transformers(model: str, tmp_path: Path) -> None:
    collator = DataCollatorForTokenClassification(AutoTokenizer.from_pretrained(model, padding_side="left"))
    runs = [
        run_of(model, tmp_path / "padded", packing=False),
        run_of(model, tmp_path / "packed", packing=True),
        run_of(model, tmp_path / "micro-batches", FixedRows, packing=True),
        run_of(model, tmp_path / "collator", data_collator=collator),
        run_of(model, tmp_path / "own loss", OwnLoss),
    ]
    expected, evaluated = by_transformers(model, runs[0].train_dataset, runs[0].eval_dataset)
    for run in runs:
        run.evaluate()
    padded, *others, own = map(logged, runs)
    assert losses(runs[0]) == pytest.approx(expected, abs=1e-6)
    assert padded[-1]["eval_loss"] == pytest.approx(evaluated, abs=1e-6)
    for logs in others:
        for log, reference in zip(logs, padded, strict=True):
            assert log == pytest.approx(reference, abs=2e-5)
    assert losses(runs[-1]) == pytest.approx(expected, abs=1e-6)
    assert own[-1]["eval_accuracy"] == padded[-1]["eval_accuracy"]
    logits, labels, _ = runs[1].predict(solutions(5, seed=2))
    assert logits.shape == (*labels.shape, 2) and (labels == -100).any()


@pytest.mark.parametrize("neutral", ["ignore", "wrong"])
def test_labels_may_be_probabilities_or_neutral(make: Make, model: str, neutral: str) -> None:
    """The loss is the mean over labeled steps of the cross-entropy between log-odds and label."""
    chooser = random.Random(0)
    rows = [{**row, "labels": [chooser.choice([0, 0.25, 1, -1.0]) for _ in row["labels"]]} for row in solutions(22)]
    given: dict[str, Any] = {"max_steps": 1, "neutral_steps": neutral, "weight_decay": 0.0}
    runs = [trained(make(Dataset.from_list(rows), packing=packing, **given)) for packing in (True, False)]
    module, tokenizer, total, count = load(model).double().eval(), AutoTokenizer.from_pretrained(model), 0.0, 0
    for row in rows[:BATCH]:
        everything = {**row, "labels": [True] * len(row["labels"])}
        solution = PRMTrainer.tokenize_row(everything, tokenizer, "\n", None, None, False, True)
        logits = module(torch.tensor([solution["input_ids"]])).logits[0]
        ends = [place for place, label in enumerate(solution["labels"]) if label != -100]
        for odds, label in zip((logits[:, 1] - logits[:, 0])[ends], row["labels"], strict=True):
            if label >= 0 or neutral == "wrong":
                probability = torch.tensor(max(label, 0.0), dtype=torch.float64)
                total += torch.nn.functional.binary_cross_entropy_with_logits(odds, probability).item()
                count += 1
    for run in runs:
        assert losses(run) == pytest.approx([total / count], abs=1e-6)
    assert 0.25 in runs[0].predict(Dataset.from_list(rows[:4])).label_ids
    with pytest.raises(UserError, match="neutral_steps"):
        make(Dataset.from_list(rows))


def test_resumed_run_equals_the_uninterrupted_run(model: str, tmp_path: Path) -> None:
    whole = run_of(model, tmp_path, save_strategy="steps", save_steps=3)
    again = PRMTrainer(load(model), whole.args, train_dataset=solutions(22), eval_dataset=solutions(9, seed=1))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert logged(whole) == logged(again) and "accuracy" in logged(whole)[0]
    saved = load(str(tmp_path / "checkpoint-6")).state_dict()
    assert all(torch.equal(saved[name], value.cpu()) for name, value in whole.model.state_dict().items())
    assert "AutoModelForTokenClassification" in (tmp_path / "README.md").read_text()


def test_solutions_without_labels_are_ignored(make: Make, model: str) -> None:
    cut = make(solutions(22), max_length=14).train_dataset
    assert max(map(len, cut["input_ids"])) == 14 and set(cut[21]["labels"]) == {-100}
    rows = Dataset.from_list([cut[21] if place % 3 == 1 else cut[place] for place in range(12)])
    expected, _ = by_transformers(model, rows, rows)
    for packing in (False, True):
        trainer = trained(make(rows, packing=packing, max_steps=3))
        assert losses(trainer) == pytest.approx(expected, abs=1e-6)
        logits, labels, _ = trainer.predict(rows)  # a row for each solution, in order
        assert logits.shape[:2] == labels.shape and [*(labels != -100).any(1)] == [at % 3 != 1 for at in range(12)]


@pytest.mark.parametrize("case", [("Llama", "\n"), ("GPT2", "\n"), ("Llama", " => ")])
def test_scores_are_log_odds_at_step_ends(model: str, tmp_path: Path, case: Any) -> None:
    (family, separator), tokenizer = case, AutoTokenizer.from_pretrained(model)
    # a model saved by TRL has no separator
    made = classifier(family, len(tokenizer), **({} if separator == "\n" else {"step_separator": separator}))
    made.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    rows = [*solutions(9).to_list(), {"prompt": "None:", "completions": []}, {"prompt": None, "completions": ["a"]}]
    scored = list(score(str(tmp_path), rows))
    for row, each in zip(rows[:9], scored, strict=False):
        solution = PRMTrainer.tokenize_row(row, tokenizer, separator, None, None, False, True)
        logits = made(torch.tensor([solution["input_ids"]])).logits[0].double()
        ends = [place for place, label in enumerate(solution["labels"]) if label != -100]
        assert each["step_rewards"] == pytest.approx((logits[:, 1] - logits[:, 0])[ends].tolist(), abs=2e-6)
        assert each["tokens"] == [end + 1 for end in ends]
    assert (scored[9]["step_rewards"], scored[10]["step_rewards"]) == ([], None)
    assert "`prompt`" in scored[10][REASON]
    again = [{**row, "rewards": [0.0]} for row in scored[:2]]
    assert [row["rewards"] for row in score(str(tmp_path), again)] == [[0.0], [0.0]]
    for kind, best in (({"text": "a"}, False), ({"prompt": "a", "completions": ["b"]}, True)):
        with pytest.raises(UserError, match="steps"):
            list(score(str(tmp_path), [kind], best_of_n=best))


@pytest.mark.parametrize("adapters", [[], ["--use_peft", "true", "--lora_target_modules", "q_proj", "v_proj"]])
def test_command_trains_a_model_that_scores(model: str, tmp_path: Path, capsys: Any, adapters: Any) -> None:
    for split, rows in {"train": solutions(16), "test": solutions(9, seed=1)}.items():
        rows.to_json(tmp_path / "data" / f"{split}.jsonl")
    words = [
        "--model_name_or_path", model, "--dataset_name", str(tmp_path / "data"), "--output_dir", str(tmp_path / "run"),
        "--max_steps", "2", "--do_eval", "true", "--bf16", "false", "--report_to", "none",
        "--disable_tqdm", "true", *adapters,
    ]  # fmt: skip
    assert reward.run_prm([*words, "--dry_run", "true"]) == 0
    assert r"slowly:After it comes 0.\n" in capsys.readouterr().out
    assert reward.run_prm(words) == 0
    accuracy = re.search(r"Held-out data\n  accuracy +(\S+)", capsys.readouterr().out)
    for folder, merge in (("run", []), ("exported", ["--merge"] if adapters else [])):
        if folder == "exported":
            export.run([str(tmp_path / "run" / "checkpoint-2"), str(tmp_path / folder), *merge])
        to = str(tmp_path / f"{folder}.jsonl")
        data = ["--dataset_name", str(tmp_path / "data"), "--dataset_split", "test", "--output", to]
        assert score_run(["--model_name_or_path", str(tmp_path / folder), *data]) == 0
        assert accuracy is not None and f" | {accuracy[1]} (" in capsys.readouterr().out
    assert report.run([to]) == 0
    assert f"The model tells right from wrong in {float(accuracy[1]):.1%}" in capsys.readouterr().out
    said = [json.loads((tmp_path / folder / "verdict.json").read_text()) for folder in ("run", "exported-report")]
    rewards = [reward for line in Path(to).read_text().splitlines() for reward in json.loads(line)["step_rewards"]]
    assert [each["rewards"]["mean"] for each in said] == pytest.approx([sum(rewards) / len(rewards)] * 2, abs=1e-5)
    page = (tmp_path / "exported-report" / "index.html").read_text()
    assert re.search(r"<summary>step \d+:\nreward -?\d", page)


GOOD = {"prompt": "Go:", "completions": ["one", "two"], "labels": [1, 0]}
PREPARED = {"input_ids": [5, 6], "labels": [-100, 1]}
BAD: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *((GOOD, {"labels": labels}) for labels in ([1], [1, None], [1, 2])),
    (GOOD, {"completions": [], "labels": None}),
    *((GOOD, change) for change in ({"completions": []}, {"completions": None}, {"prompt": None})),
    *((PREPARED, {"labels": labels}) for labels in ([-100, 2], [1], [-100, 0, 1])),
]


@pytest.mark.parametrize(("good", "change"), BAD)
def test_bad_row_is_named(make: Make, good: dict[str, Any], change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=rf"Row 1 .*{next(iter(change))}"):
        make([good, good | change])


def test_labels_removed_by_truncation_are_counted(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    rows = [GOOD, GOOD | {"completions": ["one", "two three four five six seven"]}, GOOD]
    length = len(make(rows).train_dataset[0]["input_ids"])
    assert "labels" not in caplog.text
    make(rows, max_length=length)
    assert "in 1 of 3 rows (the first is row 1), truncation removed labels" in caplog.text
    unlabeled = Dataset.from_list([{"input_ids": [5, 6], "labels": [-100, -100]}])
    with pytest.raises(UserError, match="max_length"):
        make(unlabeled)
    make(rows, unlabeled)
    assert "eval dataset" in caplog.text
    caplog.clear()
    make(rows, Dataset.from_list(rows), train_on_last_step_only=True)
    assert "labels" not in caplog.text


def test_step_without_tokens_is_named(make: Make) -> None:
    rows = [GOOD | {"completions": ["one", ""]}]
    with pytest.raises(UserError, match=r"completions\[1\].*step_separator"):
        make(rows, step_separator="")
    assert [label for label in make(rows).train_dataset[0]["labels"] if label != -100] == [1, 0]


def test_extra_columns_change_no_solution(make: Make) -> None:
    row = GOOD | {"labels": [True, False]}
    extra = {"chosen": "a", "rejected": "b", "scores": [1.0, 2.0], "input_ids": [1], "answer_ids": [[1]], "grades": 1}
    tokens = {"chosen_ids": [1], "rejected_ids": [2], "margin": 1.0}
    plain, more = (make([each]).train_dataset[:] for each in (row, row | extra | tokens))
    assert plain == more
    again = [{key: value[0] for key, value in plain.items()} | tokens]
    assert make(again).train_dataset[:] == plain


def test_pair_settings_and_models_are_rejected(make: Make, model: str, tmp_path: Path) -> None:
    for name, value in {"margin_scale": 0.5, "step_separator": None}.items():
        with pytest.raises(UserError, match=name):
            settings(tmp_path, **{name: value})
    rewards = tiny.tiny_model(AutoTokenizer.from_pretrained(model))
    with pytest.raises(UserError, match="AutoModelForTokenClassification"):
        PRMTrainer(rewards, settings(tmp_path), train_dataset=solutions(2))
    with pytest.raises(UserError, match="PRMConfig"):
        PRMTrainer(load(model), RewardConfig(str(tmp_path)), train_dataset=solutions(2))
    with pytest.raises(UserError, match="Row 0 .* `labels`"):
        make(solutions(2).remove_columns("labels"))


def test_adapters_train_equally_packed_and_padded(model: str, tmp_path: Path) -> None:
    found = []
    for packing in (True, False):
        peft_config = LoraConfig(task_type=TaskType.TOKEN_CLS, r=4, target_modules=["q_proj", "v_proj"])
        torch.manual_seed(0)
        trainer = run_of(model, tmp_path, packing=packing, peft_config=peft_config)
        found.append(losses(trainer))
    assert found[0] == pytest.approx(found[1], abs=1e-6)
    trainer.save_model(str(tmp_path / "saved"))
    again = AutoPeftModelForTokenClassification.from_pretrained(str(tmp_path / "saved"), num_labels=2)
    assert torch.equal(again.state_dict()[HEAD], trainer.model.state_dict()[HEAD].cpu())
    ours = [row["step_rewards"] for row in score(str(tmp_path / "saved"), solutions(3))]
    (tmp_path / "saved" / BASE_CONFIG).unlink()  # TRL saves adapters without it
    for row, expected in zip(score(str(tmp_path / "saved"), solutions(3)), ours, strict=True):
        assert row["step_rewards"] == pytest.approx(expected, abs=1e-6)  # another load: see `test_heads.py`


@pytest.mark.parametrize(("family", "obstacle"), [("Gemma", None), ("GPT2", "no `score` head")])
def test_families_are_tested_before_packing(model: str, tmp_path: Path, family: str, obstacle: str | None) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    made, rows = classifier(family, len(tokenizer)), solutions(8)
    trainer = PRMTrainer(made, settings(tmp_path), train_dataset=rows, processing_class=tokenizer)
    reason = trainer.batch_plan.padding_reason
    assert (reason is None) if obstacle is None else (obstacle in reason)
