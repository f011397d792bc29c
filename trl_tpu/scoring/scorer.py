"""A saved reward model that gives many dialogues their rewards, on the device that training would take."""

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from transformers.utils import find_adapter_config_file

from .. import runtime as runtimes
from ..data import checks
from ..data.tokenize import tokenize_dialogue, with_eos
from ..errors import UserError
from ..modeling.adapters import is_peft_model, load_adapted_model, without_adapters
from ..modeling.attention.masked import packed_rewards
from ..modeling.attention.packability import make_packable
from ..modeling.attention.static import use_static_attention
from ..modeling.attention.unmodified import PackingImpossible
from ..modeling.experts import use_static_experts
from ..modeling.load import load_classifier, load_tokenizer
from ..modeling.positions import learned_positions
from ..modeling.readers import RewardScale, saved_scale, scale_of
from ..modeling.score_head import keep_score_head_in_float32
from ..packing.dialogues import Pass, PlannedPasses, TightPasses
from ..packing.padded import PaddedPass, PaddedPasses
from ..parallel.mesh import parse_mesh
from ..parallel.shard import keep_activations_split, place_model, plan_model
from ..runtime import Runtime

logger = logging.getLogger(__name__)

Dialogue = str | list[dict[str, Any]]

TOKENS_A_PASS = 4096


