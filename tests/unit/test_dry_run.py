"""`trl-tpu reward --dry_run` says what training would do, and does nothing."""

from pathlib import Path
from typing import Any

import pytest
import tiny
from transformers import TrainerCallback

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.scripts import reward
from trl_tpu.scripts.dry_run import describe_pair, describe_run


class _Begun(Exception):
    pass


class _StopsAtTheStart(TrainerCallback):
    def on_train_begin(self, *_: Any, **__: Any) -> None:
        raise _Begun


def make_trainer(out: Path, **settings: Any) -> RewardTrainer:
    pairs = tiny.made_up_pairs(21)
    tokenizer = tiny.tiny_tokenizer([*pairs["prompt"], *pairs["chosen"], *pairs["rejected"]])
    args = RewardConfig(str(out), report_to="none", per_device_train_batch_size=4, **settings)
    return RewardTrainer(tiny.tiny_model(tokenizer), args, train_dataset=pairs, processing_class=tokenizer)


def test_a_pair_is_shown_with_what_it_shares_and_the_token_that_is_scored() -> None:
    tokenizer = tiny.tiny_tokenizer(["ab"], vocab_size=300)
    a, b, c = (tokenizer.convert_tokens_to_ids(letter) for letter in "abc")
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    shown = describe_pair([a, b, a, eos], [a, b, c, pad, pad], tokenizer, number=7)
    assert shown.splitlines() == [
        "Pair 7: 4 and 5 tokens, of which the first 2 are shared",
        "  shared    'ab'",
        "  chosen    'a<eos>'",
        "            scored at token 4: '<eos>'",
        "  rejected  'c<pad><pad>'",
        "            scored at token 3: 'c'",
    ]
    tokenizer.pad_token = "<eos>"  # as TRL pads where there is no pad token
    assert "scored at token 3: 'a'" in describe_pair([a, b, a, eos], [a, b, c], tokenizer)


def test_a_long_text_is_shown_by_its_ends() -> None:
    tokenizer = tiny.tiny_tokenizer(["ab"], vocab_size=300)
    ids = tokenizer("begins" + "x" * 5000 + "ends")["input_ids"]
    line = describe_pair(ids, ids, tokenizer).splitlines()[1]
    assert "'begins" in line and line.endswith("ends'") and " ... " in line and len(line) < 700


@pytest.mark.parametrize(
    "settings",
    [
        {"num_train_epochs": 3},
        {"num_train_epochs": 1.5, "gradient_accumulation_steps": 2},
        {"max_steps": 7},
        {"dataloader_drop_last": True, "warmup_steps": 2, "lr_scheduler_type": "cosine"},
    ],
)
def test_the_schedule_is_that_of_training(settings: Any, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, **settings)
    shown = describe_run(trainer)
    trainer.add_callback(_StopsAtTheStart())
    with pytest.raises(_Begun):
        trainer.train()
    assert f"  {trainer.state.max_steps} steps of {4 * settings.get('gradient_accumulation_steps', 1)} pairs" in shown
    assert trainer.describe() in shown and "21 pairs" in shown


def test_the_command_shows_it_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model_name_or_path", "synthetic:tiny", "--dataset_name", "synthetic:numbers", "--max_steps", "5"]
    reward.run([*words, "--output_dir", str(tmp_path / "run"), "--report_to", "none", "--dry_run", "--push_to_hub"])
    shown = capsys.readouterr().out
    assert "Which is larger" in shown and "5 steps of" in shown and "ends before the first step" in shown
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["synthetic-tiny"]  # the model that is trained
