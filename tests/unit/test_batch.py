"""A batch survives transfers unchanged and gives equal loss, rewards and gradients in every layout."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device
from decoders import PAD, PROMPT, StayInFloat64, random_decoder
from preference_rows import to_columns
from tiny import tiny_tokenizer
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory
from transformers import AutoModelForTokenClassification, DataCollatorForTokenClassification, PreTrainedModel
from trl.trainer.reward_trainer import DataCollatorForPreference as TrlCollator

from trl_tpu.compat.old_trl import RewardDataCollatorWithPadding
from trl_tpu.data.collate import BatchCollator, ComparisonRule, Part
from trl_tpu.data.kinds import Rankings, Solutions
from trl_tpu.data.trl_dict import DataCollatorForPreference, DictCollator, batches_in
from trl_tpu.modeling.attention import use_tree_masks
from trl_tpu.modeling.losses import Loss, batch_loss
from trl_tpu.modeling.static_shapes import use_expanded_attention
from trl_tpu.packing.batch import Batch, micro_batches_of
from trl_tpu.packing.pack import pack, pack_unpadded, pad
from trl_tpu.packing.shapes import BatchShape, ShapePlan
from trl_tpu.parallel.mesh import Placement
from trl_tpu.runtime.native import Runtime
from trl_tpu.training.optimizer import StepState

Rows = list[dict[str, Any]]


# ---- kinds of data


@dataclass(frozen=True)
class Form:
    """Rows with `answers` and labels, and the rule that compares them."""

    rows: Rows
    rule: ComparisonRule = ComparisonRule()
    loss: Loss = Loss()
    outputs: int = 1

    @property
    def has_steps(self) -> bool:
        return "step_ends" in self.rows[0]

    @property
    def examples(self) -> Rows:
        """Rows in the columns of a prepared dataset, as collators receive them."""
        return list(map(to_columns, self.rows))


_ANSWERS = [
    [PROMPT + [1, 2, 3, 4], PROMPT + [4, 3]],
    [PROMPT + [1, 2, 12], PROMPT + [13]],  # another pair of that prompt
    [PROMPT, PROMPT + [14, 15, 16]],  # one sequence is a prefix of the other
    [[22] * 9, [23] * 11],
    [[24, PAD, 25, PAD, PAD], [24, PAD, PAD]],  # the pad token in the text
]
_MORE = [*([PROMPT + [5, at], [at, 3]] for at in range(1, 5)), []]
RANKED = [{"answers": pair + more} for pair, more in zip(_ANSWERS, _MORE, strict=True)]
_STEPS = [([1, 4, 8], [1.0, 0.0, 1.0]), ([9], [0.25]), ([], []), ([0, 2], [1.0, 1.0]), ([3, 5], [0.0, 1.0])]


def graded(*grades: float) -> Rows:
    return [row | {"grades": list(grades[: len(row["answers"])])} for row in RANKED]


PAIRS = [{"answers": pair, "margin": at / 2} for at, pair in enumerate(_ANSWERS)]
PROBABLE = [{"answers": pair, "chosen_probability": at / 4} for at, pair in enumerate(_ANSWERS)]
BY_ATTRIBUTES = [
    row | {"grades": [None if at == 1 else row["grades"], [0.0, 1.0, 1.0, 3.0]]}
    for at, row in enumerate(graded(1.0, 0.0, 2.0, 0.0)[:4])
]
SOLUTIONS = [
    {"answers": [PROMPT + [1, 2, 3, 4 + at]], "step_ends": ends, "grades": grades}
    for at, (ends, grades) in enumerate(_STEPS)
]
TIES, WHOLE_ORDER = Loss(ties="davidson"), Loss(loss_type="plackett_luce")
OF_TWO = ComparisonRule(answers=4, attributes=2, attribute_weights=[2.0, 1.0], kind=Rankings())
FORMS = {
    "pairs": Form(PAIRS, loss=Loss(center_rewards_coefficient=0.1)),
    "probabilities": Form(PROBABLE),
    "rankings": Form(graded(2, 0, 1, 2), ComparisonRule(True, True, answers=4, kind=Rankings()), TIES),
    "whole rankings": Form(graded(3, 0, 1, 2), ComparisonRule(answers=4, kind=Rankings()), WHOLE_ORDER),
    "attributes": Form(BY_ATTRIBUTES, OF_TWO, outputs=2),
    "steps": Form(SOLUTIONS, ComparisonRule(answers=3, kind=Solutions()), outputs=2),
}


@cache
def model_of(outputs: int, has_steps: bool, expands: bool) -> PreTrainedModel:
    model = random_decoder("Llama", num_labels=outputs)
    if has_steps:
        torch.manual_seed(0)
        model = AutoModelForTokenClassification.from_config(model.config, dtype=torch.float64)
    (use_expanded_attention if expands else use_tree_masks)(model)
    return model.eval()


# ---- layouts: one collator per process

TOKENIZER = tiny_tokenizer(["text"], vocab_size=258)
assert TOKENIZER.pad_token_id == PAD
MOST = 6  # P of one process, more than the data's rows; two processes have 3 each
PLAN = ShapePlan((BatchShape(2, 16), BatchShape(2, 64)), (BatchShape(2, 32), BatchShape(2, 64)))
WHOLE = ShapePlan((BatchShape(1, 160),))


def parts_of(count: int) -> list[Any]:
    """Return the part of each process; None for a single process that has all examples."""
    return [Part(-(-MOST // count), index, count) for index in range(count)] if count > 1 else [None]


def packed_collators(pack_sequences: Callable[..., Any], count: int = 1) -> Callable[[Form], list[Any]]:
    """Return collators that pack the rows of one process: of all examples, or of its part of them."""
    return lambda form: [BatchCollator(pack_sequences, PAD, form.rule, part) for part in parts_of(count)]


def planned_collators(plan: ShapePlan, count: int = 1, expands: bool = False) -> Callable[[Form], list[Any]]:
    part = Part(MOST, 0, count, shares_rows=True)
    lay_outs = [partial(pack, plan=plan, expands=expands, part=(index, count)) for index in range(count)]
    return lambda form: [BatchCollator(pack_sequences, PAD, form.rule, part) for pack_sequences in lay_outs]


def trl_collators(count: int = 1, **settings: Any) -> Callable[[Form], list[Any]]:
    def make(form: Form) -> list[Any]:
        collate: Any = DataCollatorForPreference(PAD, answers=form.rule.answers)
        if form.has_steps:
            collate = DataCollatorForTokenClassification(TOKENIZER)
        return [DictCollator(collate, False, form.rule, PAD, part=part, **settings) for part in parts_of(count)]

    return make


def old_collator(side: str) -> Callable[[Form], list[Any]]:
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.padding_side = side
    collate = RewardDataCollatorWithPadding(tokenizer)
    return lambda form: [DictCollator(collate, True, ComparisonRule(), PAD, side)]


unpadded = partial(pack_unpadded, attention_crossover_length=20)
LAYOUTS: dict[str, Callable[[Form], list[Any]]] = {
    "padded": packed_collators(pad),
    "padded, planned": packed_collators(partial(pad, lengths=(4, 20, 64))),
    "unpadded": packed_collators(unpadded),
    "planned": planned_collators(WHOLE),
    "planned, micro-batches": planned_collators(PLAN),
    "expanded": planned_collators(PLAN, expands=True),
    "TRL's dict": trl_collators(),
    "TRL's dict, planned": trl_collators(lengths=(4, 20, 64)),
    "TRL's own collator": lambda form: [TrlCollator(PAD)],
    "old dict": old_collator("right"),
    "old dict, left": old_collator("left"),
    "two processes, padded": packed_collators(pad, 2),
    "two processes, unpadded": packed_collators(unpadded, 2),
    "four processes, unpadded": packed_collators(unpadded, 4),  # the last process has no examples
    "two processes, planned": planned_collators(PLAN, 2),
    "two processes, TRL's dict": trl_collators(2),
}
OF_PAIRS = ("expanded", "TRL's own collator", "old dict", "old dict, left")
CASES = [
    (form, layout)
    for form in FORMS
    for layout in LAYOUTS
    if layout not in OF_PAIRS or form == "pairs" or (form == "probabilities" and layout != "TRL's own collator")
]


def reference(form: Form, model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss, rewards [S, A] and token counts [S], with every sequence computed alone."""
    answers, attributes = form.rule.answers, form.rule.attributes
    rewards = torch.zeros(len(form.rows), answers, attributes or 1, dtype=torch.float64)
    tokens = torch.zeros(len(form.rows), answers, dtype=torch.int32)
    for at, row in enumerate(form.rows):
        logits = [model(torch.tensor([ids])).logits[0] for ids in row["answers"]]
        values, counts = logits, list(map(len, row["answers"]))
        if form.has_steps:
            ends = row["step_ends"] or [0]  # without a step, a reward without a grade stands for the row
            values = [logits[0][end, 1:] - logits[0][end, :1] for end in ends]
            stops = [0, *(end + 1 for end in ends[:-1]), counts[0]]  # the last reward counts the remaining tokens, too
            counts = [stop - start for start, stop in pairwise(stops)][: len(ends)]
        for place, (value, count) in enumerate(zip(values, counts, strict=True)):
            rewards[at, place], tokens[at, place] = value, count
    table = form.rule.table(form.examples).map_tensors(torch.from_numpy)
    rewards_SA = rewards.flatten(0, 1)
    loss = form.loss.per_row(rewards_SA, table).sum() / table.weight_sum_1.squeeze()
    return loss, rewards_SA * (tokens.flatten() > 0)[:, None], tokens.flatten()


