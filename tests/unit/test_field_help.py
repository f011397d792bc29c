"""Each field of a config is described once, in the docstring; what is read and copied of it keeps its form."""

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest

from trl_tpu.config.reward_config import RewardConfig
from trl_tpu.scripts.score import ScoreArguments
from trl_tpu.scripts.utils import DatasetMixtureConfig, ScriptArguments
from trl_tpu.trainer.model_config import ModelConfig


@pytest.mark.parametrize("config", [RewardConfig, ModelConfig, ScriptArguments, DatasetMixtureConfig, ScoreArguments])
def test_the_help_of_every_field_is_in_the_docstring(config: Any) -> None:
    described = " ".join(config.__doc__.split())
    own = [field for field in dataclasses.fields(config) if field.name in config.__annotations__]
    assert own
    for field in own:
        assert len(field.metadata["help"]) > 10 and field.metadata["help"] in described, field.name


def test_a_copy_of_a_config_keeps_the_hubs_token_and_a_pickle_does_not(tmp_path: Path) -> None:
    args = RewardConfig(str(tmp_path), bf16=False, report_to="none", hub_token="secret", packing=True)
    args.model_init_kwargs = {"token": "secret", "dtype": "float32"}
    for copied in (copy.copy(args), copy.deepcopy(args)):
        assert copied.hub_token == "secret" and copied.model_init_kwargs == args.model_init_kwargs
    assert b"secret" not in pickle.dumps(args) and "secret" not in args.to_json_string()
    assert "secret" not in str(args.to_sanitized_dict()) and args.model_init_kwargs["token"] == "secret"
    unpickled = pickle.loads(pickle.dumps(args))
    assert (unpickled.hub_token, unpickled.packing) == (None, "true")
