"""ModelConfig: which model a script loads, and with which adapters."""

import warnings
from dataclasses import dataclass, field

from ..config.checks import warn_of_unmet_needs
from ..config.reward_config import help_from_docstring
from ..errors import UserError


@help_from_docstring
@dataclass
class ModelConfig:
    """The model of a script, its adapters and its quantization, as command-line flags.

    The fields and defaults are those of TRL's class of this name but for `lora_task_type`, where TRL's default
    (``"CAUSAL_LM"``) fails on a reward model.

    Args:
        model_name_or_path: A Hub id, a local folder, or ``synthetic:NAME``.
        model_revision: Branch, tag or commit of the model on the Hub.
        dtype: Type of the weights: ``"auto"``, ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        attn_implementation: Attention implementation; the model's own default when None.
        use_peft: Whether to train LoRA adapters.
        lora_r: Rank of the adapters.
        lora_alpha: Scale of the adapters; they are multiplied by `lora_alpha / lora_r`.
        lora_dropout: Dropout of the adapters.
        lora_target_modules: Modules that get adapters; a list of one becomes that string (``all-linear``, a pattern).
        lora_target_parameters: Parameters that get adapters, where a module does not hold them (experts).
        lora_modules_to_save: Modules to train and save whole.
        lora_task_type: Task type of the adapters; ``"SEQ_CLS"`` trains and saves the score head.
        use_rslora: Whether to multiply by `lora_alpha / sqrt(lora_r)` instead.
        use_dora: Whether to train weight-decomposed adapters (DoRA).
        load_in_8bit: Whether to load the base model in 8 bits (CUDA).
        load_in_4bit: Whether to load the base model in 4 bits (CUDA).
        bnb_4bit_quant_type: 4-bit format: ``"fp4"`` or ``"nf4"``.
        use_bnb_nested_quant: Whether to quantize the quantization constants too.
        bnb_4bit_quant_storage: Type that stores the 4-bit weights.
        torch_dtype: Deprecated. The name of `dtype` up to TRL 0.23, which it overrules.

    Raises:
        UserError: Both `load_in_8bit` and `load_in_4bit`.
    """

    model_name_or_path: str | None = None
    model_revision: str = "main"
    dtype: str | None = field(default="float32", metadata={"choices": ["auto", "bfloat16", "float16", "float32"]})
    attn_implementation: str | None = None
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: list[str] | None = None
    lora_target_parameters: list[str] | None = None
    lora_modules_to_save: list[str] | None = None
    lora_task_type: str = "SEQ_CLS"
    use_rslora: bool = False
    use_dora: bool = False
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = field(default="nf4", metadata={"choices": ["fp4", "nf4"]})
    use_bnb_nested_quant: bool = False
    bnb_4bit_quant_storage: str | None = None
    torch_dtype: str | None = None

    trust_remote_code = False  # no field: a flag of `RewardConfig`; scripts for TRL up to 1.6 read it here

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise UserError("You can't use 8 bit and 4 bit precision at the same time: set one of the two.")
        if self.torch_dtype is None:
            self.torch_dtype = self.dtype  # scripts read it by either name
        elif self.torch_dtype != self.dtype:
            warnings.warn("`torch_dtype` is deprecated: use `dtype`.", FutureWarning, stacklevel=3)
            self.dtype = self.torch_dtype
        if isinstance(self.lora_target_modules, list | tuple) and len(self.lora_target_modules) == 1:
            # peft reads a string as a pattern or as "all-linear"; the command line can only give a list
            self.lora_target_modules = self.lora_target_modules[0]  # type: ignore[assignment]
        warn_of_unmet_needs(self)
