"""ModelConfig is TRL's, field by field, but for one default."""

import dataclasses
import typing
from typing import Any

import pytest
import trl

from trl_tpu.trainer.model_config import ModelConfig


def test_fields_order_types_and_defaults_are_trls_but_for_one() -> None:
    *ours, old = dataclasses.fields(ModelConfig)
    theirs = dataclasses.fields(trl.ModelConfig)
    assert old.name == "torch_dtype", "the name of `dtype` up to TRL 0.23"
    assert [field.name for field in ours] == [field.name for field in theirs]
    assert typing.get_type_hints(ModelConfig) == typing.get_type_hints(trl.ModelConfig) | {"torch_dtype": str | None}
    different = {o.name: (t.default, o.default) for o, t in zip(ours, theirs, strict=True) if o.default != t.default}
    # peft refuses a sequence classifier with CAUSAL_LM, so TRL's default fails
    assert different == {"lora_task_type": ("CAUSAL_LM", "SEQ_CLS")}
    for field, reference in zip(ours, theirs, strict=True):
        assert field.metadata.get("choices") == reference.metadata.get("choices")


@pytest.mark.parametrize(
    "values",
    [
        {"lora_target_modules": ["all-linear"]},
        {"lora_target_modules": ["q_proj", "v_proj"]},
        {"lora_target_modules": []},
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
