"""Layouts of batches as values, and the reason why a run's batches are not packed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from accelerate.utils import parse_flag_from_env
from datasets import Dataset
from transformers import DataCollatorForTokenClassification, PreTrainedModel

from ..compat.old_columns import RewardDataCollatorWithPadding
from ..config.reward_config import RewardConfig
from ..data.collate import BatchCollator, ComparisonRule, Part
from ..data.trl_dict import DataCollatorForPreference, DictCollator
from ..modeling.model_shape import outgrows_positions
from ..modeling.recurrent_layers import shared_chunk
from ..packing.pack import pack_unpadded, pad
from ..packing.planned import pack
from ..packing.shapes import RowPlan
from ..runtime import Runtime

#: Collators of TRL and transformers. `BatchCollator` makes batches with the same rows.
STANDARD_COLLATORS = (DataCollatorForPreference, RewardDataCollatorWithPadding, DataCollatorForTokenClassification)


def obstacle_to_packing(
    args: RewardConfig, model: PreTrainedModel, runtime: Runtime, dataset: Any, is_planned: bool
) -> str | None:
    """Return the first reason in the settings, the model's type and the training data not to pack batches, or None.

    User code is another reason, see `user_code_reading`, and so is a model that fails `make_packable`.

    Args:
        is_planned: Whether packed rows would have planned shapes.
    """
    counted, recompiles = args.include_num_input_tokens_seen, args.torch_compile and not is_planned
    shards = (
        args.fsdp or args.deepspeed_plugin or args.parallelism_config or parse_flag_from_env("ACCELERATE_USE_FSDP")
    )
    is_gpu = runtime.device.type == "cuda" and not args.use_cpu
    prefers_padding = args.packing == "auto" and is_gpu and shared_chunk(model) > 1
    changes_positions = outgrows_positions(model, args.max_length)
    counts_padding = getattr(counted, "value", counted) not in (False, "no")
    is_unbounded = is_planned and not can_plan(dataset, args.max_length)
    obstacles = {
        "packing is turned off": args.packing == "false",
        "torch_compile would compile the model again for each new shape of a row": recompiles,
        "neftune_noise_alpha scales its noise by the length of rows": args.neftune_noise_alpha,
        "long sequences change the positions of shorter ones in a batch (see max_length)": changes_positions,
        "accelerate shards the model, and packed rows are not tested with that": shards,
        "include_num_input_tokens_seen counts padded rows (num_tokens in the logs does not)": counts_padding,
        "on a GPU, recurrent layers are faster in padded rows: packed rows take many small steps": prefers_padding,
        "train_dataset is a stream without max_length, so its pairs may be longer than any row": is_unbounded,
    }
    return next((obstacle for obstacle, is_present in obstacles.items() if is_present), None)


def user_code_reading(args: RewardConfig, collator: Any, method: str | None) -> str | None:
    """Return a description of user code that makes or reads batches and so needs TRL's dict, or None.

    Args:
        collator: The user's data collator; None for the default.
        method: Name of a user-defined method of the trainer that reads batches.
    """
    if collator is not None and type(collator) not in STANDARD_COLLATORS:
        return "a custom data collator makes the batches"
    if method is None:
        return None
    if method.endswith("_dataloader") and args.train_batch_size > args.per_device_train_batch_size:
        return f"{method} is overridden; a batch of its loader is the batch of all devices of the mesh"
    return f"{method} is overridden, and such code expects padded rows"


def can_plan(dataset: Any, max_length: int | None) -> bool:
    """Return whether rows of ``dataset`` can be planned. A stream needs ``max_length`` as a bound for its pairs."""
    return isinstance(dataset, Dataset) or (dataset is not None and max_length is not None)


@dataclass(frozen=True)
class Unpadded:
    """Each batch is packed into one row without padding.

    Args:
        crossover: Row length at which attention costs as much as everything else.
    """

    crossover: float
    name = "packed"
    """The kind of rows, as recorded in checkpoints: "packed" or "padded"."""
    shapes = None
    """Number of batch shapes; None if shapes are not planned."""
    accumulates = False
    """Whether some batches are split into several micro-batches."""

    def collator(self, pad_token_id: int, rule: ComparisonRule, part: Part) -> Callable[..., Any]:
        """Return the collator that makes process ``part``'s batches with comparisons by ``rule``."""
        pack_rows = partial(pack_unpadded, attention_crossover_length=self.crossover)
        return BatchCollator(pack_rows, pad_token_id, rule, part if part.count > 1 else None)

    def __str__(self) -> str:
        return "each packed into one row without padding"


@dataclass(frozen=True)
class Planned:
    """Batches are packed into rows of a few planned shapes. All processes have the same shapes.

    Args:
        rows: The rows of all processes.
        expands: Whether attention is computed in rows of whole sequences.
    """

    rows: RowPlan
    expands: bool
    name = "packed"

    @property
    def shapes(self) -> int:
        return len(self.rows.shapes)

    @property
    def accumulates(self) -> bool:
        return bool(self.rows.accumulate)

    def collator(self, pad_token_id: int, rule: ComparisonRule, part: Part) -> Callable[..., Any]:
        pack_rows = partial(pack, plan=self.rows, expands=self.expands, part=(part.index, part.count))
        every = replace(part, pairs=part.pairs * part.count, shares_pairs=True)
        return BatchCollator(pack_rows, pad_token_id, rule, every)

    def __str__(self) -> str:
        attention = "in rows of whole sequences" if self.expands else "with masks"
        return f"packed into rows of {self.rows}; attention is computed {attention}"


@dataclass(frozen=True)
class Padded:
    """Batches have one row for each sequence.

    Args:
        reason: Why batches are not packed.
        lengths: Planned row lengths; None pads to the longest sequence.
        is_static: Whether each batch has the same number of rows, even if lengths are not planned.
        multiple: Row lengths that are not planned are multiples of this.
    """

    reason: str
    lengths: tuple[int, ...] | None
    is_static: bool
    multiple: int
    name = "padded"
    accumulates = False

    @property
    def shapes(self) -> int | None:
        return None if self.lengths is None else len(self.lengths)

    def collator(self, pad_token_id: int, rule: ComparisonRule, part: Part) -> Callable[..., Any]:
        lengths = self.lengths or () if self.is_static else None
        pack_rows = partial(pad, lengths=lengths, multiple=self.multiple)
        return BatchCollator(pack_rows, pad_token_id, rule, part if self.is_static or part.count > 1 else None)

    def __str__(self) -> str:
        if self.lengths is None:
            return f"padded to their longest sequence ({self.reason})"
        listed = " or ".join(map(str, self.lengths))
        if len(self.lengths) > 4:
            listed = f"one of {len(self.lengths)} lengths in"
        return f"padded to {listed} tokens ({self.reason})"


@dataclass(frozen=True)
class TrlDict(Padded):
    """Batches are TRL's dict of padded rows, for user code that makes or reads them.

    Args:
        collate: TRL's or the user's collator.
        is_old: Whether ``collate`` reads the columns of TRL up to 0.23.
        padding_side: The side on which ``collate`` pads.
    """

    collate: Callable[[list[Any]], dict[str, Any]]
    is_old: bool
    padding_side: str

    def collator(self, pad_token_id: int, rule: ComparisonRule, part: Part) -> Callable[..., Any]:
        collate, own_part = self.collate, part if part.count > 1 else None
        if type(collate) is DataCollatorForPreference and rule.answers != 2:
            collate = replace(collate, answers=rule.answers)
        return DictCollator(collate, self.is_old, rule, pad_token_id, self.padding_side, self.lengths, own_part)


BatchLayout = Unpadded | Planned | Padded
