"""Names that scripts import from ``trl.trainer.utils``."""

import logging

import numpy as np
from transformers import EvalPrediction

from ..data.collators import DataCollatorForPreference, RewardDataCollatorWithPadding
from ..data.formats import remove_none_values
from ..modeling.adapters import get_kbit_device_map, get_peft_config, get_quantization_config
from ..modeling.dropout import disable_dropout_in_model

logger = logging.getLogger(__name__)


def compute_accuracy(eval_pred: EvalPrediction) -> dict[str, float]:
    """Count how often the first of two predictions is the larger, but for pairs whose two are equal.

    Args:
        eval_pred: `predictions` of shape [pairs, 2], chosen first.
    """
    predictions_P2 = np.asarray(eval_pred.predictions)
    decided_P = predictions_P2[:, 0] != predictions_P2[:, 1]
    ties = int((~decided_P).sum())
    if ties:
        logger.warning(
            f"There are {ties} out of {len(predictions_P2)} instances where the predictions for both options are "
            "equal. These instances are ignored in the accuracy computation."
        )
    correct_P = predictions_P2[decided_P, 0] > predictions_P2[decided_P, 1]
    return {"accuracy": float(correct_P.mean()) if len(correct_P) else 0.0}


__all__ = [
    "DataCollatorForPreference",
    "RewardDataCollatorWithPadding",
    "compute_accuracy",
    "disable_dropout_in_model",
    "get_kbit_device_map",
    "get_peft_config",
    "get_quantization_config",
    "remove_none_values",
]
