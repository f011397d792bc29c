"""The recurrent layers that `recurrent_layers` finds and misses in transformers, as read from its source.

A family that a new transformers adds belongs into one of these tables once somebody has read its code. Nothing else
needs a change: the model itself is tried before training.
"""

import ast
import re
from pathlib import Path
from types import CodeType

import transformers

from trl_tpu.modeling.recurrent_layers import _CACHE_PARAMETERS, INITIAL_STATES, STATE_UPDATES

DELTA = "torch_chunk_gated_delta_rule torch_recurrent_gated_delta_rule"
KIMI = "chunk_kimi_delta_attention recurrent_kimi_delta_attention"
MAMBA2 = "mamba2_chunk_scan mamba2_split_conv1d_scan_combined"
# the rules of the recurrent state, if a function takes an initial state -> families and their recurrent layers
FOUND = {
    KIMI: "bailing_hybrid.BailingHybridDeltaAttention glm5_next.Glm5NextTextLinearAttention "
    "kimi_linear.KimiLinearDeltaAttention",
    MAMBA2: "bamba.BambaMixer falcon_h1.FalconH1Mixer granitemoehybrid.GraniteMoeHybridMambaLayer "
    "mamba2.Mamba2Mixer nemotron_h.NemotronHMamba2Mixer zamba2.Zamba2MambaMixer",
    "": "falcon_mamba.FalconMambaMixer inkling.InklingShortConvolution inkling2.Inkling2ShortConvolution "
    "inkling2.Inkling2DynamicShortConvolution jamba.JambaMambaMixer lfm2.Lfm2ShortConv "
    "lfm2_moe.Lfm2MoeShortConv lfm3.Lfm3ShortConv mamba.MambaMixer qwen4_exp.Qwen4ExpTextNGramEmbedding "
    "zamba.ZambaMambaMixer zaya.ZayaCCAProjection",
    DELTA: "olmo_hybrid.OlmoHybridGatedDeltaNet qwen3_5.Qwen3_5GatedDeltaNet "
    "qwen3_5_moe.Qwen3_5MoeGatedDeltaNet qwen3_next.Qwen3NextGatedDeltaNet "
    "qwen4_exp.Qwen4ExpTextGatedDeltaNet",
}
# family -> layers with states that are not found, and why
MISSED = {
    "minimax": {"MiniMaxLightningAttention": "another protocol"},
    "qwen4_exp": {"Qwen4ExpTextPLELayer": "a helper of the forward updates the state"},
    "recurrent_gemma": {
        "RecurrentGemmaRglru": "the layer itself holds its state",
        "RecurrentGemmaRecurrentBlock": "the layer itself holds its state",
    },
    "xlstm": {"xLSTMModel": "another protocol"},
}
# ways to keep a state over tokens in text models
STATE = re.compile(r"update_(conv|recurrent)_state|set_linear_cache|rnn_state|self\.(recurrent_states|conv1d_state) =")


def codes_of(code: CodeType) -> dict[str, CodeType]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {each.co_qualname: each for each in inner} | {k: v for each in inner for k, v in codes_of(each).items()}


def test_layers_are_found_and_missed_as_listed() -> None:
    found: dict[str, str] = {}
    missed: dict[str, set[str]] = {}
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        source = file.read_text(encoding="utf-8")
        if STATE.search(source) is None:
            continue
        tree, codes = ast.parse(source), codes_of(compile(source, str(file), "exec"))
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        rules = {name for name, node in functions.items() if INITIAL_STATES & {arg.arg for arg in node.args.args}}
        for layer in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            forward = codes.get(f"{layer.name}.forward")
            if forward is None:
                continue
            if not STATE_UPDATES.isdisjoint(forward.co_names):
                found[f"{file.parent.name}.{layer.name}"] = " ".join(sorted(rules & {*forward.co_names}))
                assert len({*_CACHE_PARAMETERS} & {*forward.co_varnames[: forward.co_argcount]}) == 1, layer.name
            elif STATE.search(ast.get_source_segment(source, layer) or ""):
                missed.setdefault(file.parent.name, set()).add(layer.name)
    families = {layer.partition(".")[0] for layer in found}
    listed = {layer: rules for rules, layers in FOUND.items() for layer in layers.split()}
    assert found == {layer: rules for layer, rules in listed.items() if layer.partition(".")[0] in families}
    assert missed == {family: {*MISSED[family]} for family in missed if family in MISSED}
    assert len(families) > 20 and missed.keys() == MISSED.keys()
