"""Causal language models without a classifier in transformers become reward models, also without this package.

Score heads compute in float32, also within autocast, and every copy uses its own weights.
"""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import subprocesses
import tiny
import torch
import transformers
from decoders import PAD
from label_formats import NAMES, WEIGHTS, graded
from recent_families import DECODERS, HYBRIDS, MULTIMODAL, tiny_config
from safetensors.torch import load_file
from training import QUIET
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from trl_tpu import RewardConfig, RewardTrainer, score
from trl_tpu.errors import UserError
from trl_tpu.modeling.head_spec import ONE_REWARD, HeadSpec, find_score_head, keep_heads_in_float32
from trl_tpu.modeling.heads import auto_class_of
from trl_tpu.modeling.load import load_classifier, load_model
from trl_tpu.modeling.packability import make_packable

FAMILIES = [each for each in (*DECODERS, *HYBRIDS) if each not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES]
_IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))

#: Code of a user without this package: computes the rewards of saved models.
PLAIN = """
import json, sys, torch
from pathlib import Path
from transformers import AutoModelForSequenceClassification
folder, ids = sys.argv[1:]
ids, rewards = torch.tensor(json.loads(ids)), {}
for each in sorted(Path(folder).iterdir()):
    model = AutoModelForSequenceClassification.from_pretrained(each, trust_remote_code=True).eval()
    with torch.no_grad():
        rewards[each.name] = model(ids, attention_mask=torch.ones_like(ids)).logits.flatten().tolist()
print(json.dumps(rewards))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a causal language model of each family."""
    folder = tmp_path_factory.mktemp("causal")
    for family in FAMILIES:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(family))
        for parameter in model.parameters():
            parameter.data.add_(0.02 * torch.randn_like(parameter))
        model.save_pretrained(folder / family)
    return folder


def states_of(model: Any, head: Any) -> torch.Tensor:
    """Return the hidden states that the model passes to its head."""
    seen = list[torch.Tensor]()
    with head.register_forward_pre_hook(lambda _, args: seen.append(args[0])), torch.no_grad():
        model(_IDS, attention_mask=torch.ones_like(_IDS))
    return seen[0]


def test_models_train_with_a_new_head_and_reload_elsewhere(saved: Path, tmp_path: Path) -> None:
    """`test_recent_families.py` packs them."""
    rewards = dict[str, list[float]]()
    for family in FAMILIES:
        model, info = load_classifier(str(saved / family), ONE_REWARD, num_labels=1, dtype=torch.float32)
        assert {*info["missing_keys"]} == {"score.weight"}, family
        body = AutoModelForCausalLM.from_pretrained(saved / family).eval()
        expected = states_of(body, body.get_output_embeddings())
        torch.testing.assert_close(states_of(model.eval(), model.score), expected, rtol=1e-5, atol=1e-5, msg=family)
        model.train()(_IDS, attention_mask=torch.ones_like(_IDS)).logits.sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad
            rewards[family] = model.eval()(_IDS, attention_mask=torch.ones_like(_IDS)).logits.flatten().tolist()
        model.save_pretrained(tmp_path / family)
        config = json.loads((tmp_path / family / "config.json").read_text())
        assert config["architectures"] == [type(model).__name__] and "SequenceClassification" in type(model).__name__
        assert {"score.weight"} < load_file(tmp_path / family / "model.safetensors").keys()
        again, info = load_classifier(str(tmp_path / family), ONE_REWARD, num_labels=1, dtype=torch.float32)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        with torch.no_grad():
            found = again.eval()(_IDS, attention_mask=torch.ones_like(_IDS)).logits.flatten().tolist()
        # Rewards are near 1. Weights in a file's memory are aligned otherwise, and kernels may add in another order.
        assert found == pytest.approx(rewards[family], abs=1e-6), family
    process = subprocesses.run("-c", PLAIN, str(tmp_path), json.dumps(_IDS.tolist()), USE_TORCH_XLA="0")
    elsewhere = json.loads(process.stdout.splitlines()[-1])
    assert elsewhere == {family: pytest.approx(each, abs=1e-6) for family, each in rewards.items()}


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_multimodal_checkpoint_loads_its_language_model(kind: str, tmp_path: Path) -> None:
    """The full model is loaded if transformers' classifier or the text model itself is multimodal."""
    torch.manual_seed(0)
    body = AutoModelForImageTextToText.from_config(tiny_config(kind)).eval()
    body.save_pretrained(tmp_path)
    model, info = load_classifier(str(tmp_path), ONE_REWARD, num_labels=1, dtype=torch.float32)
    assert {*info["missing_keys"]} == {"score.weight"}
    expected = states_of(body, body.get_output_embeddings())
    torch.testing.assert_close(states_of(model.eval(), model.score), expected, rtol=1e-5, atol=1e-5)
    make_packable(model, PAD)


