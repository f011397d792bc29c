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
# family -> recurrent layer -> the rules of its recurrent state, if a function takes an initial state
FOUND = {
    "bailing_hybrid": {"BailingHybridDeltaAttention": KIMI},
    "bamba": {"BambaMixer": MAMBA2},
    "falcon_h1": {"FalconH1Mixer": MAMBA2},
    "falcon_mamba": {"FalconMambaMixer": ""},
    "glm5_next": {"Glm5NextTextLinearAttention": KIMI},
    "granitemoehybrid": {"GraniteMoeHybridMambaLayer": MAMBA2},
    "inkling": {"InklingShortConvolution": ""},
    "inkling2": {"Inkling2ShortConvolution": "", "Inkling2DynamicShortConvolution": ""},
    "jamba": {"JambaMambaMixer": ""},
    "kimi_linear": {"KimiLinearDeltaAttention": KIMI},
    "lfm2": {"Lfm2ShortConv": ""},
    "lfm2_moe": {"Lfm2MoeShortConv": ""},
    "lfm3": {"Lfm3ShortConv": ""},
    "mamba": {"MambaMixer": ""},
    "mamba2": {"Mamba2Mixer": MAMBA2},
    "nemotron_h": {"NemotronHMamba2Mixer": MAMBA2},
    "olmo_hybrid": {"OlmoHybridGatedDeltaNet": DELTA},
    "qwen3_5": {"Qwen3_5GatedDeltaNet": DELTA},
    "qwen3_5_moe": {"Qwen3_5MoeGatedDeltaNet": DELTA},
    "qwen3_next": {"Qwen3NextGatedDeltaNet": DELTA},
    "qwen4_exp": {"Qwen4ExpTextGatedDeltaNet": DELTA, "Qwen4ExpTextNGramEmbedding": ""},
    "zamba": {"ZambaMambaMixer": ""},
    "zamba2": {"Zamba2MambaMixer": MAMBA2},
    "zaya": {"ZayaCCAProjection": ""},
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
_STATE = re.compile(
    r"update_(conv|recurrent)_state|set_linear_cache|rnn_state|self\.(recurrent_states|conv1d_state) ="
)


def codes_of(code: CodeType) -> dict[str, CodeType]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {each.co_qualname: each for each in inner} | {k: v for each in inner for k, v in codes_of(each).items()}


def test_layers_are_found_and_missed_as_listed() -> None:
    found: dict[str, dict[str, str]] = {}
    missed: dict[str, set[str]] = {}
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        source = file.read_text(encoding="utf-8")
        if _STATE.search(source) is None:
            continue
        tree, codes = ast.parse(source), codes_of(compile(source, str(file), "exec"))
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        rules = {name for name, node in functions.items() if INITIAL_STATES & {arg.arg for arg in node.args.args}}
        for layer in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            forward = codes.get(f"{layer.name}.forward")
            if forward is None:
                continue
            if not STATE_UPDATES.isdisjoint(forward.co_names):
                family = found.setdefault(file.parent.name, {})
                family[layer.name] = " ".join(sorted(rules & {*forward.co_names}))
                assert len({*_CACHE_PARAMETERS} & {*forward.co_varnames[: forward.co_argcount]}) == 1, layer.name
            elif _STATE.search(ast.get_source_segment(source, layer) or ""):
                missed.setdefault(file.parent.name, set()).add(layer.name)
    assert found == {family: FOUND[family] for family in found if family in FOUND}
    assert missed == {family: {*MISSED[family]} for family in missed if family in MISSED}
    assert len(found) > 20 and missed.keys() == MISSED.keys()
