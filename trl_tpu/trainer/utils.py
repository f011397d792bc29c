"""Functions that scripts import from ``trl.trainer.utils``."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import EvalPrediction, PreTrainedModel
from transformers.utils import is_peft_available as is_peft_available
from transformers.utils import is_torch_xpu_available as is_xpu_available  # noqa: F401

from ..compat.old_trl import RewardDataCollatorWithPadding as RewardDataCollatorWithPadding
from ..data.formats import remove_none_values as remove_none_values
from ..data.kinds.solutions import NO_LABEL
from ..data.tokenize import main_processes_first as global_then_local_main_first  # noqa: F401
from ..data.trl_dict import DataCollatorForPreference as DataCollatorForPreference
from ..modeling.adapters import get_kbit_device_map as get_kbit_device_map
from ..modeling.adapters import get_peft_config as get_peft_config
from ..modeling.adapters import get_quantization_config as get_quantization_config
from ..modeling.load import disable_dropout_in_model as disable_dropout_in_model
from ..modeling.load import get_config_model_id as get_config_model_id
from ..runtime import current

logger = logging.getLogger(__name__)


def compute_accuracy(eval_pred: EvalPrediction) -> dict[str, float]:
    """Compute the share of correct predictions.

    Pairs with two equal predictions are ignored, with a warning. So are labels of -100.

    Args:
        eval_pred: For pairs, `predictions` [pairs, 2] and the index of the better answer as label (0 for chosen). For
            steps or tokens, `predictions` [rows, steps or tokens, labels] and labels [rows, steps or tokens].

    Returns:
        `accuracy`; 0 if all labels are ignored.
    """
    predictions, labels, *_ = map(np.asarray, eval_pred)
    counts = labels != NO_LABEL
    if predictions.ndim == 2:
        counts = predictions[:, 0] != predictions[:, 1]
        if ties := int((~counts).sum()):
            logger.warning(
                f"There are {ties} out of {len(predictions)} instances where the predictions for both options are "
                "equal. These instances are ignored in the accuracy computation."
            )
    correct = (predictions.argmax(axis=-1) == labels)[counts]
    return {"accuracy": float(correct.mean()) if len(correct) else 0.0}


def pad(
    tensors: Sequence[torch.Tensor],
    padding_value: int = 0,
    padding_side: str = "right",
    pad_to_multiple_of: int | None = None,
) -> torch.Tensor:
    """Stack 1-D tensors of different lengths into one tensor [tensors, length], padded with ``padding_value``.

    The length is the length of the longest tensor, rounded up to a multiple of ``pad_to_multiple_of``.
    """
    padded = pad_sequence(list(tensors), batch_first=True, padding_value=padding_value, padding_side=padding_side)
    missing = -padded.shape[1] % (pad_to_multiple_of or 1)
    return functional.pad(padded, (0, missing) if padding_side == "right" else (missing, 0), value=padding_value)


def create_model_from_path(model_id: str, architecture: Any, **kwargs: Any) -> PreTrainedModel:
    """Load a model with ``architecture.from_pretrained``, in float32 unless ``dtype`` is given."""
    return architecture.from_pretrained(model_id, **{"dtype": torch.float32} | kwargs)


def get_act_offloading_ctx_manager(model: torch.nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which forward passes keep activations for the backward pass in host memory."""
    return current().activations_on_host()