class Scorer:
    """A saved reward model, placed on its devices, and its tokenizer.

    Args:
        model_folder: Folder (or Hub id) of a saved reward model, or of adapters, which name their base model.
        trust_remote_code: Whether the model may bring its own code.
        bf16: Whether to compute in bfloat16, over float32 weights; the score head stays in float32.
        mesh: How PyTorch/XLA's devices share the weights, as in training.
        tokens_per_pass: Tokens that each device computes at a time.
        batch_size: Most dialogues computed at a time in plain torch; no limit when None.
        standardise: Whether rewards are ``(reward - mean) / std``, by the mean and std in the model's config.
        runtime: What computes; training's choice when None.

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
        batch_size: int | None = None,
        standardise: bool = False,
        runtime: Runtime | None = None,
    ) -> None:
        for name, value in {"batch_size": batch_size, "tokens_per_pass": tokens_per_pass}.items():
            if value is not None and value < 1:
                raise UserError(f"`{name}` must be 1 or more, not {value}.")
        self.runtime = runtime or runtimes.current()
        topology = self.runtime.topology()
        if topology.process_count > 1:
            raise UserError(
                f"Scoring uses the devices of one host, and this is one of {topology.process_count} that form a mesh. "
                "Start it on a slice of one host."
            )
        self.mesh = parse_mesh(mesh, topology.devices, topology.slices)
        self.bf16 = bf16
        self.device = self.runtime.device
        self.tokenizer: Any = load_tokenizer(model_folder, trust_remote_code=trust_remote_code)
        self.model: Any = _load(model_folder, trust_remote_code).eval()
        self.model.config.get_text_config().use_cache = False  # keys and values of what is read only once
        self.pad_token_id = self._settle_pad_token(model_folder)
        self.scale = self._scale_of(model_folder) if standardise else None
        self.num_embeddings: int = self.model.get_input_embeddings().weight.shape[0]
        self.positions: float = learned_positions(self.model) or math.inf
        self.fingerprint = _fingerprint(self.model, self.tokenizer)
        if bf16:
            keep_score_head_in_float32(self.model)
        if self.runtime.compiles:
            use_static_attention(without_adapters(self.model))
            use_static_experts(without_adapters(self.model))
        self.passes = self._plan_passes(tokens_per_pass, batch_size)
        self._place()

    def _settle_pad_token(self, model_folder: str) -> int:
        config = self.model.config.get_text_config()
        # the base model of adapters need not have one, or not the one that they were trained with
        if config.pad_token_id is None or (is_peft_model(self.model) and self.tokenizer.pad_token_id is not None):
            config.pad_token_id = self.tokenizer.pad_token_id
        if config.pad_token_id is None:
            raise UserError(
                f"Neither the config nor the tokenizer of {model_folder} has a pad token, by which a reward model "
                "finds the last token of a dialogue. Set the tokenizer's `pad_token` as in training and save it there."
            )
        return config.pad_token_id

    def _scale_of(self, model_folder: str) -> RewardScale:
        scale = saved_scale(model_folder) if is_peft_model(self.model) else scale_of(self.model.config)
        if scale is None:
            raise UserError(
                f"The config of {model_folder} has no `mean` and `std` of rewards to standardise by: models that were "
                "trained here have them. Leave `--standardise` out, or write both into its config.json."
            )
        return scale

    def _plan_passes(self, tokens: int, most: int | None) -> TightPasses | PlannedPasses | PaddedPasses:
        """Choose packed rows where they are exact, else padded ones; static shapes where the device compiles."""
        shards, compiles = self.mesh.batch_shards, self.runtime.compiles
        try:
            make_packable(self.model, self.pad_token_id)  # on the host still, where trying it compiles nothing
        except PackingImpossible as reason:
            logger.warning(f"Dialogues are padded, not packed: {reason}.")
            return PaddedPasses(self.pad_token_id, tokens, shards, compiles, most)
        crossover = 6 * self.model.config.get_text_config().hidden_size
        if not compiles:
            return TightPasses(self.pad_token_id, tokens, crossover, most)
        return PlannedPasses(self.pad_token_id, tokens, crossover, shards)

    def _place(self) -> None:
        plan = plan_model(self.model, self.mesh)
        self.runtime.set_mesh(self.mesh.sizes, self.mesh.slices)
        report = place_model(self.model, plan, self.runtime, self.device)
        if self.runtime.compiles:
            keep_activations_split(self.model, plan, report.placements, self.runtime)

    @property
    def runs_ahead(self) -> bool:
        """Whether the device computes while the host goes on."""
        return self.device.type != "cpu"

    # ---- tokens

    def token_ids(
        self, dialogue: Dialogue, row: Mapping[str, Any] | None = None, column: str = "dialogue", index: int = 0
    ) -> list[int]:
        """Tokenize a dialogue as training does: text ends with the EOS, messages go through the template.

        Args:
            dialogue: Text or messages.
            row: May hold ``tools`` and ``chat_template_kwargs`` for the template.
            column: What errors call the dialogue.
            index: The number of its row, for errors.

        Raises:
            UserError: Neither text nor messages, messages that cannot be rendered, no tokens, or tokens that the
                model lacks.
        """
        where = checks.row_of(index, "scored")
        checks.check_dialogue(dialogue, column, where)
        if isinstance(dialogue, list) and self.tokenizer.chat_template is None:
            raise UserError("This model's tokenizer has no chat template, so it scores text, not messages.")
        ids = tokenize_dialogue(with_eos(dialogue, self.tokenizer), self.tokenizer, row or {}, f"{where}: `{column}`")
        checks.check_ids(ids, column, where, self.num_embeddings)
        return ids

    # ---- rewards

    @property
    def row_length(self) -> int | None:
        """The length of the usual rows, where it is chosen for the first dialogues: what comes after depends on it."""
        return self.passes.length if isinstance(self.passes, PlannedPasses) else None

    @row_length.setter
    def row_length(self, length: int | None) -> None:
        if isinstance(self.passes, PlannedPasses):
            self.passes.length = length

    def rewards(self, ids: Sequence[Sequence[int]], max_length: int | None = None) -> list[float]:
        """Compute the rewards of tokenized dialogues, in order; nan for those of more than ``max_length`` tokens.

        Raises:
            UserError: A dialogue for which the model has no positions.
        """
        limit = math.inf if max_length is None else max_length
        rewards = [math.nan] * len(ids)
        fitting = [index for index, tokens in enumerate(ids) if len(tokens) <= limit]
        for index in fitting:
            if len(ids[index]) > self.positions:
                raise UserError(
                    f"{checks.row_of(index, 'scored')} has {len(ids[index])} tokens, but the model has learned "
                    f"{self.positions} positions (`max_position_embeddings`). Shorten it, or set "
                    f"max_length={self.positions} to give such dialogues no reward."
                )
        computed = self.start([np.asarray(ids[index], np.int32) for index in fitting]).rewards()
        for index, reward in zip(fitting, computed.tolist(), strict=True):
            rewards[index] = reward
        return rewards

    def start(self, dialogues: Sequence[np.ndarray]) -> "Pending":
        """Begin to compute the rewards of tokenized dialogues."""
        return Pending(self, dialogues)

    def compute(self, dialogues: Sequence[np.ndarray], alone: bool = False) -> list[tuple[list[int], torch.Tensor]]:
        """Compute the rewards of some dialogues at a time: which ones, and their rewards on the device."""
        computed = []
        for each in self.passes(dialogues, alone):
            with torch.no_grad(), self._precision():
                rewards_D = self._packed(each) if isinstance(each, Pass) else self._padded(each)
            computed.append((each.members, self.runtime.constrain(rewards_D.float(), (None,))))
            self.runtime.step_boundary()
        return computed

    def _precision(self) -> ExitStack:
        stack = ExitStack()
        if self.bf16:
            stack.enter_context(torch.autocast(self.device.type, dtype=torch.bfloat16))
        return stack

    def _packed(self, some: Pass) -> torch.Tensor:
        return packed_rewards(self.model, some.rows.map_tensors(self._sent))

    def _padded(self, some: PaddedPass) -> torch.Tensor:
        columns_L = np.arange(some.input_ids_RL.shape[1])
        attention_mask_RL = (columns_L < some.lengths_R[:, None]).astype(np.int64)
        inputs = {"input_ids": some.input_ids_RL, "attention_mask": attention_mask_RL}
        return self.model(**{name: self._sent(array) for name, array in inputs.items()}).logits.squeeze(-1)

    def _sent(self, array: np.ndarray) -> torch.Tensor:
        """Copy an array to the devices: rows over the batch axes, and whole what has one number a dialogue."""
        axes = (self.mesh.batch_axes, None) if array.ndim == 2 else (None,)
        return self.runtime.place(torch.from_numpy(array), axes, self.device)


class Pending:
    """Rewards that a device computes: the host may go on meanwhile.

    Args:
        scorer: Computes.
        dialogues: Tokenized.
    """

    def __init__(self, scorer: Scorer, dialogues: Sequence[np.ndarray]) -> None:
        self._scorer, self._dialogues = scorer, dialogues
        self._computed = scorer.compute(dialogues)

    def rewards(self) -> np.ndarray:
        """Wait for the rewards, and return them in order, float64.

        What is computed beside a dialogue with nan or inf may have become nan too, as a masked-out nan is still one.
        So such dialogues are computed once more, each alone in its row.
        """
        rewards_D = np.full(len(self._dialogues), math.nan)
        self._fetch(self._computed, rewards_D, np.arange(len(rewards_D)))
        again = np.flatnonzero(~np.isfinite(rewards_D))
        if len(again):
            alone = self._scorer.compute([self._dialogues[index] for index in again.tolist()], alone=True)
            self._fetch(alone, rewards_D, again)
        scale = self._scorer.scale
        return rewards_D if scale is None else (rewards_D - scale.mean) / scale.std

    def _fetch(self, computed: list[tuple[list[int], torch.Tensor]], rewards_D: np.ndarray, which: np.ndarray) -> None:
        host = self._scorer.runtime.fetch([tensor for _, tensor in computed]) if computed else []
        for (members, _), found in zip(computed, host, strict=True):
            rewards_D[which[members]] = found[: len(members)].double().numpy()


def _fingerprint(model: torch.nn.Module, tokenizer: Any) -> str:
    """Return a number for what the rewards depend on: samples of every weight, and the tokenizer.

    Training moves all weights that it trains, so a few numbers of each tell one checkpoint from the next.
    """
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        flat = weight.detach().flatten()
        sample = flat[:: max(1, len(flat) // 64)].float().numpy()
        digest.update(f"{name} {tuple(weight.shape)}".encode() + sample.tobytes())
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    words = [vocabulary, tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template]
    digest.update(json.dumps(words).encode())
    return digest.hexdigest()


def _load(model_folder: str, trust_remote_code: bool) -> Any:
    kwargs: dict[str, Any] = {"num_labels": 1, "dtype": torch.float32, "trust_remote_code": trust_remote_code}
    if find_adapter_config_file(model_folder) is not None:
        return load_adapted_model(model_folder, **kwargs)
    model, report = load_classifier(model_folder, **kwargs)
    if report["missing_keys"]:
        raise UserError(
            f"{model_folder} is not a saved reward model: it lacks {sorted(report['missing_keys'])}, so its rewards "
            "would be random. Train it first (`trl-tpu reward`), and score with the folder that training saved."
        )
    return model
