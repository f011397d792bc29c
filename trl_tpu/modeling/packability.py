"""Let a model read packed rows, if tests or a trial before training show that its packed rewards are exact."""

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_flatten
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function

from ..data.collate import BatchCollator, PackSequences
from ..data.kinds import Pairs
from ..packing.batch import Batch
from ..packing.pack import TreeLayout, pack, pack_unpadded, pad
from ..packing.read_order import CONTEXT
from ..packing.shapes import CHUNK, BatchShape, ShapePlan
from ..parallel.shard import has_no_weights, trial_mode
from . import forward, recurrent_layers
from .attention import use_tree_masks
from .forward import MaskRule, PackingImpossible, read_scores, reading, record_scores, rewards_of, run_packed
from .head_spec import find_score_head, without_adapters

# largest relative difference between float32 sums of the same numbers in two orders
_ROUNDING = 2e-5
_ROUNDING_IN_HALF = 0.1
_HOST = torch.device("cpu")
_TRIAL_IDS = 42  # token ids of the trial are smaller

# Packages whose modules read other tokens of a token row only through attention or recurrent states. All other code
# counts as user code.
_LIBRARIES = (
    *("builtins", "torch", "transformers", "peft", "accelerate", "trl_tpu"),
    *("bitsandbytes", "deepspeed", "liger_kernel", "torch_xla", "torchao"),
)
# adapters that change the activations of each token independently of all other tokens
_TOKEN_WISE_ADAPTERS = frozenset({"LORA", "ADALORA", "IA3", "LOHA", "LOKR", "OFT", "VERA", "LN_TUNING"})

# For these types of transformers' models, tests show equal packed and padded rewards and gradients in float64:
# tests/unit/test_tree_attention.py.
PROVEN_TYPES = frozenset(
    {"gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe"}
)


def user_code_in(model: nn.Module) -> str | None:
    """Return why rewards may not come from library code alone with a linear head; None if they do.

    A forward or a hook may be user code, the head may be missing or more than a linear layer, or adapters may do more
    than change the activations of each token independently. Called before training and whenever a collator is made.

    Args:
        model: A sequence classifier, possibly with adapters.
    """
    for config in getattr(model, "peft_config", {}).values():
        if config.peft_type not in _TOKEN_WISE_ADAPTERS:
            return f"adapters of the kind {config.peft_type.value} may add tokens to a token row or mix its tokens"
    for name, module in model.named_modules():
        where = f"{type(module).__name__} ({name})" if name else type(module).__name__
        if not _is_library_code(module.forward):
            return f"the forward of {where} is not library code, and packed rows would bypass it"
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        if not all(map(_is_library_code, hooks)):
            return f"{where} has a forward hook that is not library code: it may read or change padded rows"
    base = without_adapters(model)
    if (head := find_score_head(base)) is None:
        return f"{type(base).__name__} has no `score` head"
    while not isinstance(head, nn.Linear):
        inner = getattr(head, "base_layer", None) or getattr(head, "original_module", None)
        if inner is None:
            return f"the `score` head is a {type(head).__name__} instead of a linear layer"
        head = inner
    return None


def _is_library_code(function: Any) -> bool:
    """Return whether a function, and every function that it wraps, is library code."""
    if isinstance(function, partial):
        is_library = _is_library_code(function.func)
    else:
        # `__globals__` is the defining module's; functools.wraps copies `__module__` from the wrapped function
        function = getattr(function, "__func__", function)
        defined_in = getattr(function, "__globals__", {"__name__": type(function).__module__})
        is_library = defined_in.get("__name__", "").partition(".")[0] in _LIBRARIES
    wrapped = getattr(function, "__wrapped__", None)
    return is_library and (wrapped is None or _is_library_code(wrapped))


def reads_padding(model: nn.Module, pad_token_id: int) -> bool:
    """Return whether the rewards of a tiny batch change with more padding.

    They change if a forward averages over all columns, or reads the last column. transformers' classifiers do the
    latter with prompt tuning, because they then get no token ids. Also true if the check is impossible: for weights
    coarser than float32, and for a forward that fails.
    """
    parameter = next(model.parameters())
    if parameter.dtype not in (torch.float32, torch.float64):
        return True
    pairs = _tiny_pairs(pad_token_id)[:2]  # short: longer ones might change the rotary frequencies
    batches = _batches(pairs, (pad, partial(pad, lengths=(16,))), pad_token_id, parameter.device)
    try:
        with trial_mode(model):
            return not _are_close(*(rewards_of(model, batch)[0] for batch in batches))
    except Exception:  # user code may raise anything for unexpected inputs
        return True


