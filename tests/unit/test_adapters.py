"""Adapters follow their flags, train the right weights, reload to equal rewards, and warn otherwise."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import trl
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from trl.trainer import utils as reference

from trl_tpu.errors import UserError
from trl_tpu.modeling import adapters
from trl_tpu.modeling.head_spec import ONE_REWARD
from trl_tpu.trainer.model_config import ModelConfig

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 0]])


def tiny(kind: Any = LlamaForSequenceClassification, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return kind(LlamaConfig(vocab_size=32, num_key_value_heads=1, pad_token_id=0, num_labels=1, **sizes, **kwargs))


def trainable(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


LORA = {"use_peft": True, "lora_task_type": "SEQ_CLS"}


PEFT_FLAGS = [
    ("get_peft_config", LORA | {"lora_r": 4, "lora_alpha": 3, "use_rslora": True, "lora_modules_to_save": ["score"]}),
    ("get_peft_config", LORA | {"lora_target_modules": ["all-linear"], "use_dora": True, "lora_dropout": 0.0}),
    ("get_peft_config", LORA | {"lora_target_modules": ["q"], "lora_target_parameters": ["mlp.experts"]}),
    ("get_peft_config", {}),
    ("get_quantization_config", {"load_in_8bit": True}),
    ("get_quantization_config", {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "dtype": "bfloat16"}),
    ("get_quantization_config", {"load_in_4bit": True, "use_bnb_nested_quant": True}),
    ("get_quantization_config", {"load_in_4bit": True, "bnb_4bit_quant_storage": "uint8"}),
    ("get_quantization_config", {}),
]


@pytest.mark.parametrize(("name", "flags"), PEFT_FLAGS)
def test_peft_configs_equal_trls(name: str, flags: dict[str, Any]) -> None:
    def outcome(module: Any, config: Any) -> Any:
        try:
            made = getattr(module, name)(config(**flags))
        except Exception as error:  # for example, bitsandbytes is not installed
            return type(error)
        return made and (type(made), made.to_dict())

    ours = outcome(adapters, ModelConfig)
    assert ours == outcome(reference, trl.ModelConfig) and (ours is None) == (not flags)


def test_second_adapters_are_rejected() -> None:
    with pytest.raises(UserError, match="peft_config"):
        adapters.add_adapters(adapters.add_adapters(tiny(), peft.LoraConfig()), peft.LoraConfig())


TRAINABLE_TOKENS = [
    ({}, {"embed_tokens": [3, 4]}),
    ({"trainable_token_indices": [4, 9]}, {"embed_tokens": [4, 9, 3]}),
    ({"trainable_token_indices": {"embed_tokens": [9]}}, {"embed_tokens": [9, 3, 4]}),
    ({"modules_to_save": ["embed_tokens"]}, None),  # all tokens are trained already
]


@pytest.mark.parametrize(("settings", "expected"), TRAINABLE_TOKENS)
def test_added_tokens_extend_the_trainable_tokens(settings: Any, expected: dict[str, list[int]] | None) -> None:
    config = peft.LoraConfig(**settings)
    given = config.to_dict()
    model: Any = adapters.add_adapters(tiny(), config, [3, 4])
    assert model.peft_config["default"].trainable_token_indices == expected and config.to_dict() == given
    before = model.get_input_embeddings().weight.detach().clone()
    model(IDS.clamp(max=4)).logits.sum().backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0).step()
    changed = (model.get_input_embeddings().weight != before).any(dim=1).nonzero().flatten().tolist()
    assert changed == [4]  # the only trained token in the batch


def test_adapters_get_gradients_through_recomputed_layers() -> None:
    grads = {}
    for checkpointing in (False, True):
        torch.manual_seed(1)
        model: Any = adapters.add_adapters(tiny(), peft.LoraConfig())
        adapters.prepare_adapters(model, gradient_checkpointing=checkpointing)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        model.train()
        model(IDS, use_cache=False).logits.sum().backward()
        grads[checkpointing] = {name: p.grad for name, p in model.named_parameters() if "lora_B" in name}
    assert all(grad is not None and grad.abs().max() > 0 for grad in grads[True].values())
    torch.testing.assert_close(grads[True], grads[False])


HEADS = [
    (peft.LoraConfig(), True),
    (peft.LoraConfig(target_modules="all-linear"), True),
    (adapters.get_peft_config(ModelConfig(use_peft=True)), False),  # the default flags
    (peft.LoraConfig(modules_to_save=["score"]), False),
    (peft.PromptTuningConfig(num_virtual_tokens=2, task_type="SEQ_CLS"), False),
    (None, False),
]


@pytest.mark.parametrize(("config", "warns"), HEADS)
def test_random_frozen_head_is_reported_and_kept(config: Any, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny() if config is None else adapters.add_adapters(tiny(), config)
    before = trainable(model)
    adapters.warn_if_head_is_frozen(model)
    assert trainable(model) == before
    assert ["modules_to_save=['score']" in record.getMessage() for record in caplog.records] == [True] * warns


@pytest.mark.parametrize("config", [peft.LoraConfig(task_type="SEQ_CLS"), peft.LoraConfig(modules_to_save=["score"])])
def test_saved_adapters_give_the_same_rewards_when_reloaded(config: peft.LoraConfig, tmp_path: Path) -> None:
    tiny(LlamaForCausalLM).save_pretrained(tmp_path / "base")
    base = LlamaForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
    model: Any = adapters.add_adapters(base, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in trainable(model):
                parameter.normal_(std=0.5)
    expected = model.eval()(IDS).logits
    model.save_pretrained(tmp_path / "adapters")
    reloaded: Any = adapters.load_adapted_model(str(tmp_path / "adapters"), ONE_REWARD, num_labels=1)
    torch.testing.assert_close(reloaded.eval()(IDS).logits, expected)


@pytest.mark.parametrize("config", ['{"r": 4', '{"peft_type": "SORCERY"}'])
def test_broken_adapters_are_rejected_by_name(config: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(UserError, match=str(tmp_path)) as refused:
        adapters.load_adapted_model(str(tmp_path), ONE_REWARD, num_labels=1)
    assert "\n" not in str(refused.value)


NAMED = [
    *(peft.LoraConfig(), peft.LoraConfig(task_type="SEQ_CLS"), peft.LoraConfig(trainable_token_indices=[3])),
    peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2),
    peft.PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2),
]


@pytest.mark.parametrize("config", NAMED, ids=lambda config: config.peft_type.value)
def test_adapter_names_match_trained_and_saved_parameters(config: Any, tmp_path: Path) -> None:
    model: Any = adapters.add_adapters(tiny(), config)
    state = model.state_dict(keep_vars=True)
    names = adapters.adapter_names(model, state)
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "adapter_model.safetensors")
    assert sorted(tuple(state[name].shape) for name in names) == sorted(tuple(t.shape) for t in written.values())
    assert names == trainable(model)
