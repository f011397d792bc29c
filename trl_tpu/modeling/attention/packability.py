"""Decides whether packed rows give a model's own rewards, by a trial before training."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function

from ...data.batch import Batch
from ...data.collators import DataCollatorForPreference, OwnRows, Padded, PlannedRows, Unpadded
from ...packing.shapes import RowPlan, RowShape
from ..adapters import without_adapters
from ..score_head import score_head_of
from .packed import MaskRule, PackingImpossible, check_unmodified, note_scores, read_rows, use_tree_masks

# relative, between float32 sums over rows of two lengths
_ROUNDING = 2e-5


@torch.no_grad()
def reads_padding(model: nn.Module, pad_token_id: int) -> bool:
    """Return whether a tiny batch gets other rewards when it is padded further.

    So it is where a forward averages over all columns, or reads the last one: as transformers does for the embeddings
    that prompt tuning gives it. True also where it is unknown: weights on the meta
    device or coarser than float32, a forward that fails.
    """
    parameter = next(model.parameters())
    if parameter.is_meta or parameter.dtype not in (torch.float32, torch.float64):
        return True
    ids = [token for token in range(1, 21) if token != pad_token_id]
    examples = [
        {"answers": [ids[:9], ids[5:9]]},
        {"answers": [ids[3:10], ids[8:14]]},
    ]
    was_training = model.training
    model.eval()
    try:
        rewards = []
        for multiple in (1, 16):
            batch = DataCollatorForPreference(pad_token_id, multiple)(examples)
            rows = {name: tensor.to(parameter.device) for name, tensor in batch.items()}
            rewards.append(model(**rows).logits.squeeze(-1))
    except Exception:  # whatever a user's code does with inputs that it does not expect
        return True
    finally:
        model.train(was_training)
    short, long = rewards
    return not (short - long).abs().max() <= _ROUNDING * short.abs().max()


# transformers' own models of these types gave equal rewards and gradients in float64: see test_tree_attention.py
PROVEN_TYPES = frozenset(
    {"gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe"}
)

# relative, between two orders of float32 sums


def make_packable(model: nn.Module, pad_token_id: int) -> None:
    """Let ``model`` read packed rows, and make sure that they are exact.

    Args:
        model: A sequence classifier, possibly with adapters.
        pad_token_id: Its pad token.

    Raises:
        PackingImpossible: If the model has no `score` head, is modified, makes its own masks, or computes other
            rewards.
    """
    check_unmodified(model)
    base = without_adapters(model)
    if _is_proven(base):
        use_tree_masks(base)
    else:
        check_packing_is_exact(model, pad_token_id)
    note_scores(model)


def _is_proven(model: PreTrainedModel) -> bool:
    config: Any = model.config.get_text_config()
    from_transformers = type(model).__module__.startswith("transformers.models.")
    looks_both_ways = getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True)
    return from_transformers and config.model_type in PROVEN_TYPES and not looks_both_ways


@torch.no_grad()
def check_packing_is_exact(model: nn.Module, pad_token_id: int) -> None:
    """Let ``model`` read packed rows, and compare the rewards of a tiny batch with those in padded rows before.

    A model that is refused attends as before.

    Raises:
        PackingImpossible: If they differ by more than float32 rounds, the weights are too coarse to tell, the model
            fails on either, or it has a window that no mask showed and a tiny batch cannot.
    """
    name = type(model).__name__
    dtype = next(model.parameters()).dtype
    if dtype not in (torch.float32, torch.float64):
        raise PackingImpossible(
            f"{name} is of a family for which packing is tried out first, and {dtype} would hide a difference: load "
            "it in float32, over which bf16=True computes"
        )
    base, was_training = without_adapters(model), model.training
    attention = base.config._attn_implementation
    model.eval()
    try:
        use_tree_masks(base)  # or says why not
        # under the name that it had, which a model's own code may ask for
        base.set_attn_implementation(attention)
        examples = _tiny_batch(pad_token_id)
        (batch,) = OwnRows(Padded(pad_token_id, 2, 2), pad_token_id)(examples).parts
        padded, _ = _read(model, batch.map_tensors(lambda tensor: tensor.to(next(model.parameters()).device)))
        use_tree_masks(base)
        _compare(model, examples, pad_token_id, padded)
    except Exception as error:  # whatever a model's own code does with inputs that it does not expect
        base.set_attn_implementation(attention)
        if isinstance(error, PackingImpossible):
            raise
        raise PackingImpossible(f"{name} fails on packed rows ({type(error).__name__}: {error})") from error
    finally:
        model.train(was_training)


def _tiny_batch(pad_token_id: int) -> list[dict[str, Any]]:
    """Make pairs that share prefixes of different lengths, nothing, and one sequence that is a prefix of the other."""
    ids = [token for token in range(1, 42) if token != pad_token_id]
    pairs = [
        *((ids[:9], [*ids[:5], *ids[10:14]]), (ids[20:24], [*ids[20:22], *ids[30:33]])),
        *((ids[3:20], ids[25:30]), (ids[5:12], ids[5:9])),
    ]
    return [{"answers": list(pair)} for pair in pairs]


def _compare(
    model: nn.Module, examples: list[dict[str, Any]], pad_token_id: int, padded: dict[str, torch.Tensor]
) -> None:
    parameter = next(model.parameters())
    plan = RowPlan((RowShape(2, 32),))
    for collate in (
        PlannedRows(plan, len(examples), pad_token_id),
        OwnRows(Unpadded(pad_token_id, 2, attention_crossover_length=100), pad_token_id),
    ):
        (batch,) = collate(examples).parts
        packed, rules = _read(model, batch.map_tensors(lambda tensor: tensor.to(parameter.device)))
        _refuse_hidden_windows(without_adapters(model), rules)
        for what, in_packed_rows in packed.items():
            difference = (in_packed_rows - padded[what]).abs().max()
            if not difference <= _ROUNDING * padded[what].abs().max():
                raise PackingImpossible(
                    f"packed and padded {what} of {type(model).__name__} differ by {difference:.2g}, which "
                    f"{parameter.dtype} does not explain: its attention or positions do not follow the mask and "
                    "position ids that it is given, or its scores are not of the last token"
                )


def _read(model: nn.Module, batch: Batch) -> tuple[dict[str, torch.Tensor], list[MaskRule]]:
    """Return the scores at the scored tokens, and the hidden states that they are computed from; and the mask rules.

    Hidden states are compared too, since a small head hides what they differ by. The scores of padded rows are the
    model's own.
    """
    rows, rules, seen = batch.rows, list[MaskRule](), list[torch.Tensor]()
    at = rows.score_row_S, rows.score_column_S
    with score_head_of(model).register_forward_pre_hook(lambda _, args: seen.append(args[0])):
        if rows.is_packed:
            with read_rows(model, rows) as reading:
                scores, rules = reading.scores[0][at], reading.rules
        else:
            logits = model(input_ids=rows.input_ids_RL, attention_mask=rows.attention_mask_RL).logits
            scores = logits[at] if logits.dim() == 3 else logits[rows.score_row_S]
    return {"hidden states": seen[0][at], "rewards": scores}, rules


def _refuse_hidden_windows(model: PreTrainedModel, rules: list[MaskRule]) -> None:
    """Refuse a window that is no part of a mask rule: it counts columns, which only rows longer than it would show."""
    config = model.config.get_text_config().to_dict()
    sizes = {name: size for name, size in config.items() if name.endswith(("window", "window_size"))}
    windows = {name: size for name, size in sizes.items() if isinstance(size, int) and size > 1}
    if windows and all(rule is causal_mask_function for rule in rules):
        listed = ", ".join(f"{name}={size}" for name, size in windows.items())
        raise PackingImpossible(
            f"the config of {type(model).__name__} has {listed}, but it asked for causal masks only: its window may "
            "count columns of a row"
        )