def _are_close(values: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether values differ by float32 rounding at most; False for NaN."""
    return bool((values - expected).abs().max() <= _ROUNDING * expected.abs().max())


def make_packable(
    model: nn.Module,
    pad_token_id: int,
    is_unpadded: bool = True,
    device: torch.device = _HOST,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Let ``model`` read packed rows, and check that its packed rewards are exact.

    Args:
        model: A sequence classifier, possibly with adapters.
        pad_token_id: Id of the model's pad token.
        is_unpadded: Whether batches will be unpadded rows of `pack_unpadded`; False for rows of planned shapes.
        device: The device that the model will run on.
        dtype: The dtype that it will compute in. On a GPU, recurrent layers are also tried in this dtype: there they
            may use kernels.

    Raises:
        PackingImpossible: The model has no `score` head, runs user code, makes its own masks, or computes different
            rewards in packed rows.
    """
    if (obstacle := user_code_in(model)) is not None:
        raise PackingImpossible(obstacle)
    base = without_adapters(model)
    config: Any = base.config.get_text_config()
    from_transformers = type(base).__module__.startswith("transformers.models.")
    is_bidirectional = getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True)
    is_proven = from_transformers and config.model_type in PROVEN_TYPES and not is_bidirectional
    if is_proven or has_no_weights(model):  # without weights there is no trial
        use_tree_masks(base)
        recurrent_layers.use_tree_states(base)
    else:
        check_packing_is_exact(model, pad_token_id, is_unpadded, device, dtype)
    record_scores(model)