def test_adapters_load_over_a_new_head(saved: Path, tmp_path: Path) -> None:
    """The loading process has not created the class before."""
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"], init_lora_weights=False)
    base, _ = load_classifier(str(saved / "granite"), ONE_REWARD, num_labels=1, dtype=torch.float32)
    adapted = peft.get_peft_model(base, config).eval()
    adapted.save_pretrained(tmp_path)
    del AutoModelForSequenceClassification._model_mapping._extra_content[type(base.config)]
    again = load_model(str(tmp_path)).eval()
    with torch.no_grad():
        torch.testing.assert_close(
            again(_IDS, attention_mask=torch.ones_like(_IDS)).logits,
            adapted(_IDS, attention_mask=torch.ones_like(_IDS)).logits,
        )


def test_attributes_are_trained_over_a_new_head(tmp_path: Path) -> None:
    rows = graded(8)
    tokenizer = tiny.tiny_tokenizer(rows)
    AutoModelForCausalLM.from_config(tiny_config("granite", vocab_size=len(tokenizer))).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = QUIET | {"attributes": NAMES, "attribute_weights": WEIGHTS, "ties": "skip", "max_steps": 1}
    trainer = RewardTrainer(str(tmp_path), RewardConfig(str(tmp_path / "out"), **settings), train_dataset=rows)
    trainer.train()
    trainer.save_model()
    (scored,) = score(str(tmp_path / "out"), [rows[0]])
    by_name = [[*rewards.values()] for rewards in scored["rewards_by_attribute"]]
    assert scored["rewards"] == pytest.approx([np.dot(WEIGHTS, rewards) for rewards in by_name])
    assert "trust_remote_code=True" in (tmp_path / "out" / "README.md").read_text()


def test_process_reward_models_score_every_token(saved: Path) -> None:
    outputs = HeadSpec(step_separator="\n")
    model, info = load_classifier(str(saved / "cohere2"), outputs, num_labels=2, dtype=torch.float32)
    assert {*info["missing_keys"]} == {"score.weight", "score.bias"}
    assert model(_IDS).logits.shape == (2, 9, 2) and type(model).__name__ == "Cohere2ForTokenClassification"


@pytest.mark.parametrize("kind", ["mamba2", "pegasus", "marian"])
def test_unsupported_models_are_rejected_with_the_reason(kind: str) -> None:
    with pytest.raises(UserError, match="attention|encoder"):
        auto_class_of(CONFIG_MAPPING[kind](), ONE_REWARD)
    assert AutoModelForSequenceClassification is ONE_REWARD.auto_class


# ---- heads in float32


@pytest.fixture
def model() -> torch.nn.Module:
    model = tiny.tiny_model(tiny.tiny_tokenizer(["1 2 3"]))
    for _ in range(2):  # two trainers of one model patch it twice
        keep_heads_in_float32(model)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [transformers.BertConfig, transformers.LlamaConfig])
def test_rewards_of_narrow_weights_are_float32(kind: Any, dtype: torch.dtype) -> None:
    """Weights keep their dtype, as in TRL, and are trained in it."""
    torch.manual_seed(0)
    size: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 9}
    config = kind(**size, num_attention_heads=2, num_labels=1, pad_token_id=0, dropout=0.0)
    model = transformers.AutoModelForSequenceClassification.from_config(config).to(dtype).eval()
    keep_heads_in_float32(model)
    (name, head), *_ = [pair for pair in model.named_children() if pair[0] in ("score", "classifier")]
    states: list[torch.Tensor] = []
    head.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    rewards_P = model(torch.tensor([[5, 6, 7]])).logits
    expected = states[0].float() @ head.weight.float().T
    expected = expected if head.bias is None else expected + head.bias.float()
    assert rewards_P.dtype == torch.float32
    torch.testing.assert_close(rewards_P, expected.flatten(0, -2)[-1:], atol=1e-6, rtol=1e-6)
    rewards_P.sum().backward()
    assert head.weight.grad.dtype == head.weight.dtype == dtype


def rewards(model: torch.nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(torch.tensor([[5, 6, 7]])).logits


def test_copied_model_scores_with_its_own_weights(model: torch.nn.Module) -> None:
    copied = copy.deepcopy(model)
    head = find_score_head(copied)
    assert head is not None
    with torch.no_grad():
        head.weight.mul_(2)
    assert rewards(model).dtype == torch.float32  # in autocast, too
    torch.testing.assert_close(rewards(copied), 2 * rewards(model))


def test_head_copied_by_peft_is_the_trained_one(model: torch.nn.Module) -> None:
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["q_proj"]))
    rewards(adapted).sum().backward()
    gradients = {name: parameter.grad for name, parameter in adapted.named_parameters() if ".score." in name}
    found = {name.split(".score.")[1]: gradient is not None for name, gradient in gradients.items()}
    assert found == {"original_module.weight": False, "modules_to_save.default.weight": True}
