"""Causal language models of which transformers has no classifier become reward models, here and elsewhere."""

import json
from pathlib import Path
from typing import Any

import apart
import peft
import pytest
import torch
from decoders import PAD
from recent_families import DECODERS, HYBRIDS, MULTIMODAL, tiny_config
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from trl_tpu.errors import UserError
from trl_tpu.modeling.forward import PackingImpossible
from trl_tpu.modeling.head_spec import ONE_REWARD, HeadSpec
from trl_tpu.modeling.heads import auto_class_of
from trl_tpu.modeling.load import load_classifier, load_model
from trl_tpu.modeling.packability import make_packable

FAMILIES = [each for each in (*DECODERS, *HYBRIDS) if each not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES]
_IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))

#: What a user without this package runs: the rewards of saved models.
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
    """Folder of a causal language model of each family."""
    folder = tmp_path_factory.mktemp("causal")
    for family in FAMILIES:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(family))
        for parameter in model.parameters():
            parameter.data.add_(0.02 * torch.randn_like(parameter))
        model.save_pretrained(folder / family)
    return folder


def states_of(model: Any, head: Any) -> torch.Tensor:
    """The hidden states that a model's head is given."""
    seen = list[torch.Tensor]()
    with head.register_forward_pre_hook(lambda _, args: seen.append(args[0])), torch.no_grad():
        model(_IDS, attention_mask=torch.ones_like(_IDS))
    return seen[0]


def test_they_load_with_a_new_head_train_and_load_again_anywhere(saved: Path, tmp_path: Path) -> None:
    rewards, packed = dict[str, list[float]](), dict[str, bool]()
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
        assert found == rewards[family], family
        try:
            make_packable(again, PAD)
            packed[family] = True
        except PackingImpossible:
            packed[family] = False
    process = apart.run("-c", PLAIN, str(tmp_path), json.dumps(_IDS.tolist()), USE_TORCH_XLA="0")
    elsewhere = json.loads(process.stdout.splitlines()[-1])
    assert elsewhere == {family: pytest.approx(each, abs=1e-6) for family, each in rewards.items()}
    assert [family for family, is_packed in packed.items() if not is_packed] == []


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_of_a_multimodal_checkpoint_the_language_model_is_read(kind: str, tmp_path: Path) -> None:
    """Or all of it, where transformers' classifier, or its text model, is a multimodal one."""
    torch.manual_seed(0)
    body = AutoModelForImageTextToText.from_config(tiny_config(kind)).eval()
    body.save_pretrained(tmp_path)
    model, info = load_classifier(str(tmp_path), ONE_REWARD, num_labels=1, dtype=torch.float32)
    assert {*info["missing_keys"]} == {"score.weight"}
    expected = states_of(body, body.get_output_embeddings())
    torch.testing.assert_close(states_of(model.eval(), model.score), expected, rtol=1e-5, atol=1e-5)
    make_packable(model, PAD)


def test_adapters_are_loaded_over_a_new_head(saved: Path, tmp_path: Path) -> None:
    """By a process that has not made the class yet."""
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


def test_a_checkpoint_that_lacks_more_than_the_head_is_refused(saved: Path) -> None:
    folder = saved / "granite"
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="up_proj"):
        load_classifier(str(folder), ONE_REWARD, num_labels=1)


def test_process_rewards_have_a_head_for_each_token(saved: Path) -> None:
    outputs = HeadSpec(step_separator="\n")
    model, info = load_classifier(str(saved / "cohere2"), outputs, num_labels=2, dtype=torch.float32)
    assert {*info["missing_keys"]} == {"score.weight", "score.bias"}
    assert model(_IDS).logits.shape == (2, 9, 2) and type(model).__name__ == "Cohere2ForTokenClassification"


@pytest.mark.parametrize("kind", ["mamba2", "pegasus", "marian"])
def test_models_that_cannot_be_are_refused_with_the_reason(kind: str) -> None:
    with pytest.raises(UserError, match="attention|encoder"):
        auto_class_of(CONFIG_MAPPING[kind](), ONE_REWARD)
    assert AutoModelForSequenceClassification is ONE_REWARD.auto_class