def check_packing_is_exact(
    model: nn.Module, pad_token_id: int, is_unpadded: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """Let ``model`` read packed rows, and compare packed with padded rewards on a tiny batch.

    The model computes in float32, on the device of its weights, and without the kernels of recurrent layers. A
    rejected model keeps its attention and its layers' forwards. See `make_packable` for the arguments.

    Raises:
        PackingImpossible: The rewards differ by more than float32 rounding, the weights are too coarse to compare, the
            model fails on packed or padded rows, or its config has an attention window that its masks do not apply.
    """
    name, parameter = type(model).__name__, next(model.parameters())
    if parameter.dtype not in (torch.float32, torch.float64):
        raise PackingImpossible(
            f"packing {name} needs a trial first, and {parameter.dtype} weights would hide a difference: load it in "
            "float32; bf16=True still computes in bfloat16"
        )
    base: Any = without_adapters(model)
    chosen, pairs = base.config._attn_implementation, _tiny_pairs(pad_token_id)
    attention = "sdpa" if "flash" in chosen else chosen  # flash attention has no float32
    length, chunk = 32, 1
    if is_recurrent := recurrent_layers.use_tree_states(base):
        pairs += _pairs_at_chunk_boundaries(base, pad_token_id)
        length, chunk = 2048, CHUNK
    # only the rows that the run uses: planned rows have padding, and pass recurrent states on in another way
    planned = partial(pack, plan=ShapePlan((BatchShape(2, length),), chunk=chunk))
    unpadded = partial(pack_unpadded, attention_crossover_length=100, layout=TreeLayout(is_recurrent=is_recurrent))
    layouts: tuple[PackSequences, ...] = (pad, unpadded if is_unpadded else planned)
    layers = {type(part): part for part in base.modules() if recurrent_layers.carries_states(part)}.values()
    hidden_size = base.config.get_text_config().hidden_size
    try:
        with trial_mode(model):
            for layer in layers if is_unpadded and forward.few_kernels(device) else []:
                _check_layer(layer, hidden_size, layouts, device, dtype)
        with trial_mode(model), recurrent_layers.without_kernels():
            base.set_attn_implementation(attention)
            use_tree_masks(base)  # raises before anything is computed
            for layer in layers:
                _check_layer(layer, hidden_size, layouts, parameter.device, torch.float32)
            padded_batch, packed_batch = _batches(pairs, layouts, pad_token_id, parameter.device)
            packed, rules = _read(model, packed_batch)
            base.set_attn_implementation(attention)  # for padded rows: the model's code may check this name
            padded, _ = _read(model, padded_batch)
            _reject_hidden_windows(base, rules)
            for quantity, values in packed.items():
                if not _are_close(values, padded[quantity]):
                    difference = (values - padded[quantity]).abs().max()
                    raise PackingImpossible(
                        f"packed and padded {quantity} of {name} differ by {difference:.2g}, more than "
                        f"{parameter.dtype} rounding: the model ignores the given mask or position ids, or "
                        "does not score the last token"
                    )
        base.set_attn_implementation(chosen)
        use_tree_masks(base)
    except Exception as error:  # the model's code may raise anything for unexpected inputs
        base.set_attn_implementation(chosen)
        recurrent_layers.restore_layer_forwards(base)
        if isinstance(error, PackingImpossible):
            raise
        raise PackingImpossible(f"{name} fails on packed rows ({type(error).__name__}: {error})") from error


_Pair: TypeAlias = tuple[list[int], list[int]]


def _batches(
    pairs: Sequence[_Pair], layouts: tuple[PackSequences, ...], pad_token_id: int, device: torch.device
) -> Iterator[Batch[torch.Tensor]]:
    """Yield the batch of ``pairs`` in each layout."""
    rows = [Pairs().with_answers([*pair]) for pair in pairs]
    for layout in layouts:
        yield BatchCollator(layout, pad_token_id)(rows).parts[0].map_tensors(lambda tensor: tensor.to(device))


def _tiny_pairs(pad_token_id: int) -> list[_Pair]:
    """Make pairs of answers with a long, a short or no common prefix, and a pair with a prefix as rejected answer."""
    ids = [token for token in range(1, _TRIAL_IDS) if token != pad_token_id]
    return [
        *((ids[:9], [*ids[:5], *ids[10:14]]), (ids[20:24], [*ids[20:22], *ids[30:33]])),
        *((ids[3:20], ids[25:30]), (ids[5:12], ids[5:9])),
    ]


def _check_layer(
    layer: nn.Module, hidden_size: int, layouts: tuple[PackSequences, ...], device: torch.device, dtype: torch.dtype
) -> None:
    """Reject a recurrent layer if a shared prefix has another effect in packed rows than in padded rows.

    The check enlarges the weights: with the small weights of a new layer, a lost state could have too small an effect.
    It compares the outputs after the prefix, and their gradients of those tokens of the prefix that no convolution
    reads. In half precision, rounding may exceed the effect of a lost state. But it has another direction, so the
    difference is projected on that effect. That is done for layers with rules: convolutions have no state.

    Args:
        layer: The layer.
        hidden_size: Size of its inputs.
        layouts: Makes padded rows, and packed rows.
        device: Where to compute.
        dtype: The dtype of autocast, if it is not float32.
    """
    layer, generator = copy.deepcopy(layer).float().to(device), torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        if parameter.is_floating_point():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(device))
    prefix, ids = [*range(1, 2 * CHUNK + 3)], iter(range(2 * CHUNK + 3, 200))
    tails = [[next(ids) for _ in range(1 + number % 3)] for number in range(16)]  # short: states decay
    pairs = [(prefix + one, prefix + other) for one, other in zip(tails[::2], tails[1::2], strict=True)]
    vectors = torch.randn(200, hidden_size, generator=generator).to(device)
    padded, packed = _batches(pairs, layouts, 0, device)
    no_cache = {recurrent_layers.cache_parameter(inspect.signature(type(layer).forward)): None}

    def read(batch: Batch[torch.Tensor]) -> dict[str, torch.Tensor]:
        leaf, in_dtype = vectors.clone().requires_grad_(), torch.autocast(device.type, dtype, dtype.itemsize == 2)
        with torch.enable_grad(), in_dtype, reading(batch if batch.is_packed else None):
            outputs, _ = tree_flatten(layer(leaf[batch.input_ids_RL], **no_cache))
            whole = torch.cat([output.flatten(2).float() for output in outputs], dim=-1)
            read_SH = whole[batch.token_row_S, batch.token_column_S]
            (gradient,) = torch.autograd.grad(read_SH.square().mean(), leaf)
        return {"outputs": read_SH.detach(), "gradients": gradient[prefix[:-CONTEXT]]}

    expected, found, lost = read(padded), read(packed), None
    if dtype.itemsize == 2 and (order := packed.read_order) is not None and recurrent_layers.has_rule(layer):
        no_state_N = torch.full_like(order.state_N, sum(rows for rows, _ in order.groups[: order.paths]))
        lost = read(replace(packed, read_order=order._replace(state_N=no_state_N)))
    for quantity, values in expected.items():
        difference = found[quantity] - values
        rounding = _ROUNDING if dtype.itemsize > 2 else _ROUNDING_IN_HALF
        is_close = difference.abs().max() <= rounding * values.abs().max()
        if lost is not None:
            effect = lost[quantity] - values
            is_close &= ((difference * effect).sum() / effect.square().sum()).abs() <= 0.5
        if not is_close:
            raise PackingImpossible(
                f"{type(layer).__name__} does not go on from the state of shared tokens: packed and padded {quantity} "
                f"differ by {difference.abs().max():.2g} in {dtype}"
            )


