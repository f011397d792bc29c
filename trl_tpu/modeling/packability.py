"""Lets a model read packed rows, if they give its own rewards: which a trial before training shows."""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..data.collate import BatchCollator, LayOut
from ..data.collators import DataCollatorForPreference
from ..packing.batch import Batch
from ..packing.pack import pack_unpadded, pad
from ..packing.planned import pack
from ..packing.shapes import CHUNK, RowPlan, RowShape
from .adapters import without_adapters
from .forward import OURS, MaskRule, PackingImpossible, attend_by, record_scores, run_packed
from .head_spec import find_score_head
from .tree_states import States, call_with_states, carries_states, forget_tree_states, use_tree_states

# relative, between float32 sums in two orders
_ROUNDING = 2e-5

# whose code a model may be made of: known not to look across the tokens of a row but through attention
_LIBRARIES = (
    *("builtins", "torch", "transformers", "peft", "accelerate", "trl_tpu"),
    *("bitsandbytes", "deepspeed", "liger_kernel", "torch_xla", "torchao"),
)
# adapters that change each token's activations by themselves, whatever row it is in
_TOKEN_WISE_ADAPTERS = frozenset({"LORA", "ADALORA", "IA3", "LOHA", "LOKR", "OFT", "VERA", "LN_TUNING"})

# transformers' own models of these types gave equal rewards and gradients in float64: see test_tree_attention.py
PROVEN_TYPES = frozenset(
    {"gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe"}
)


def check_unmodified(model: nn.Module) -> None:
    """Make sure that ``model`` computes rewards by its libraries' own code, with a linear head.

    Asked before training, and whenever batches are.

    Args:
        model: A sequence classifier, possibly with adapters.

    Raises:
        PackingImpossible: If a forward on the class or the instance is a user's, a hook is, the head is more than a
            linear layer, or adapters do more than change each token's activations.
    """
    for config in getattr(model, "peft_config", {}).values():
        if config.peft_type not in _TOKEN_WISE_ADAPTERS:
            kind = config.peft_type.value
            raise PackingImpossible(f"adapters of the kind {kind} may do more than change each token by itself")
    for name, module in model.named_modules():
        where = f"{type(module).__name__} ({name})" if name else type(module).__name__
        if not _is_of_a_library(module.forward):
            raise PackingImpossible(f"the forward of {where} is not a library's own, and packed rows would bypass it")
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        if not all(map(_is_of_a_library, hooks)):
            raise PackingImpossible(
                f"{where} has a forward hook of yours, which may read or change what is in padded rows"
            )
    base = without_adapters(model)
    head = find_score_head(base)
    if head is None:
        raise PackingImpossible(f"{type(base).__name__} has no `score` head")
    while not isinstance(head, nn.Linear):
        inner = getattr(head, "base_layer", None) or getattr(head, "original_module", None)
        if inner is None:
            raise PackingImpossible(f"the `score` head is a {type(head).__name__} instead of a linear layer")
        head = inner


def own_code_of(model: PreTrainedModel) -> str | None:
    """Name the part of ``model`` that computes rewards by a user's own code; None if there is none."""
    try:
        check_unmodified(model)
    except PackingImpossible as found:
        return str(found)
    return None


def _is_of_a_library(function: Any) -> bool:
    """Tell whether a function, and every function that it wraps, is a library's code."""
    if isinstance(function, partial):
        is_own = _is_of_a_library(function.func)
    else:
        # the globals are where it was defined; `__module__` may be copied from a function that it wraps
        function = getattr(function, "__func__", function)
        defined_in = getattr(function, "__globals__", {"__name__": type(function).__module__})
        is_own = defined_in.get("__name__", "").partition(".")[0] in _LIBRARIES
    wrapped = getattr(function, "__wrapped__", None)
    return is_own and (wrapped is None or _is_of_a_library(wrapped))


@torch.no_grad()
def reads_padding(model: nn.Module, pad_token_id: int) -> bool:
    """Return whether a tiny batch gets other rewards when it is padded further.

    A forward that averages over all columns does, and one that reads the last column, as transformers' does after
    prompt tuning. Also true where it is unknown: weights on the meta device or coarser than float32, or a forward
    that fails.
    """
    parameter = next(model.parameters())
    if parameter.is_meta or parameter.dtype not in (torch.float32, torch.float64):
        return True
    ids = [token for token in range(1, 21) if token != pad_token_id]
    examples = [{"answers": [ids[:9], ids[5:9]]}, {"answers": [ids[3:10], ids[8:14]]}]
    rewards = []
    try:
        with _in_eval_mode(model):
            for multiple in (1, 16):
                batch = DataCollatorForPreference(pad_token_id, multiple)(examples)
                rows = {name: tensor.to(parameter.device) for name, tensor in batch.items()}
                rewards.append(model(**rows).logits.squeeze(-1))
    except Exception:  # whatever a user's code does with inputs that it does not expect
        return True
    return not _are_close(*rewards)


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    try:
        model.eval()
        yield
    finally:
        model.train(was_training)


