"""Adapters out of a checkpoint: as peft saves them, and merged into their base."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exports
import peft
import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.checkpoint.export import export_checkpoint
from trl_tpu.checkpoint.state_dict import trained_weights
from trl_tpu.errors import UserError

LORA: dict[str, Any] = {"task_type": "SEQ_CLS", "r": 4, "init_lora_weights": False}
KINDS: dict[str, tuple[Callable[[], PreTrainedModel], peft.PeftConfig]] = {
    "lora": (exports.llama, peft.LoraConfig(target_modules="all-linear", **LORA)),
    "rslora, biases": (
        lambda: exports.llama(attention_bias=True),
        peft.LoraConfig(target_modules=["q_proj"], use_rslora=True, bias="all", alpha_pattern={"0.*": 3}, **LORA),
    ),
    "dora": (exports.llama, peft.LoraConfig(target_modules=["q_proj", "up_proj"], use_dora=True, **LORA)),
    "embeddings": (exports.llama, peft.LoraConfig(target_modules=["embed_tokens", "v_proj"], **LORA)),
    "added tokens": (exports.llama, peft.LoraConfig(trainable_token_indices={"embed_tokens": [3, 60]}, **LORA)),
    "modules to save": (exports.llama, peft.LoraConfig(modules_to_save=["score", "norm", "embed_tokens"], **LORA)),
    "experts": (
        exports.experts,
        peft.LoraConfig(target_parameters=["experts.gate_up_proj", "experts.down_proj"], **(LORA | {"r": 1})),
    ),
    "ia3": (exports.llama, peft.IA3Config(task_type="SEQ_CLS", init_ia3_weights=False)),
}  # fmt: skip


@pytest.fixture(params=KINDS)
def adapted(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A model with random adapters; its base is a language model's checkpoint, without a reward head."""
    make, config = KINDS[request.param]
    model = make()
    model.config.architectures = [type(model).__name__]
    folder = tmp_path / "base"
    model.save_pretrained(folder)
    causal = AutoModelForCausalLM.from_pretrained(folder)  # takes the backbone, and a head of its own
    causal.save_pretrained(folder)
    read = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    result = peft.get_peft_model(read, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in result.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    return result.eval()


def lora(base: PreTrainedModel, folder: Path, **settings: Any) -> Any:
    """Adapters of ``q_proj`` on a base that is saved in a folder, read in float32."""
    base.save_pretrained(folder)
    read = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    return peft.get_peft_model(read, peft.LoraConfig(target_modules=["q_proj"], **settings))


def state_checkpoint(adapted: Any, folder: Path) -> Path:
    """A checkpoint of several hosts: the adapters are in its state alone."""
    adapted.peft_config["default"].save_pretrained(folder)
    exports.write_state(folder / "state", trained_weights(adapted))
    return folder


def test_adapters_are_written_as_peft_does_and_merged_as_peft_does(adapted: Any, tmp_path: Path) -> None:
    checkpoint, saved = state_checkpoint(adapted, tmp_path / "c"), tmp_path / "saved"
    adapted.save_pretrained(saved)
    expected = load_file(saved / "adapter_model.safetensors")
    for source, out in ((checkpoint, tmp_path / "from_state"), (saved, tmp_path / "from_files")):
        export_checkpoint(source, out)
        assert exports.same_weights(load_file(out / "adapter_model.safetensors"), expected)
        again = peft.AutoPeftModelForSequenceClassification.from_pretrained(out, num_labels=1)
        assert exports.same_weights(peft.get_peft_model_state_dict(again), peft.get_peft_model_state_dict(adapted))

    for source, out in ((checkpoint, tmp_path / "merged_state"), (saved, tmp_path / "merged_files")):
        export_checkpoint(source, out, merge=True, max_shard_size="20KB")
        assert not list(out.glob("adapter*")) and len(list(out.glob("*.safetensors"))) > 2
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    reference = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", num_labels=1)
    for out in (tmp_path / "merged_state", tmp_path / "merged_files"):
        merged, info = AutoModelForSequenceClassification.from_pretrained(out, num_labels=1, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        # the same float32 operations
        assert exports.same_weights(merged.state_dict(), reference.state_dict())


def test_a_bfloat16_base_is_merged_in_float32_and_rounded_once(tmp_path: Path) -> None:
    adapted = lora(exports.llama().bfloat16(), tmp_path / "base", **LORA)
    checkpoint = state_checkpoint(adapted, tmp_path / "c")
    export_checkpoint(checkpoint, tmp_path / "rounded", merge=True)
    export_checkpoint(checkpoint, tmp_path / "exact", merge=True, dtype=torch.float32)
    expected = adapted.merge_and_unload().state_dict()
    assert exports.same_weights(load_file(tmp_path / "exact" / "model.safetensors"), expected)
    rounded = {name: tensor.bfloat16() for name, tensor in expected.items()}
    assert exports.same_weights(load_file(tmp_path / "rounded" / "model.safetensors"), rounded)


def test_a_head_that_is_nowhere_and_another_base_are_refused(tmp_path: Path) -> None:
    exports.llama(hidden_size=16).save_pretrained(tmp_path / "narrow")
    adapted = lora(exports.llama(), tmp_path / "base", r=2)  # no task type: the head is frozen, and not saved
    checkpoint = state_checkpoint(adapted, tmp_path / "c")
    AutoModelForCausalLM.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="score.weight"):
        export_checkpoint(checkpoint, tmp_path / "out", merge=True)
    with pytest.raises(UserError, match="q_proj.lora_A"):
        export_checkpoint(checkpoint, tmp_path / "out", merge=True, base=str(tmp_path / "narrow"))
    assert not (tmp_path / "out").exists()


def test_a_value_that_float16_cannot_hold_is_refused(tmp_path: Path) -> None:
    """In adapters, and in what comes of merging them."""
    adapted = lora(exports.llama(), tmp_path / "base", **LORA)
    for parameter in adapted.parameters():
        parameter.data.fill_(300)  # the product of two is beyond float16
    checkpoint = state_checkpoint(adapted, tmp_path / "c")
    export_checkpoint(checkpoint, tmp_path / "adapters", dtype=torch.float16)
    with pytest.raises(UserError, match="q_proj.weight.*--dtype"):
        export_checkpoint(checkpoint, tmp_path / "out", merge=True, dtype=torch.float16)
    adapted.score.weight.data[:] = 1e5
    shutil.rmtree(checkpoint)
    with pytest.raises(UserError, match="score.weight.*--dtype"):
        export_checkpoint(state_checkpoint(adapted, checkpoint), tmp_path / "out", dtype=torch.float16)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("peft_config", [None, peft.LoraConfig(target_modules=["q_proj"], **LORA)])
def test_a_trainers_checkpoint_has_what_an_export_needs(peft_config: Any, tmp_path: Path) -> None:
    model = tiny.save_tiny(tmp_path / "base", ["some", "text"])
    args = RewardConfig(str(tmp_path / "run"), report_to="none", bf16=False, max_steps=1, save_steps=1)
    trainer: Any = RewardTrainer(model, args, train_dataset=tiny.made_up_pairs(8), peft_config=peft_config)
    trainer.train()
    merge, out = peft_config is not None, tmp_path / "out"
    export_checkpoint(tmp_path / "run" / "checkpoint-1", out, merge=merge)
    expected = trainer.model.merge_and_unload() if merge else trainer.model
    exported = AutoModelForSequenceClassification.from_pretrained(out, num_labels=1)
    assert exports.same_weights(exported.state_dict(), expected.state_dict())
    assert exported.config.pad_token_id == expected.config.pad_token_id
    assert AutoTokenizer.from_pretrained(out).chat_template == trainer.processing_class.chat_template
    export_checkpoint(tmp_path / "run" / "checkpoint-1", tmp_path / "unmerged")
    assert (tmp_path / "unmerged" / "tokenizer_config.json").is_file()
