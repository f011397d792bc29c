"""Loading a model and its tokenizer, with errors that say what is wrong with a folder."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME

from .. import runtime
from ..errors import UserError
from . import broken
from .streaming import Place, placing

logger = logging.getLogger(__name__)

NO_BITSANDBYTES = (
    "bitsandbytes quantization needs CUDA kernels, which XLA devices do not have. Load the model without it "
    "(`load_in_4bit` and `load_in_8bit` off, no `BitsAndBytesConfig`), the frozen base model in bfloat16 with "
    "`--dtype bfloat16 --use_peft`, or train on CUDA with USE_TORCH_XLA=0."
)
_LANGUAGE_MODEL_HEADS = ("lm_head.", "embed_out.")


def load_model(
    name: str,
    *,
    model_init_kwargs: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    quantization_config: Any | None = None,
    place: Place | None = None,
) -> PreTrainedModel:
    """Load a checkpoint as a reward model: a sequence classifier with one label.

    A causal language model's checkpoint has no reward head; the new head is random, so the caller sets the seed first.
    The model stays on the CPU for the trainer to place, unless `place` does (TRL defaults to ``device_map="auto"`` on
    accelerators).

    Args:
        name: hub id or folder.
        model_init_kwargs: for ``from_pretrained``; not changed. ``dtype`` is a torch.dtype, "auto", None or one of
            "bfloat16", "float16", "float32", and defaults to float32.
        trust_remote_code: the default for the ``model_init_kwargs`` of that name.
        quantization_config: a transformers quantization config.
        place: where each weight goes as soon as it is read, instead of staying on the CPU.

    Raises:
        UserError: ``quantization_config`` in both places, an unknown dtype, bitsandbytes quantization on XLA, or a
            name or folder that holds no whole reward model (the broken file is named).
    """
    kwargs = dict(model_init_kwargs or {})
    if quantization_config is not None:
        if "quantization_config" in kwargs:
            raise UserError(
                "You set `quantization_config` both as a trainer argument and in `args.model_init_kwargs`. Set it in "
                "one place only, preferably as a trainer argument."
            )
        kwargs["quantization_config"] = quantization_config
    if "torch_dtype" in kwargs:  # its name before transformers 4.56, which TRL overrules with float32
        kwargs.setdefault("dtype", kwargs.pop("torch_dtype"))
    kwargs["dtype"] = _dtype(kwargs.get("dtype", "float32"))
    if kwargs.get("num_labels", 1) != 1:
        logger.warning(f"`num_labels={kwargs['num_labels']}` is ignored: reward models have `num_labels=1`.")
    kwargs["num_labels"] = 1
    kwargs.setdefault("trust_remote_code", trust_remote_code)
    kwargs.setdefault("device_map", None)
    if runtime.current().compiles:
        _fit_xla(kwargs)
    may_mismatch = kwargs.pop("ignore_mismatched_sizes", False)
    with nullcontext() if place is None else placing(place):
        model, info = load_classifier(name, may_mismatch=may_mismatch, **kwargs)
    _report_unexpected(model, info, name)
    return model


def load_classifier(name: str, *, may_mismatch: bool = False, **kwargs: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load a sequence classifier, and transformers' loading info: which weights are missing or unexpected.

    Args:
        name: hub id or folder.
        may_mismatch: start weights of another shape than the model's random, with a warning.
        **kwargs: for ``from_pretrained``.

    Raises:
        UserError: there is none, a file is broken, or weights have other shapes than the config says.
    """
    _check_shards(Path(name))
    with broken.explaining(name), _without_load_report():
        model, info = AutoModelForSequenceClassification.from_pretrained(
            name, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
        )
    if misfits := sorted(info["mismatched_keys"]):
        key, saved, made = misfits[0]
        told = (
            f"{len(misfits)} of the weights in {name} do not fit: {key} has the shape {tuple(saved)} in the file and "
            f"{tuple(made)} in the model, which has one output."
        )
        if not may_mismatch:
            raise UserError(
                f"{told} Correct the sizes in its config.json, start from the model that it was trained from, or give "
                "`model_init_kwargs={'ignore_mismatched_sizes': True}` for new random weights."
            )
        logger.warning(f"{told} They start random, as `ignore_mismatched_sizes` asks for.")
    return model, info


