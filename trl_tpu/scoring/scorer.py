"""Computes the rewards of rows."""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers.utils import find_adapter_config_file

from .. import runtime
from ..data.collate import BatchCollator, ComparisonRule, LayOut, Part
from ..errors import UserError
from ..modeling.adapters import is_peft_model, load_adapted_model
from ..modeling.forward import PackingImpossible, rewards_of
from ..modeling.head_spec import HeadSpec, RewardScale, saved_scale
from ..modeling.load import load_classifier, load_tokenizer
from ..modeling.model_shape import learned_positions, position_groups
from ..modeling.packability import make_packable
from ..modeling.static_shapes import fit_to_device
from ..modeling.tree_states import shared_chunk
from ..packing.batch import Batch
from ..packing.pack import in_order, pack_unpadded, pad
from ..packing.planned import pack
from ..packing.shapes import RowPlan, RowShape, attention_crossover_length, round_up
from ..parallel.mesh import BATCH_AXES, parse_mesh
from ..parallel.shard import keep_activations_split, place_model, plan_model

logger = logging.getLogger(__name__)

_SHORTEST_ROW = 128
_SHORTEST_PADDED_ROW = 64
_MOST = 2048  # dialogues that are packed together
_USUAL = 0.75  # of the dialogues fit three times into a usual row

#: Which dialogues a batch has, [N], and its micro-batches.
Members = tuple[np.ndarray, tuple[Batch[torch.Tensor], ...]]


