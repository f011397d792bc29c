"""Compute the rewards of tokenized sequences with a saved reward model."""

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

from .. import runtime
from ..data.collate import BatchCollator, ComparisonRule, PackSequences, Part
from ..data.kinds import Answers
from ..errors import UserError
from ..modeling.attention import tree_layout
from ..modeling.forward import PackingImpossible, rewards_of
from ..modeling.head_spec import HeadSpec, keep_heads_in_float32, saved_scale, without_adapters
from ..modeling.load import load_model, load_tokenizer
from ..modeling.model_shape import learned_positions, position_groups
from ..modeling.packability import make_packable
from ..modeling.recurrent_layers import shared_chunk
from ..modeling.static_shapes import use_static_shapes
from ..packing.batch import Batch
from ..packing.pack import TREE_BY_TREE, TreeLayout, in_order, pack, pack_unpadded, pad
from ..packing.shapes import BatchShape, ShapePlan, attention_crossover_length, round_up
from ..parallel.mesh import BATCH_AXES, parse_mesh
from ..parallel.shard import place_model, plan_model, shard_activations

logger = logging.getLogger(__name__)

_SHORTEST_ROW = 128
_SHORTEST_PADDED_ROW = 64
_MAX_PACKED = 2048  # sequences that are packed together
_USUAL_QUANTILE = 0.75  # planned rows hold three sequences of this length quantile

Dialogues = Sequence[np.ndarray]  # token ids

#: Indices of a batch's sequences, [N], and its micro-batches.
Members = tuple[np.ndarray, tuple[Batch[torch.Tensor], ...]]