def _are_close(values: torch.Tensor, expected: torch.Tensor) -> bool:
    """Tell whether values differ by no more than float32 rounds; false for NaN."""
    return bool((values - expected).abs().max() <= _ROUNDING * expected.abs().max())


def make_packable(model: nn.Module, pad_token_id: int, *, is_unpadded: bool = True) -> None:
    """Let ``model`` read packed rows, and make sure that they are exact.

    Args:
        model: A sequence classifier, possibly with adapters.
        pad_token_id: Its pad token.
        is_unpadded: Whether rows are those of `pack_unpadded`, not of planned shapes.

    Raises:
        PackingImpossible: If the model has no `score` head, is modified, makes its own masks, or computes other
            rewards.
    """
    check_unmodified(model)
    base = without_adapters(model)
    config: Any = base.config.get_text_config()
    from_transformers = type(base).__module__.startswith("transformers.models.")
    looks_both_ways = getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True)
    is_planned = next(model.parameters()).is_meta  # by `trl-tpu plan`: training tries packing, with weights
    if is_planned or (from_transformers and config.model_type in PROVEN_TYPES and not looks_both_ways):
        use_tree_masks(base)
        use_tree_states(base)
    else:
        check_packing_is_exact(model, pad_token_id, is_unpadded=is_unpadded)
    record_scores(model)


def use_tree_masks(model: PreTrainedModel) -> None:
    """Let ``model`` build masks for packed rows, and attend in them as its attention implementation does.

    Ordinary batches get the same masks as before.

    Raises:
        PackingImpossible: If the implementation takes no mask for each query and key, as flash and flex attention, or
            the model's own code attends.
    """
    name = model.config._attn_implementation
    if name.startswith(OURS):
        return
    plain = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    if plain is None or name.startswith(("flash", "flex")):
        raise PackingImpossible(
            f"packed rows need attention that takes a mask, but the model uses {name!r}. Load it with "
            "`attn_implementation=` 'sdpa' or 'eager'"
        )
    attend_by(model, name, plain, ALL_ATTENTION_FUNCTIONS.get(name, _eager_attention))
    if not model.config._attn_implementation.startswith(OURS):
        raise PackingImpossible(f"{type(model).__name__} does not attend through transformers' attention interface")