@dataclass
class Batches:
    """Makes batches of dialogues, each of which is in one of them.

    Args:
        pad_token_id: Texts end before it, and it fills what rows have left.
        tokens: Most tokens computed at a time on each shard, padding among them, unless one row is longer.
        attention_crossover_length: The length at which attention costs as much as everything else.
        shards: Over how many devices rows are split.
        is_static: Whether there may only be few shapes.
    """

    pad_token_id: int
    tokens: int
    attention_crossover_length: float
    shards: int = 1
    is_static: bool = False
    row_length: int | None = None
    """Of usual planned rows; chosen for the first dialogues that come."""
    chunk: int = 1
    """See `RowPlan`."""

    def unpadded(self, dialogues: Sequence[np.ndarray]) -> Iterator[Members]:
        """Yield rows without padding, for a device that takes any shape."""
        lay_out = partial(pack_unpadded, attention_crossover_length=self.attention_crossover_length)
        order, shared = in_order(list(dialogues))
        some, tokens = list[int](), 0
        for index, common in zip(order.tolist(), [0, *shared.tolist()], strict=False):
            size = len(dialogues[index])
            if some and (tokens + size - common > self.tokens or len(some) == _MOST):
                yield self._batch(lay_out, dialogues, some)
                some, tokens = [], 0
            tokens += size - (common if some else 0)
            some.append(index)
        if some:
            yield self._batch(lay_out, dialogues, some)

    def planned(self, dialogues: Sequence[np.ndarray]) -> Iterator[Members]:
        """Yield rows of one length, and of its doubles for longer dialogues, for a device that compiles each."""
        if self.row_length is None and dialogues:
            usual = np.quantile([len(ids) for ids in dialogues], _USUAL)
            self.row_length = _doubled(_SHORTEST_ROW, 3 * usual)
        by_length: dict[int, list[int]] = {}
        for index in in_order(list(dialogues))[0].tolist():
            length = _doubled(self.row_length or _SHORTEST_ROW, len(dialogues[index]))
            by_length.setdefault(length, []).append(index)
        most = round_up(_MOST, self.shards)
        for length, members in sorted(by_length.items()):
            shape = RowShape(self.shards * max(1, self.tokens // length), length)
            plan = RowPlan((shape,), (shape,), self.attention_crossover_length, chunk=self.chunk)
            for first in range(0, len(members), most):
                yield self._batch(partial(pack, plan=plan), dialogues, members[first : first + most], most)

    def padded(self, dialogues: Sequence[np.ndarray]) -> Iterator[Members]:
        """Yield padded rows, for models of which packed rows are not exact, and to keep dialogues apart."""
        waiting = sorted(range(len(dialogues)), key=lambda index: -len(dialogues[index]))
        while waiting:
            longest = len(dialogues[waiting[0]])
            length = _doubled(_SHORTEST_PADDED_ROW, longest) if self.is_static else longest
            most = self.shards * max(1, self.tokens // length)
            some, waiting = waiting[:most], waiting[most:]
            lengths, rows = ((length,), most) if self.is_static else (None, None)
            yield self._batch(partial(pad, lengths=lengths), dialogues, some, rows)

    def _batch(
        self, lay_out: LayOut, dialogues: Sequence[np.ndarray], members: list[int], rows: int | None = None
    ) -> Members:
        """Make the batch of some dialogues, with a table of so many rows; by default, of as many as there are."""
        part = None if rows is None else Part(rows)
        collate = BatchCollator(lay_out, self.pad_token_id, ComparisonRule(answers=1), part)  # nothing is compared
        return np.array(members), collate([{"answers": [dialogues[index]]} for index in members]).parts


def _doubled(length: int, least: float) -> int:
    """Return ``length``, doubled until it is no less than ``least``."""
    while length < least:
        length *= 2
    return length


MakeBatches = Callable[[Sequence[np.ndarray]], Iterator[Members]]

TOKENS_A_PASS = 4096


class Scorer:
    """A saved reward model, placed on its devices, and its tokenizer.

    Args:
        model_folder: Folder (or Hub id) of a saved reward model, or of adapters, which name their base model.
        trust_remote_code: Whether the model may bring its own code.
        bf16: Whether to compute in bfloat16, over float32 weights; the score head stays in float32.
        mesh: How PyTorch/XLA's devices share the weights, as in training.
        tokens_per_pass: Tokens that each device computes at a time.
        standardize: Whether rewards are ``(reward - mean) / std``, by the mean and std in the model's config.

    Raises:
        UserError: What is there is no saved reward model, has no pad token, or no mean and std where they are asked
            for; a mesh that the devices do not fill.
    """

    def __init__(
        self,
        model_folder: str,
        trust_remote_code: bool = False,
        *,
        bf16: bool = False,
        mesh: str = "fsdp=-1",
        tokens_per_pass: int = TOKENS_A_PASS,
        standardize: bool = False,
    ) -> None:
        self.runtime = runtime.current()
        topology = self.runtime.topology()
        if topology.process_count > 1:
            raise UserError(f"Scoring uses one host, and this is one of {topology.process_count} that form a mesh.")
        self.mesh = parse_mesh(mesh, topology.devices, topology.slices)
        self.bf16 = bf16
        self.device = self.runtime.device
        self.tokenizer: Any = load_tokenizer(model_folder, trust_remote_code=trust_remote_code)
        self.outputs = HeadSpec.saved(model_folder)
        self.model: Any = _load(model_folder, trust_remote_code, self.outputs).eval()
        self.model.config.get_text_config().use_cache = False  # keys and values of what is read only once
        self.pad_token_id = self._settle_pad_token(model_folder)
        self.scale = saved_scale(model_folder) if standardize else None
        if standardize and self.scale is None:
            raise UserError(
                f"The config of {model_folder} has no `mean` and `std` to standardize by. Leave `--standardize` out."
            )
        self.num_embeddings: int = self.model.get_input_embeddings().weight.shape[0]
        self.positions: float = learned_positions(self.model) or math.inf
        self._group_of = position_groups(self.model)
        self.fingerprint = _fingerprint(self.model, self.tokenizer, self.outputs)
        is_static = self.runtime.plans_shapes
        fit_to_device(self.model, is_static=is_static)
        crossover = attention_crossover_length(self.model.config.get_text_config().hidden_size)
        plans_lengths = is_static and not self._group_of(math.inf)
        shards, chunk = self.mesh.batch_shards, shared_chunk(self.model)
        makers = Batches(self.pad_token_id, tokens_per_pass, crossover, shards, plans_lengths, chunk=chunk)
        self.padded = makers.padded
        self.batches: MakeBatches = makers.planned if is_static else makers.unpadded
        try:
            # on the host still, where trying it compiles nothing
            make_packable(self.model, self.pad_token_id, is_unpadded=not is_static)
        except PackingImpossible as reason:
            logger.warning(f"Dialogues are padded, not packed: {reason}.")
            self.batches = makers.padded
        plan = plan_model(self.model, self.mesh)
        report = place_model(self.model, plan, self.runtime, self.device)
        if self.mesh.devices > 1:
            keep_activations_split(self.model, plan, report.placements, self.runtime)

    def _settle_pad_token(self, model_folder: str) -> int:
        config = self.model.config.get_text_config()
        # the base model of adapters need not have one, or not the one that they were trained with
        if config.pad_token_id is None or (is_peft_model(self.model) and self.tokenizer.pad_token_id is not None):
            config.pad_token_id = self.tokenizer.pad_token_id
        if config.pad_token_id is None:
            raise UserError(f"{model_folder} has no pad token, by which a reward model finds a dialogue's last token.")
        return config.pad_token_id

    def start(self, dialogues: Sequence[np.ndarray]) -> Callable[[], np.ndarray]:
        """Start to compute the rewards of tokenized dialogues; the host may go on meanwhile.

        Returns:
            Waits for the rewards, and returns them in order, float64, [D, 1]: after the reward come those of each of
            the model's attributes, [D, 1 + A]. A dialogue with nan or inf may have made those that were computed
            beside it nan too, since a masked-out nan is still one. So dialogues without a finite reward are computed
            once more, each in a padded row of its own.
        """
        wait = self._compute(dialogues, self.batches)

        def rewards() -> np.ndarray:
            rewards_DA = wait()
            again = np.flatnonzero(~np.isfinite(rewards_DA).all(axis=1)).tolist()
            rewards_DA[again] = self._compute([dialogues[index] for index in again], self.padded)()
            scale = self.scale or RewardScale(0.0, 1.0)
            rewards_D = (rewards_DA @ np.array(self.outputs.weights) - scale.mean) / scale.std
            return np.column_stack([rewards_D, rewards_DA[:, : len(self.outputs.attributes)]])

        return rewards

    def _compute(self, dialogues: Sequence[np.ndarray], batches: MakeBatches) -> Callable[[], np.ndarray]:
        """Start to compute rewards of A outputs; the function that is returned waits for them, [D, A]."""
        compute = self.runtime.compiled(_rewards_of)
        members, places, computed = list[np.ndarray](), list[np.ndarray](), list[torch.Tensor]()

        def send(tensor: torch.Tensor) -> torch.Tensor:  # rows of tokens over the batch axes, lists of numbers whole
            axes = (None,) if tensor.ndim == 1 else (BATCH_AXES, *[None] * (tensor.ndim - 1))
            return self.runtime.place(tensor, axes, self.device)

        for members_N, batches_of_members in self._apart(dialogues, batches):
            for batch in batches_of_members:
                place_N = np.flatnonzero(batch.present_P().numpy())  # of a batch that is several micro-batches
                sent = batch.map_tensors(send)
                with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                    rewards_SA = compute(self.model, sent)
                members.append(members_N[place_N])
                places.append(place_N)
                computed.append(self.runtime.constrain(rewards_SA, (None, None)))
                self.runtime.step_boundary()

        def fetch() -> np.ndarray:
            rewards_DA = np.full((len(dialogues), len(self.outputs.weights)), math.nan)
            host = self.runtime.fetch(computed) if computed else []
            for members_N, place_N, rewards_SA in zip(members, places, host, strict=True):
                rewards_DA[members_N] = rewards_SA.double().numpy()[place_N]
            return rewards_DA

        return fetch

    def _apart(self, dialogues: Sequence[np.ndarray], batches: MakeBatches) -> Iterator[Members]:
        """Yield batches of dialogues that do not change each other's positions."""
        if len(dialogues) and self._group_of(math.inf) > 1:  # ends what a longer one has left; is overwritten below
            yield from self.padded([dialogues[0][:1]])
        groups_D = np.array([self._group_of(len(ids)) for ids in dialogues])
        for group in np.unique(groups_D):
            here_D = np.flatnonzero(groups_D == group)
            make = self.padded if group else batches  # packed rows leave out pad tokens at the end
            yield from ((here_D[each], batch) for each, batch in make([dialogues[i] for i in here_D.tolist()]))


def _rewards_of(model: Any, batch: Batch[torch.Tensor]) -> torch.Tensor:
    """Compute the rewards of a micro-batch, of A outputs [S, A]."""
    return rewards_of(model, batch)[0]


def _fingerprint(model: torch.nn.Module, tokenizer: Any, outputs: HeadSpec) -> str:
    """Return a number for what the rewards depend on: samples of every weight, the tokenizer and what outputs are.

    Training moves all weights that it trains, so a few numbers of each tell one checkpoint from the next.
    """
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        flat = weight.detach().flatten()
        sample = flat[:: max(1, len(flat) // 64)].float().numpy()
        digest.update(f"{name} {tuple(weight.shape)}".encode() + sample.tobytes())
    words = [tokenizer.get_vocab(), tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template]
    words += [*outputs.attributes.items(), outputs.step_separator]
    digest.update(json.dumps(words, sort_keys=True).encode())
    return digest.hexdigest()


def _load(model_folder: str, trust_remote_code: bool, outputs: HeadSpec) -> Any:
    code: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    kwargs = code | {"dtype": torch.float32, "num_labels": len(outputs.weights)}
    if find_adapter_config_file(model_folder) is not None:
        return load_adapted_model(model_folder, outputs.step_separator, **kwargs)
    model, report = load_classifier(model_folder, outputs, **kwargs)
    if report["missing_keys"]:
        raise UserError(
            f"{model_folder} is not a saved reward model: it lacks {sorted(report['missing_keys'])}, so its rewards "
            "would be random. Score with the folder that training saved."
        )
    return model
