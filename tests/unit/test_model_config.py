"""ModelConfig is TRL's, field by field, but for the differences that are listed here with their reasons."""

import dataclasses
import typing
from typing import Any

import pytest
import trl
from transformers import HfArgumentParser

from trl_tpu.scripts.parser import TrlParser
from trl_tpu.scripts.utils import DatasetMixtureConfig, ScriptArguments
from trl_tpu.trainer.model_config import ModelConfig

DIFFERENT_DEFAULTS = {
    # field: (TRL's default, ours, why)
    "lora_task_type": (
        "CAUSAL_LM",
        "SEQ_CLS",
        "peft refuses a sequence classifier with CAUSAL_LM, so TRL's default fails",
    ),
}


def test_fields_order_types_and_defaults_are_trls_but_for_the_table() -> None:
    *ours, old = dataclasses.fields(ModelConfig)
    theirs = dataclasses.fields(trl.ModelConfig)
    assert old.name == "torch_dtype", "the name of `dtype` up to TRL 0.23"
    assert [field.name for field in ours] == [field.name for field in theirs]
    assert typing.get_type_hints(ModelConfig) == typing.get_type_hints(trl.ModelConfig) | {"torch_dtype": str | None}
    different = {o.name: (t.default, o.default) for o, t in zip(ours, theirs, strict=True) if o.default != t.default}
    assert different == {name: row[:2] for name, row in DIFFERENT_DEFAULTS.items()}
    for field, reference in zip(ours, theirs, strict=True):
        assert field.metadata.get("choices") == reference.metadata.get("choices")


@pytest.mark.parametrize(
    "values",
    [
        {"lora_target_modules": ["all-linear"]},
        {"lora_target_modules": ["q_proj", "v_proj"]},
        {"lora_target_modules": "all-linear"},
        {"lora_target_modules": []},
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        {"load_in_4bit": True, "load_in_8bit": True},
    ],
)
def test_what_is_made_of_the_values_is_what_trl_makes(values: dict[str, Any]) -> None:
    def made(config: Any) -> Any:
        try:
            made = dataclasses.asdict(config(lora_task_type="SEQ_CLS", **values))
            return {name: value for name, value in made.items() if name != "torch_dtype"}
        except ValueError as error:
            return str(error).split(":")[0]

    assert made(ModelConfig) == made(trl.ModelConfig)


def test_the_old_name_of_dtype_is_read_and_given() -> None:
    assert ModelConfig(dtype="bfloat16").torch_dtype == "bfloat16"
    with pytest.warns(FutureWarning, match="use `dtype`"):
        assert ModelConfig(torch_dtype="bfloat16").dtype == "bfloat16"
    assert ModelConfig().trust_remote_code is False


def test_both_parsers_read_it_beside_the_other_arguments_of_a_script() -> None:
    words = "--model_name_or_path m --use_peft --lora_r 4 --lora_target_modules a b --dtype bfloat16 --dataset_name d"
    script, plain = HfArgumentParser((ScriptArguments, ModelConfig)).parse_args_into_dataclasses(words.split())
    parser: Any = TrlParser((ScriptArguments, ModelConfig, DatasetMixtureConfig))
    assert parser.parse_args_and_config(words.split())[:2] == (script, plain)
    expected = {"lora_r": 4, "lora_target_modules": ["a", "b"], "dtype": "bfloat16", "use_peft": True}
    assert {name: getattr(plain, name) for name in expected} == expected
