"""Fixtures shared by several files of unit tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def good_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny saved model that trains and scores. Tests that change it must copy it."""
    import tiny  # imports torch, which the process that distributes tests does not need

    folder = tmp_path_factory.mktemp("good") / "model"
    tokenizer = tiny.tiny_tokenizer(["Count on from 1: 2 3 4 4 2"], vocab_size=300)
    tiny.tiny_model(tokenizer, hidden=16, layers=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command, expects status 2 and returns its one error line."""

    def run(*words: Any) -> str:
        from trl_tpu import cli

        with pytest.raises(SystemExit) as ended:
            cli.main([str(word) for word in words])
        assert ended.value.code == 2
        errors = capsys.readouterr().err
        assert "Traceback" not in errors
        (told,) = (line for line in errors.splitlines() if line.startswith("trl-tpu") and ": error: " in line)
        return told

    return run
