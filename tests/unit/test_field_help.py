"""Each field of a config is described once, in the docstring; what is read and copied of it keeps its form."""

import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from trl_tpu.scripts.parser import TrlParser
from trl_tpu.scripts.score import ScoreArguments
from trl_tpu.scripts.utils import DatasetMixtureConfig, ScriptArguments
from trl_tpu.trainer.model_config import ModelConfig
from trl_tpu.trainer.reward_config import RewardConfig

CONFIGS = [RewardConfig, ModelConfig, ScriptArguments, DatasetMixtureConfig, ScoreArguments]


@pytest.mark.parametrize("config", CONFIGS)
def test_the_help_of_every_field_is_in_the_docstring(config: Any) -> None:
    described = " ".join(config.__doc__.split())
    own = [field for field in dataclasses.fields(config) if field.name in config.__annotations__]
    assert own
    for field in own:
        assert len(field.metadata["help"]) > 10 and field.metadata["help"] in described, field.name


def test_help_ends_where_the_next_field_begins_and_is_that_of_the_class_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    helps = {field.name: field.metadata["help"] for field in dataclasses.fields(RewardConfig)}
    assert helps["learning_rate"] == "The initial learning rate for AdamW."
    assert helps["optim"] == "The optimizer: a name of transformers' OptimizerNames."
    assert helps["pad_token"] == "Deprecated. Set the tokenizer's own `pad_token`."
    theirs = {field.name: field.metadata["help"] for field in dataclasses.fields(TrainingArguments)}
    assert theirs["learning_rate"] != helps["learning_rate"] and theirs["max_steps"] == helps["max_steps"]
    with pytest.raises(SystemExit):
        TrlParser(CONFIGS[:4]).parse_args(["--help"])
    assert "Pulls rewards towards mean zero" in " ".join(capsys.readouterr().out.split())


def test_a_copy_of_a_config_keeps_the_hubs_token_and_a_pickle_does_not(tmp_path: Path) -> None:
    args = RewardConfig(str(tmp_path), bf16=False, report_to="none", hub_token="secret", packing=True, remat="dots")
    args.model_init_kwargs = {"token": "secret", "dtype": "float32"}
    for copied in (copy.copy(args), copy.deepcopy(args)):
        assert copied.hub_token == "secret" and copied.model_init_kwargs == args.model_init_kwargs
    assert b"secret" not in pickle.dumps(args) and "secret" not in args.to_json_string()
    assert "secret" not in str(args.to_sanitized_dict()) and args.model_init_kwargs["token"] == "secret"
    unpickled = pickle.loads(pickle.dumps(args))
    assert unpickled.hub_token is None
    assert (unpickled.packing, unpickled.remat, unpickled.remat_policy) == ("true", "dots", "dots")
    assert args.to_dict()["packing"] == "true" and '"packing": "true"' in args.to_json_string()