def _eager_attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Attend by the function that a model's module has beside it, transformers' "eager"."""
    beside = (sys.modules[kind.__module__] for kind in type(module).__mro__)
    own = next(own for each in beside if (own := getattr(each, "eager_attention_forward", None)))
    return own(module, *args, **kwargs)


@torch.no_grad()
def check_packing_is_exact(model: nn.Module, pad_token_id: int, *, is_unpadded: bool = True) -> None:
    """Let ``model`` read packed rows, and compare the rewards of a tiny batch with those in padded rows before.

    A rejected model attends as before. Arguments are those of `make_packable`.

    Raises:
        PackingImpossible: If they differ by more than float32 rounds, the weights are too coarse to tell, the model
            fails on either, or it has a window that no mask showed and a tiny batch cannot.
    """
    name, parameter = type(model).__name__, next(model.parameters())
    if parameter.dtype not in (torch.float32, torch.float64):
        raise PackingImpossible(
            f"{name} is of a family for which packing is tried out first, and {parameter.dtype} would hide a "
            "difference: load it in float32, over which bf16=True computes"
        )
    base: Any = without_adapters(model)
    attention, examples = base.config._attn_implementation, _tiny_batch(pad_token_id)
    planned = partial(pack, plan=RowPlan((RowShape(2, 32),)))
    unpadded = partial(pack_unpadded, attention_crossover_length=100)
    layouts: list[LayOut] = [pad, planned, unpadded]
    if use_tree_states(base):
        # each layout has a way of its own to hand states on, and the other way is not used
        examples += _branches_of_chunks(base, pad_token_id)
        layouts = [pad, unpadded if is_unpadded else partial(pack, plan=RowPlan((RowShape(2, 2048),), chunk=CHUNK))]
    padded: dict[str, torch.Tensor] = {}
    try:
        with _in_eval_mode(model):
            use_tree_masks(base)  # raises before anything is computed
            for layer in {type(each): each for each in base.modules() if carries_states(each)}.values():
                _check_it_goes_on(layer, base.config.get_text_config().hidden_size)
            base.set_attn_implementation(attention)  # a model's own code may ask for that name in padded rows
            for lay_out in layouts:
                (batch,) = BatchCollator(lay_out, pad_token_id)(examples).parts
                values, rules = _read(model, batch.map_tensors(lambda tensor: tensor.to(parameter.device)))
                if not padded:
                    padded = values
                    use_tree_masks(base)
                    continue
                _reject_hidden_windows(base, rules)
                for what, in_packed_rows in values.items():
                    if not _are_close(in_packed_rows, padded[what]):
                        difference = (in_packed_rows - padded[what]).abs().max()
                        raise PackingImpossible(
                            f"packed and padded {what} of {name} differ by {difference:.2g}, which {parameter.dtype} "
                            "does not explain: its attention or positions do not follow the mask and position ids "
                            "that it is given, or its scores are not of the last token"
                        )
    except Exception as error:  # whatever a model's own code does with inputs that it does not expect
        base.set_attn_implementation(attention)
        forget_tree_states(base)
        if isinstance(error, PackingImpossible):
            raise
        raise PackingImpossible(f"{name} fails on packed rows ({type(error).__name__}: {error})") from error


def _tiny_batch(pad_token_id: int) -> list[dict[str, Any]]:
    """Make pairs that share prefixes of different lengths, nothing, and one sequence that is a prefix of the other."""
    ids = [token for token in range(1, 42) if token != pad_token_id]
    pairs = [
        *((ids[:9], [*ids[:5], *ids[10:14]]), (ids[20:24], [*ids[20:22], *ids[30:33]])),
        *((ids[3:20], ids[25:30]), (ids[5:12], ids[5:9])),
    ]
    return [{"answers": list(pair)} for pair in pairs]


def _check_it_goes_on(layer: nn.Module, hidden_size: int) -> None:
    """Raise PackingImpossible unless a recurrent layer, given its state, goes on as within a sequence.

    Tried with larger weights than new layers have, in which a state that is lost may be too small to see.
    """
    layer, generator = copy.deepcopy(layer).float(), torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(next(layer.parameters()).device)

    for parameter in layer.parameters():
        if parameter.is_floating_point():
            parameter.add_(0.1 * random(*parameter.shape))
    tokens, states = random(1, 140, hidden_size), States()
    parts = [call_with_states(layer, part, states) for part in (tokens[:, :70], tokens[:, 70:])]
    at_once = call_with_states(layer, tokens, States())
    whole, found = (each[0] if isinstance(each, tuple) else each for each in (at_once, parts[1]))
    if not _are_close(found, whole[:, 70:]):
        difference = (found - whole[:, 70:]).abs().max()
        raise PackingImpossible(
            f"{type(layer).__name__} does not go on from the state that it is given: its outputs differ by "
            f"{difference:.2g}"
        )


def _branches_of_chunks(model: PreTrainedModel, pad_token_id: int) -> list[dict[str, Any]]:
    """Make pairs that branch on either side of the chunks in which recurrent layers scan, some into one token."""
    config = model.config.get_text_config().to_dict()
    sizes = (size for name, size in config.items() if name.endswith("chunk_size") and isinstance(size, int))
    chunk, ids = min(max([64, *sizes]), 256), [token for token in range(1, 42) if token != pad_token_id]
    text = [ids[(place * place + place // 7) % 40] for place in range(2 * chunk + 9)]
    first, second, third = text[: chunk - 1], text[: chunk + 3], text[5 : 2 * chunk]
    pairs = [(first + ids[:1], first + ids[1:9]), (second + ids[2:30], second + ids[3:4]), (third, third + ids[4:7])]
    return [{"answers": list(pair)} for pair in pairs]


def _read(model: nn.Module, batch: Batch[torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[MaskRule]]:
    """Return the scores at the scored tokens, and the hidden states that they are computed from; and the mask rules.

    Hidden states are compared too, since a small head hides how they differ. The scores of padded rows are the
    model's own.
    """
    rules, seen, at = list[MaskRule](), list[torch.Tensor](), (batch.score_row_S, batch.score_column_S)
    head: Any = find_score_head(model)
    with head.register_forward_pre_hook(lambda _, args: seen.append(args[0])):
        if batch.is_packed:
            with run_packed(model, batch) as noted:
                scores, rules = noted.scores[0][at], noted.rules
        else:
            logits = model(input_ids=batch.input_ids_RL, attention_mask=batch.attention_mask_RL).logits
            scores = logits[at] if logits.dim() == 3 else logits[batch.score_row_S]
    return {"hidden states": seen[0][at], "rewards": scores}, rules


def _reject_hidden_windows(model: PreTrainedModel, rules: list[MaskRule]) -> None:
    """Reject a window that is no part of a mask rule: it counts columns, which only rows longer than it would show."""
    config = model.config.get_text_config().to_dict()
    sizes = {name: size for name, size in config.items() if name.endswith(("window", "window_size"))}
    windows = {name: size for name, size in sizes.items() if isinstance(size, int) and size > 1}
    if windows and all(rule is causal_mask_function for rule in rules):
        listed = ", ".join(f"{name}={size}" for name, size in windows.items())
        raise PackingImpossible(
            f"the config of {type(model).__name__} has {listed}, but it asked for causal masks only: its window may "
            "count columns of a row"
        )