def _check_shards(folder: Path) -> None:
    """Refuse an index that names files outside of its folder: transformers reads whatever it names.

    A broken index is for transformers to refuse, if it reads it at all.
    """
    for index in filter(Path.is_file, (folder / SAFE_WEIGHTS_INDEX_NAME, folder / WEIGHTS_INDEX_NAME)):
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = [PurePosixPath(file) for file in weight_map.values()]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        for file in files:
            if file.is_absolute() or ".." in file.parts:
                raise UserError(f"{index} names {str(file)!r}, a file elsewhere. Correct it, or copy it anew.")


def _dtype(dtype: Any) -> Any:
    if isinstance(dtype, torch.dtype) or dtype in ("auto", None):
        return dtype
    if dtype in ("bfloat16", "float16", "float32"):
        return getattr(torch, dtype)
    raise UserError(
        "Invalid `dtype` passed to the config. Expected a `torch.dtype`, 'auto', None, 'bfloat16', 'float16' or "
        f"'float32', but got {dtype!r}."
    )


def _fit_xla(kwargs: dict[str, Any]) -> None:
    quantization = kwargs.get("quantization_config")
    flags = quantization if isinstance(quantization, dict) else kwargs
    if isinstance(quantization, BitsAndBytesConfig) or flags.get("load_in_4bit") or flags.get("load_in_8bit"):
        raise UserError(NO_BITSANDBYTES)
    if kwargs["device_map"] is not None:
        logger.warning(
            f"`device_map={kwargs['device_map']!r}` is ignored: on XLA the trainer places the model, by its sharding "
            "plan."
        )
        kwargs["device_map"] = None


@contextmanager
def _without_load_report() -> Iterator[None]:
    """Keep transformers' table of missing, mismatched and unexpected weights from the log, unless it tells an error.

    For a reward model it always lists the new reward head and the old language model head; what else it would say,
    `load_model` says. This hangs on the name of transformers' logger and on the words of its table: where they change,
    the table is shown again.
    """

    def explains_error(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "LOAD REPORT" not in text or "CONVERSION" in text

    modeling_logger = logging.getLogger("transformers.modeling_utils")
    modeling_logger.addFilter(explains_error)
    try:
        yield
    finally:
        modeling_logger.removeFilter(explains_error)


def _report_unexpected(model: PreTrainedModel, info: dict[str, Any], name: str) -> None:
    backbone = f"{model.base_model_prefix}."
    missing = sorted(key for key in info["missing_keys"] if key.startswith(backbone))
    unexpected = sorted(key for key in info["unexpected_keys"] if not key.startswith(_LANGUAGE_MODEL_HEADS))
    found = {
        f"weights of the backbone are not in {name} and start random": missing,
        f"weights in {name} have no place in {type(model).__name__} and are left out": unexpected,
    }
    for what, weights in found.items():
        if weights:
            listed = ", ".join(weights[:5]) + (", ..." if len(weights) > 5 else "")
            logger.warning(
                f"{len(weights)} {what}: {listed}. Check that the checkpoint is one of a `{model.config.model_type}` "
                "model."
            )


def check_num_labels(model: Any) -> None:
    """Raise UserError unless the model's config says that it has one output."""
    num_labels = getattr(getattr(model, "config", None), "num_labels", None)
    if num_labels != 1:
        raise UserError(
            f"The model has `num_labels={num_labels}`, but reward models require `num_labels=1` to output a single "
            "scalar reward per sequence. Load it with "
            "`AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)`, or pass the trainer the model's "
            "name, which then sees to it."
        )


def load_processing_class(
    model: PreTrainedModel,
    processing_class: PreTrainedTokenizerBase | None = None,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedTokenizerBase:
    """Return the tokenizer given, or load the one beside the model's checkpoint.

    Raises:
        UserError: none given, and the model was not loaded from a checkpoint, or from one without a tokenizer that
            can be loaded.
    """
    if processing_class is not None:
        return processing_class
    name = getattr(model.config, "_name_or_path", "")
    if not name:
        raise UserError(
            "The model was not loaded from a checkpoint, so its tokenizer is unknown. Pass the tokenizer as "
            "`processing_class`."
        )
    return load_tokenizer(name, revision=revision, trust_remote_code=trust_remote_code)


def load_tokenizer(name: str, **kwargs: Any) -> PreTrainedTokenizerBase:
    """Load a tokenizer by `AutoTokenizer.from_pretrained`, with an error that says what is wrong with the folder.

    Raises:
        UserError: there is no tokenizer of that name, or it cannot be loaded.
    """
    with broken.explaining(name, "a tokenizer"):
        return AutoTokenizer.from_pretrained(name, **kwargs)