@dataclass
class Batches:
    """Makes batches of tokenized sequences. Each sequence is in one batch.

    Args:
        pad_token_id: The padding token. A sequence is scored at its last other token.
        tokens: Maximum tokens per batch and device, padding included; a single longer token row may exceed it.
        crossover: Sequence length at which attention costs as much as all other operations.
        shards: Number of devices that token rows are split over.
        is_static: Whether padded batches must have few different shapes.
        row_length: Length of planned rows; by default chosen from the first sequences.
        chunk: See `ShapePlan`.
        trees: How the trees of unpadded batches attend.
    """

    pad_token_id: int
    tokens: int
    crossover: float
    shards: int = 1
    is_static: bool = False
    row_length: int | None = None
    chunk: int = 1
    trees: TreeLayout = TREE_BY_TREE

    def unpadded(self, dialogues: Dialogues) -> Iterator[Members]:
        """Yield unpadded batches, for a device that computes any shape without compiling it."""
        pack_sequences = partial(pack_unpadded, attention_crossover_length=self.crossover, layout=self.trees)
        order, shared = in_order(list(dialogues))
        members, tokens = list[int](), 0
        for index, common in zip(order.tolist(), [0, *shared.tolist()], strict=False):
            size = len(dialogues[index])
            if members and (tokens + size - common > self.tokens or len(members) == _MAX_PACKED):
                yield self._batch(pack_sequences, dialogues, members)
                members, tokens = [], 0
            tokens += size - (common if members else 0)
            members.append(index)
        if members:
            yield self._batch(pack_sequences, dialogues, members)

    def planned(self, dialogues: Dialogues) -> Iterator[Members]:
        """Yield batches of planned shapes, for a device that compiles each shape.

        All packed rows have the same length; longer sequences get rows of two, four, ... times this length.
        """
        if self.row_length is None and dialogues:
            usual = np.quantile([len(ids) for ids in dialogues], _USUAL_QUANTILE)
            self.row_length = _doubled(_SHORTEST_ROW, 3 * usual)
        by_length: dict[int, list[int]] = {}
        for index in in_order(list(dialogues))[0].tolist():
            length = _doubled(self.row_length or _SHORTEST_ROW, len(dialogues[index]))
            by_length.setdefault(length, []).append(index)
        most = round_up(_MAX_PACKED, self.shards)
        for length, members in sorted(by_length.items()):
            shape = BatchShape(self.shards * max(1, self.tokens // length), length)
            plan = ShapePlan((shape,), (shape,), self.crossover, chunk=self.chunk)
            for first in range(0, len(members), most):
                yield self._batch(partial(pack, plan=plan), dialogues, members[first : first + most], most)

    def padded(self, dialogues: Dialogues) -> Iterator[Members]:
        """Yield padded batches: for models that packing would not compute exactly, and to isolate sequences."""
        waiting = sorted(range(len(dialogues)), key=lambda index: -len(dialogues[index]))
        while waiting:
            longest = len(dialogues[waiting[0]])
            length = _doubled(_SHORTEST_PADDED_ROW, longest) if self.is_static else longest
            most = self.shards * max(1, self.tokens // length)
            members, waiting = waiting[:most], waiting[most:]
            lengths, rows = ((length,), most) if self.is_static else (None, None)
            yield self._batch(partial(pad, lengths=lengths), dialogues, members, rows)

    def _batch(
        self, pack_sequences: PackSequences, dialogues: Dialogues, members: list[int], rows: int | None = None
    ) -> Members:
        """Make a batch of the sequences ``members``, with a table of ``rows`` rows (by default one per sequence)."""
        part = None if rows is None else Part(rows)
        collate = BatchCollator(pack_sequences, self.pad_token_id, ComparisonRule(answers=1, kind=Answers()), part)
        return np.array(members), collate([{"answer_ids": [dialogues[index]]} for index in members]).parts


def _doubled(length: int, least: float) -> int:
    """Double ``length`` until it is at least ``least``."""
    while length < least:
        length *= 2
    return length


MakeBatches = Callable[[Dialogues], Iterator[Members]]

TOKENS_PER_PASS = 4096


class Scorer:
    """A saved reward model on its devices, with its tokenizer.

    Args:
        model_folder: Folder or Hub id of a saved reward model, or of adapters with a config that names their base
            model.
        trust_remote_code: Whether to run code that comes with the model.
        bf16: Whether to compute in bfloat16 with float32 weights. The score head always computes in float32.
        mesh: Mesh axes that shard the weights over PyTorch/XLA's devices, as in training.
        tokens_per_pass: Number of tokens that each device computes at a time.
        standardize: Whether to return ``(reward - mean) / std``, with the mean and std in the model's config.

    Raises:
        UserError: The folder has no saved reward model; `standardize` is set, but the config has no mean and std; the
            mesh does not fit the number of devices; there are several hosts.
    """

    def __init__(
        self,
        model_folder: str,
        trust_remote_code: bool = False,
        *,
        bf16: bool = False,
        mesh: str = "fsdp=-1",
        tokens_per_pass: int = TOKENS_PER_PASS,
        standardize: bool = False,
    ) -> None:
        self.runtime = runtime.current()
        topology = self.runtime.topology()
        if topology.process_count > 1:
            raise UserError(f"Scoring runs on one host, but this is one of {topology.process_count} hosts in a mesh.")
        self.mesh = parse_mesh(mesh, topology.devices, topology.slices)
        self.bf16 = bf16
        self.device = self.runtime.device
        self.tokenizer: Any = load_tokenizer(model_folder, trust_remote_code=trust_remote_code)
        self.outputs = HeadSpec.saved(model_folder)
        code: Any = {"trust_remote_code": trust_remote_code}
        self.model: Any = load_model(model_folder, self.outputs, is_trainable=False, **code).eval()
        config = self.model.config.get_text_config()
        config.use_cache = False  # a cache would save nothing: one pass per sequence
        if config.pad_token_id is None:
            config.pad_token_id = self.tokenizer.pad_token_id
        self.pad_token_id: int = config.pad_token_id
        self.scale = saved_scale(model_folder) if standardize else None
        if standardize and self.scale is None:
            raise UserError(f"The config of {model_folder} has no `mean` and `std` for `--standardize`. Leave it out.")
        self.num_embeddings: int = self.model.get_input_embeddings().weight.shape[0]
        self.positions: float = learned_positions(self.model) or math.inf
        self._group_of = position_groups(self.model)
        self.fingerprint = _fingerprint(self.model, self.tokenizer, self.outputs)
        is_static = self.runtime.plans_shapes
        keep_heads_in_float32(self.model)
        if is_static:
            use_static_shapes(self.model)
        crossover = attention_crossover_length(config.hidden_size)
        plans_lengths = is_static and not self._group_of(math.inf)
        shards, chunk = self.mesh.batch_shards, shared_chunk(self.model)
        makers = Batches(self.pad_token_id, tokens_per_pass, crossover, shards, plans_lengths, chunk=chunk)
        self.padded = makers.padded
        self.batches: MakeBatches = makers.planned if is_static else makers.unpadded
        try:
            # check this while the model is on the host: there its test pass compiles nothing
            dtype = torch.bfloat16 if bf16 else self.model.dtype
            make_packable(self.model, self.pad_token_id, not is_static, self.device, dtype)
            makers.trees = tree_layout(without_adapters(self.model), self.device, dtype)
        except PackingImpossible as reason:
            logger.warning(f"Sequences are padded, not packed: {reason}.")
            self.batches = makers.padded
        plan = plan_model(self.model, self.mesh)
        report = place_model(self.model, plan, self.runtime, self.device)
        if self.mesh.devices > 1:
            shard_activations(self.model, plan, report.placements, self.runtime)

    def start(self, dialogues: Dialogues) -> Callable[[], np.ndarray]:
        """Start to compute the rewards of D tokenized sequences, and return without waiting for them.

        A nan or inf in one sequence can turn the rewards of other sequences in its batch into nan, since masking keeps
        nan. Sequences without a finite reward are therefore computed again, each in a separate padded row.

        Returns:
            A function that waits for the rewards and returns them in order, float64 [D, 1 + A]: the reward, then the
            rewards of the model's A attributes.
        """
        wait = self._compute(dialogues, self.batches)

        def rewards() -> np.ndarray:
            rewards_DA = wait()
            nonfinite = np.flatnonzero(~np.isfinite(rewards_DA).all(axis=1)).tolist()
            rewards_DA[nonfinite] = self._compute([dialogues[index] for index in nonfinite], self.padded)()
            rewards_D = rewards_DA @ np.array(self.outputs.weights)
            if self.scale is not None:
                rewards_D = (rewards_D - self.scale.mean) / self.scale.std
            return np.column_stack([rewards_D, rewards_DA[:, : len(self.outputs.attributes)]])

        return rewards

    def _compute(self, dialogues: Dialogues, batches: MakeBatches) -> Callable[[], np.ndarray]:
        """Start to compute the rewards of all A outputs; the returned function waits for them, [D, A]."""
        compute = self.runtime.compiled(_rewards_of)
        upload = partial(self.runtime.upload, batch_axes=BATCH_AXES, device=self.device)
        computed = list[tuple[np.ndarray, np.ndarray, torch.Tensor]]()  # sequences, their places, and their rewards
        for members_N, micro_batches in self._batches_by_positions(dialogues, batches):
            for batch in micro_batches:
                place_N = np.flatnonzero(batch.present_P.numpy())  # members in this micro-batch
                sent = batch.map_tensors(upload)
                with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                    rewards_SA = compute(self.model, sent)
                computed.append((members_N[place_N], place_N, self.runtime.constrain(rewards_SA, (None, None))))
                self.runtime.step_boundary()

        def fetch() -> np.ndarray:
            rewards_DA = np.full((len(dialogues), len(self.outputs.weights)), math.nan)
            host = self.runtime.fetch([rewards_SA for *_, rewards_SA in computed]) if computed else []
            for (members_N, place_N, _), rewards_SA in zip(computed, host, strict=True):
                rewards_DA[members_N] = rewards_SA.double().numpy()[place_N]
            return rewards_DA

        return fetch

    def _batches_by_positions(self, dialogues: Dialogues, batches: MakeBatches) -> Iterator[Members]:
        """Yield batches of sequences that do not change each other's positions."""
        if len(dialogues) and self._group_of(math.inf) > 1:
            # a one-token pass resets rotary frequencies of an earlier long sequence; its reward is overwritten below
            yield from self.padded([dialogues[0][:1]])
        groups_D = np.array([self._group_of(len(ids)) for ids in dialogues])
        for group in np.unique(groups_D):
            here_D = np.flatnonzero(groups_D == group)
            make = self.padded if group else batches  # packed rows leave out pad tokens at the end
            yield from ((here_D[members], batch) for members, batch in make([dialogues[i] for i in here_D.tolist()]))


def _rewards_of(model: Any, batch: Batch[torch.Tensor]) -> torch.Tensor:
    """Compute the rewards of a micro-batch, [S, A]."""
    return rewards_of(model, batch)[0]


def _fingerprint(model: torch.nn.Module, tokenizer: Any, outputs: HeadSpec) -> str:
    """Return a hash of samples of every weight, the tokenizer and the outputs: rewards depend on these.

    Training changes every trained weight, so a few values of each weight distinguish checkpoints.
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
