"""Models whose packing is inexact are rejected, and the trial changes no model. See also `test_recent_families.py`."""

import copy
import functools
from contextlib import nullcontext
from typing import Any

import decoders
import peft
import pytest
import torch
import transformers
from decoders import PAD
from recent_families import tiny_classifier
from torch import nn
from transformers.models.qwen3_5 import modeling_qwen3_5

from trl_tpu.modeling import forward, recurrent_layers
from trl_tpu.modeling.forward import PackingImpossible
from trl_tpu.modeling.packability import make_packable

TINY: dict[str, Any] = decoders.TINY | {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
TINY["max_position_embeddings"] = 1024
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512}
# packed rewards differ from padded ones in rows that are long enough, or attention uses custom code
NOT_EXACT: dict[str, tuple[str, dict[str, Any]]] = {
    "ALiBi": ("Bloom", {}),
    "ALiBi, Falcon": ("Falcon", {"alibi": True}),
    "windows of columns": (
        "GPTNeo",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 256},
    ),
    "both ways": ("Gemma3Text", {"use_bidirectional_attention": True, **WINDOWS}),
    "encoder": ("Bert", {}),
    "encoder, ModernBERT": ("ModernBert", {}),
    "encoder-decoder": ("T5", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}),
}


@pytest.mark.parametrize("family", NOT_EXACT)
def test_families_with_inexact_packing_are_rejected(family: str) -> None:
    """The weights are transformers' initial ones, with nearly uniform attention."""
    name, settings = NOT_EXACT[family]
    settings = TINY | settings
    if name in ("Bloom", "Falcon", "GPTNeo"):  # their configs have attributes with setters that raise
        settings = {key: value for key, value in settings.items() if key not in ("head_dim", "num_key_value_heads")}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    with pytest.raises(PackingImpossible, match=name):
        make_packable(transformers.AutoModelForSequenceClassification.from_config(config), PAD)


STATES: dict[str, Any] = {"kept": lambda state: state, "lost": lambda state: None, "detached": torch.Tensor.detach}


def as_module(func: Any) -> torch.nn.Module:
    """Return what the package `kernels` makes of each function that it may replace."""

    class Func(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return func(*args, **kwargs)

    return Func()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state", STATES)
def test_lost_states_and_states_without_gradient_are_rejected(
    state: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 `kernels` is installed, and in bfloat16 a kernel with the signature of flash-linear-attention's."""
    rule = modeling_qwen3_5.torch_chunk_gated_delta_rule

    def changed(*args: Any, initial_state: Any = None, **kwargs: Any) -> Any:
        return rule(*args, initial_state=None if initial_state is None else STATES[state](initial_state), **kwargs)

    @functools.wraps(rule)
    def kernel(q: Any, k: Any, v: Any, g: Any, beta: Any, **kwargs: Any) -> Any:
        assert q.dtype == torch.bfloat16
        return changed(q, k, v, g, beta, **kwargs)

    chosen = as_module(changed) if dtype == torch.float32 else kernel
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", chosen)
    monkeypatch.setattr(forward, "few_kernels", lambda _: dtype == torch.bfloat16)
    recurrent_layers._with_other_functions.cache_clear()
    model = tiny_classifier("qwen3_5_text", hidden_size=256)
    with nullcontext() if state == "kept" else pytest.raises(PackingImpossible, match=f"go on from .* in {dtype}"):
        make_packable(model, PAD, dtype=dtype)
    recurrent_layers._with_other_functions.cache_clear()


def rejected_unless_exact(family: str) -> Any:
    return nullcontext() if family == "mixtral" else pytest.raises(PackingImpossible)


@pytest.mark.parametrize("pad_token_id", [0, 2, 9, 12, 24, 63])
def test_trial_works_with_any_pad_token(pad_token_id: int) -> None:
    """Sequences of the trial must not end in the pad token: they would be scored before it."""
    make_packable(tiny_classifier("mixtral", pad_token_id=pad_token_id), pad_token_id)


def test_bfloat16_weights_too_coarse_for_the_trial_are_not_packed() -> None:
    """With small weights, bfloat16 rounding exceeds the effect of a state or a position."""
    with pytest.raises(PackingImpossible, match="bfloat16"):
        make_packable(tiny_classifier("mixtral").bfloat16(), PAD)


@pytest.mark.parametrize("family", ["mixtral", "jamba"])
@pytest.mark.parametrize("training", [True, False])
def test_trial_changes_neither_model_nor_random_state(family: str, training: bool) -> None:
    model = tiny_classifier(family).train(training)
    before, attention = copy.deepcopy(model.state_dict()), model.config._attn_implementation
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    with rejected_unless_exact(family):
        make_packable(model, PAD)
    assert (model.config._attn_implementation == attention) == (family == "jamba")
    assert torch.equal(torch.rand(1), expected)
    assert {module.training for module in model.modules()} == {training}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("family", "adapters"),
    [
        ("mixtral", peft.LoraConfig(r=2, init_lora_weights=False)),
        ("mixtral", peft.AdaLoraConfig(init_r=4, target_r=2, total_step=9)),  # its forward leaves out hooks
        ("jamba", peft.LoraConfig(r=2, init_lora_weights=False)),
    ],
)
def test_trial_includes_the_adapters(family: str, adapters: peft.PeftConfig) -> None:
    adapters.task_type, adapters.target_modules = "SEQ_CLS", ["q_proj"]
    model = peft.get_peft_model(tiny_classifier(family), adapters)
    with rejected_unless_exact(family):
        make_packable(model, PAD)


class OwnMasks(transformers.LlamaForSequenceClassification):
    """Like some remote code: takes position ids and builds its own mask."""

    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, **_: Any) -> Any:
        states = self.model.embed_tokens(input_ids).cumsum(dim=1)
        return self.score(states)


class Llama(transformers.LlamaForSequenceClassification):
    """Like some remote code: transformers' class under another name."""


def test_remote_code_is_packed_only_with_transformers_forwards() -> None:
    make_packable(Llama(transformers.LlamaConfig(**TINY)), PAD)
    with pytest.raises(PackingImpossible, match="OwnMasks"):
        make_packable(OwnMasks(transformers.LlamaConfig(**TINY)), PAD)
    with pytest.raises(PackingImpossible, match="Linear"):
        make_packable(nn.Linear(2, 1), PAD)
