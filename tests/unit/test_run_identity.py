"""Every setting is declared once, and the declaration says whether it belongs to the identity of a run."""

from dataclasses import dataclass, fields
from typing import Any

from trl_tpu import ModelConfig, RewardConfig
from trl_tpu.compat.arguments import REMOVED
from trl_tpu.config.settings import CIRCUMSTANCES, SETTINGS
from trl_tpu.experimental.prm import PRMConfig


def test_every_setting_is_declared() -> None:
    """Declare a new field in `trl_tpu.config.settings`. It belongs to a run if a resume with another value differs."""
    names = {item.name for config in (PRMConfig, ModelConfig) for item in fields(config)}
    assert names - SETTINGS.keys() == {*REMOVED}, "undeclared settings"
    assert SETTINGS.keys() - names == set(), "declared settings that no config has"
    wheres = {where for setting in SETTINGS.values() for no in setting.rejected for where in no.where.split()}
    conditions = {where for where in wheres if where not in CIRCUMSTANCES} | {each.needs for each in SETTINGS.values()}
    assert {condition.partition("=")[0] for condition in conditions} <= {*names, "remat_policy", ""}


def test_settings_of_a_run_are_told_from_those_that_may_change(tmp_path: Any) -> None:
    @dataclass
    class Own(RewardConfig):
        temperature: float = 1.0
        note: str = ""
        may_change_on_resume = RewardConfig.may_change_on_resume | {"note"}

    settings = Own(str(tmp_path), temperature=2.0, model_init_kwargs={"token": "hf_secret"}).identifying_settings()
    assert settings["temperature"] == 2.0 and "note" not in settings and "hf_secret" not in str(settings)
    assert {
        "learning_rate",
        "seed",
        "loss_type",
        "optim",
        "bf16",
        "max_length",
        "model_init_kwargs",
    } <= settings.keys()
    assert not settings.keys() & {"output_dir", "logging_steps", "mesh", "packing", "total_batch_size", *REMOVED}