def _pairs_at_chunk_boundaries(model: PreTrainedModel, pad_token_id: int) -> list[_Pair]:
    """Make pairs whose common prefixes end just before or after chunk boundaries of the model's recurrent scans.

    Some answers have only one token after the common prefix.
    """
    config = model.config.get_text_config().to_dict()
    sizes = (size for name, size in config.items() if name.endswith("chunk_size") and isinstance(size, int))
    chunk, ids = min(max([64, *sizes]), 256), [token for token in range(1, _TRIAL_IDS) if token != pad_token_id]
    text = [ids[(place * place + place // 7) % 40] for place in range(2 * chunk + 9)]
    first, second, third = text[: 2 * chunk - 1], text[: 2 * chunk + 3], text[5 : 2 * chunk]
    return [(first + ids[:1], first + ids[1:9]), (second + ids[2:30], second + ids[3:4]), (third, third + ids[4:7])]


def _read(model: nn.Module, batch: Batch[torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[MaskRule]]:
    """Return what packed and padded rows must agree on, and the mask rules that the model used.

    These are the rewards, the hidden states of the scored tokens, since a head with small weights hides their
    differences, and the gradient of a random projection of these states by token id. Without the last, a layer whose
    cached state carries no gradient would pass. Rewards of padded rows come from the model's own pooling.
    """
    rules, hidden_states, embedded = list[MaskRule](), list[torch.Tensor](), list[tuple[torch.Tensor, torch.Tensor]]()
    base: Any = without_adapters(model)
    head: Any = find_score_head(model)

    def note(_: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        embedded.append((args[0], output.detach().requires_grad_()))
        return embedded[-1][1]

    with (
        torch.enable_grad(),
        head.register_forward_pre_hook(lambda _, args: hidden_states.append(args[0])),
        base.get_input_embeddings().register_forward_hook(note),
    ):
        if batch.is_packed:
            scores, rules = run_packed(model, batch)
        else:
            scores = model(input_ids=batch.input_ids_RL, attention_mask=batch.attention_mask_RL).logits
        hidden_SH = hidden_states[0][batch.token_row_S, batch.token_column_S]
        projection_SH = torch.randn(hidden_SH.shape, generator=torch.Generator().manual_seed(0))
        ids, vectors = zip(*embedded, strict=True)
        gradients = torch.autograd.grad((hidden_SH * projection_SH.to(hidden_SH)).sum(), vectors)
    by_id = torch.zeros(_TRIAL_IDS, vectors[0].shape[-1]).to(vectors[0])
    for ids_RL, gradient_RLH in zip(ids, gradients, strict=True):
        is_token_RL = ids_RL != batch.pad_token_id  # padding may have undefined gradients
        by_id = by_id.index_add(0, ids_RL[is_token_RL], gradient_RLH[is_token_RL])
    values = {"hidden states": hidden_SH, "rewards": read_scores(scores, batch), "gradients": by_id}
    return {name: value.detach() for name, value in values.items()}, rules


def _reject_hidden_windows(model: PreTrainedModel, rules: list[MaskRule]) -> None:
    """Reject a model whose config has an attention window that its mask rules do not contain.

    The model may measure such a window in columns of a token row. Sequences of the trial are too short to reveal that.
    """
    config = model.config.get_text_config().to_dict()
    sizes = {name: size for name, size in config.items() if name.endswith(("window", "window_size"))}
    windows = {name: size for name, size in sizes.items() if isinstance(size, int) and size > 1}
    if windows and all(rule is causal_mask_function for rule in rules):
        listed = ", ".join(f"{name}={size}" for name, size in windows.items())
        raise PackingImpossible(
            f"the config of {type(model).__name__} has {listed}, but the model asked for causal masks only: it may "
            "measure the window in columns of a packed row"
        )