def gradients(model: PreTrainedModel, loss: torch.Tensor) -> list[torch.Tensor]:
    parameters = [each for each in model.parameters() if each.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [each for each in found if each is not None]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_loss_rewards_and_gradients_are_equal_in_every_layout(name: str, layout: str) -> None:
    form = FORMS[name]
    model = model_of(form.outputs, form.has_steps, layout == "expanded")
    side = "left" if "left" in layout else "right"
    # left padding shifts positions, and rotary angles are float32
    close = partial(torch.testing.assert_close, **dict.fromkeys(("atol", "rtol"), 1e-6 if side == "left" else 1e-9))
    with StayInFloat64():
        expected, rewards_SA, tokens_S = reference(form, model)
        made = [batches_in(collate(form.examples), PAD, side) for collate in LAYOUTS[layout](form)]
        results = [batch_loss(model, batches, form.loss) for batches in made]
        loss = torch.stack([result.loss for result in results]).mean()  # processes average their gradients
        close(gradients(model, loss), gradients(model, expected))
    close(loss, expected)
    masked = [torch.where(each.tokens_S[:, None] > 0, each.rewards_SA, 0.0) for each in results]
    counts = [each.tokens_S for each in results]
    shares_rows = "planned" in layout and "two processes" in layout  # rows of tokens, not rows of the data
    found_SA, found_S = (torch.stack(each).sum(0) if shares_rows else torch.cat(each) for each in (masked, counts))
    assert found_S[: len(tokens_S)].tolist() == tokens_S.tolist() and not found_S[len(tokens_S) :].any()
    close(found_SA[: len(rewards_SA)], rewards_SA)


# ---- transfer to the device

EXAMPLES, UNUSED = FORMS["pairs"].examples, 30
COLLATORS: dict[str, Any] = {  # the pad token occurs in no text, so no sequence ends in it
    "padded": BatchCollator(pad, UNUSED),
    "unpadded": BatchCollator(unpadded, UNUSED),
    "planned": BatchCollator(partial(pack, plan=PLAN), UNUSED, part=Part(MOST)),
    "expanded": BatchCollator(partial(pack, plan=PLAN, expands=True), UNUSED, part=Part(MOST)),
}


def tensors_of(batch: Batch[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return all tensors of all micro-batches by name."""
    return {f"{at} {name}": each for at, part in enumerate(batch.parts) for name, each in part.tensors().items()}


def assert_equal(one: Batch[torch.Tensor], other: Batch[torch.Tensor]) -> None:
    torch.testing.assert_close(tensors_of(one), tensors_of(other), rtol=0, atol=0, equal_nan=True)
    assert [part.trees for part in one.parts] == [part.trees for part in other.parts]


@pytest.mark.parametrize("kind", COLLATORS)
def test_batch_survives_workers_pinning_and_device_transfer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    collate = COLLATORS[kind]
    batch = collate(EXAMPLES)
    (from_worker,) = DataLoader(EXAMPLES, batch_size=5, collate_fn=collate, num_workers=1)  # type: ignore[arg-type]
    assert_equal(from_worker, batch)
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    assert_equal(pin_memory(batch), batch)
    assert len(pinned) == len(tensors_of(batch))
    assert_equal(send_to_device(batch, "cpu"), batch)
    moved = send_to_device(batch, torch.device("meta"), non_blocking=True)
    assert {tensor.device.type for tensor in tensors_of(moved).values()} == {"meta"}
    assert len(tensors_of(moved)) == len(pinned)


@pytest.mark.parametrize("kind", COLLATORS)
def test_batch_keys_return_trls_tensors(kind: str) -> None:
    theirs = TrlCollator(UNUSED)(EXAMPLES)
    batch = send_to_device(COLLATORS[kind](EXAMPLES), "cpu")
    for key in ("input_ids", "attention_mask"):
        assert batch[key].dtype == theirs[key].dtype and torch.equal(batch[key], theirs[key])
    with pytest.raises(KeyError):
        batch["labels"]


@pytest.mark.parametrize("pack_sequences", [unpadded, partial(pack, plan=PLAN)], ids=["unpadded", "planned"])
def test_process_without_rows_gets_an_empty_batch(pack_sequences: Any) -> None:
    batch = BatchCollator(pack_sequences, UNUSED, part=Part(MOST, 1, 2))(EXAMPLES)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (0, 0)
    assert not batch.table.weight_C.any() and not batch.present_P.any()
    with pytest.raises(KeyError, match="Its keys are input_ids and attention_mask"):
        dict(batch)


@pytest.mark.parametrize("layout", ["padded", "unpadded"])
def test_batch_keys_return_one_row_per_solution(layout: str) -> None:
    form = FORMS["steps"]
    batch = LAYOUTS[layout](form)[0](form.examples)
    read = [ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    assert read == [row["answers"][0][: [0, *row["step_ends"]][-1] + 1] for row in form.rows]


def test_losses_of_micro_batches_sum_to_the_batch_loss() -> None:
    form, model = FORMS["pairs"], model_of(1, False, False)
    batch = COLLATORS["planned"](EXAMPLES)
    whole = batch_loss(model, batch.parts, form.loss).loss
    parts = [batch_loss(model, batches_in(each, PAD), form.loss).loss for each in micro_batches_of(batch)]
    assert len(parts) > 1
    torch.testing.assert_close(torch.stack(parts).sum(), whole)
    padded = TrlCollator(PAD)(EXAMPLES)
    assert micro_batches_of(padded) == (padded,)


def test_gradients_of_an_interrupted_training_are_cleared() -> None:
    """An interruption between two micro-batches, for example by a callback's error, leaves gradient buffers behind."""
    model = torch.nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    placements = {"weight": Placement((None, None), "whole")}
    runtime = Runtime()
    runtime.is_spmd = True
    state = StepState(runtime)
    state.prepare(model, optimizer, placements, accumulates=True)
    state.attach_gradients()
    model(torch.ones(1, 3)).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.tolist() == [[1, 1, 1]]
    state.prepare(model, optimizer, placements, accumulates=True)
    assert model.weight.grad.tolist() == [[0, 0, 0]]


def test_batch_with_more_rows_than_planned_is_rejected() -> None:
    """Otherwise rows would be dropped silently."""
    with pytest.raises(ValueError, match="2 rows.* 3"):
        BatchCollator(pad, PAD, part=Part(2))([{"chosen_ids": [1], "rejected_ids": [2]}] * 3)
