"""`trl-tpu reward --dry_run` says what training would do, and does nothing."""

from pathlib import Path

import pytest

from trl_tpu.scripts import reward


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ("--max_steps 5", 5),
        ("--num_train_epochs 1.5 --per_device_train_batch_size 128 --gradient_accumulation_steps 2", 12),
    ],
)
def test_the_command_shows_it_and_leaves_nothing(
    flags: str, steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model_name_or_path", "synthetic:tiny", "--dataset_name", "synthetic:numbers", *flags.split()]
    reward.run([*words, "--output_dir", str(tmp_path / "run"), "--report_to", "none", "--dry_run", "--push_to_hub"])
    shown = capsys.readouterr().out
    assert "Which is " in shown and "Batches of " in shown and f"\n{steps} steps; nothing was trained" in shown
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["synthetic-tiny"]  # the model that is trained
