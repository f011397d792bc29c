"""Training affects neither other models nor unread parts of a model, and its adapters load in other programs."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import subprocesses
import tiny
import torch
from peft import LoraConfig
from shared_weights import language_model
from training import QUIET
from transformers import AutoModelForSequenceClassification
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_tpu import RewardConfig, RewardTrainer
from trl_tpu.checkpoint.export import export_checkpoint
from trl_tpu.modeling.forward import OURS

REGISTRIES = ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
OF_TRANSFORMERS = [dict(registry) for registry in REGISTRIES]  # before any training


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_other_models_never_run_ours(implementation: str, tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    judge = tiny.tiny_model(tokenizer, layers=3, attn_implementation=implementation).eval()
    batch = tokenizer(["Count on from 3: 4 5", "Count on from 1: 2"], padding=True, return_tensors="pt")
    with torch.no_grad():
        before = judge(**batch).logits

    trained = tiny.tiny_model(tokenizer, attn_implementation=implementation)
    args = RewardConfig(str(tmp_path), max_steps=2, packing=True, report_to="none", disable_tqdm=True)
    trainer = RewardTrainer(trained, args, train_dataset=tiny.made_up_pairs(22), processing_class=tokenizer)
    trainer.train()
    trained.cpu()
    assert trained.config._attn_implementation == f"{OURS}{implementation}"

    called: list[str] = []
    for registry in REGISTRIES:
        for name, function in list(registry.items()):
            if name.startswith(OURS):
                monkeypatch.setitem(registry._global_mapping, name, watched(called, name, function))
    with torch.no_grad():
        assert torch.equal(judge(**batch).logits, before) and not called
        trained(**batch)
        assert called  # the watched functions are those that our model calls
        saved = str(tmp_path / "saved")
        trainer.save_model(saved)
        assert OURS not in json.dumps(json.loads(Path(saved, "config.json").read_text(encoding="utf-8")))
        called.clear()
        anywhere = AutoModelForSequenceClassification.from_pretrained(saved).eval()
        torch.testing.assert_close(anywhere(**batch).logits, copy.deepcopy(trained).eval()(**batch).logits)
    assert judge.config._attn_implementation == implementation and anywhere.config._attn_implementation == "sdpa"
    for registry, theirs in zip(REGISTRIES, OF_TRANSFORMERS, strict=True):
        own = {name: function for name, function in registry.items() if not name.startswith(OURS)}
        assert own == {name: function for name, function in theirs.items() if not name.startswith(OURS)}


def watched(called: list[str], name: str, function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize("way", ["full", "LoRA", "trained"])
def test_tower_is_frozen_gets_no_adapters_and_is_kept(way: str, tokenizer: Any, tmp_path: Path, caplog: Any) -> None:
    """A vision tower is not reached by text. Its layers have the names of the language model's."""
    model = str(tmp_path / "model")
    language_model("gemma3", vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id).save_pretrained(model)
    tokenizer.save_pretrained(model)
    args = RewardConfig(str(tmp_path / "run"), **QUIET, max_steps=2, train_unread_towers=way == "trained")
    peft_config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"]) if way == "LoRA" else None
    trainer = RewardTrainer(model, args, train_dataset=tiny.made_up_pairs(16), peft_config=peft_config)
    tower = {name: each for name, each in trainer.model.named_parameters() if "vision_tower" in name}
    before = {name: each.detach().clone() for name, each in tower.items()}
    trainer.train()
    assert len(tower) > 10 and not any("lora" in name for name in tower)
    assert {each.requires_grad for each in tower.values()} == {way == "trained"}
    assert all(torch.equal(each, before[name]) for name, each in tower.items()) or way == "trained"
    said = [record.getMessage() for record in caplog.records if record.name.startswith("trl_tpu")]
    assert ("vision_tower" in "".join(said)) == (way != "trained")
    if way == "full":
        trainer.save_model(str(tmp_path / "saved"))
        saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").state_dict()
        assert all(torch.equal(saved[name], value) for name, value in before.items())


def test_adapters_on_a_generic_head_load_by_the_code_of_their_card(tokenizer: Any, tmp_path: Path) -> None:
    base, out, text = str(tmp_path / "base"), tmp_path / "run", "Count on from 3: 4 5"
    language_model("lfm2", vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id).save_pretrained(base)
    tokenizer.save_pretrained(base)
    peft_config = LoraConfig(task_type="SEQ_CLS", r=2, target_modules="all-linear")
    args = RewardConfig(str(out), **QUIET, max_steps=2, learning_rate=1e-2, save_strategy="no")
    trainer = RewardTrainer(base, args, train_dataset=tiny.made_up_pairs(16), peft_config=peft_config)
    trainer.train()
    trainer.save_model()
    code = (out / "README.md").read_text().partition("```python\n")[2].partition("model = ")
    code_to_load = f"{code[0]}model = {code[2].partition(chr(10))[0]}"
    asks = f"print(model.eval()(**tokenizer({text!r}, return_tensors='pt')).logits.item())"
    export_checkpoint(out, merged := f"{out}-merged", merge=True)
    card, code_of_merged = Path(merged, "README.md").read_text(), code_to_load.replace(str(out), merged)
    assert code_of_merged != code_to_load and code_to_load in card and f"`{base}`" in card
    printed = subprocesses.run_without_server("-c", f"{code_to_load}\n{asks}\n{code_of_merged}\n{asks}")
    with torch.no_grad():
        expected = trainer.model.eval()(**tokenizer(text, return_tensors="pt")).logits.item()
    assert [float(reward) for reward in printed.split()[-2:]] == pytest.approx([expected] * 2, abs=1e-6)
