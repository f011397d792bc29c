"""`ModelConfig`: model, adapters and quantization of a script."""

from dataclasses import field

from ..config.checks import warn_of_unmet_needs
from ..config.reward_config import dataclass_with_help
from ..errors import UserError


@dataclass_with_help
class ModelConfig:
    """Command-line flags for a model, its adapters and its quantization.

    It has the fields and defaults of TRL's `ModelConfig`. Only `lora_task_type` has another default, because TRL's
    (``"CAUSAL_LM"``) fails on reward models.

    Args:
        model_name_or_path: Hub id or local folder of the model, or ``synthetic:NAME``.
        model_revision: Branch, tag or commit of the model on the Hub.
        dtype: Type of the weights: ``"auto"``, ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        attn_implementation: Attention implementation. By default the model's own.
        use_peft: Whether to train LoRA adapters.
        lora_r: Rank of the LoRA adapters.
        lora_alpha: Scale of the LoRA adapters: their output is multiplied by `lora_alpha / lora_r`.
        lora_dropout: Dropout probability of the LoRA adapters.
        lora_target_modules: Modules that get LoRA adapters. A list of one string is passed on as this string:
            ``all-linear`` or a pattern. By default peft chooses modules for the model type.
        lora_target_parameters: Parameters that get LoRA adapters, for weights that are not modules, such as experts.
        lora_modules_to_save: Modules that are trained and saved in full, without adapters.
        lora_task_type: Task type of the LoRA adapters. ``"SEQ_CLS"`` also trains and saves the score head.
        use_rslora: Whether to multiply adapter outputs by `lora_alpha / sqrt(lora_r)` (rank-stabilized LoRA) instead.
        use_dora: Whether to train weight-decomposed adapters (DoRA).
        load_in_8bit: Whether to load the base model in 8 bits (CUDA).
        load_in_4bit: Whether to load the base model in 4 bits (CUDA).
        bnb_4bit_quant_type: Format of 4-bit weights: ``"fp4"`` or ``"nf4"``.
        use_bnb_nested_quant: Whether to quantize the quantization constants of 4-bit weights too.
        bnb_4bit_quant_storage: Type in which 4-bit weights are stored.
        torch_dtype: Deprecated name of `dtype` in TRL up to 0.23. If set, it overrides `dtype`.

    Raises:
        UserError: If both `load_in_8bit` and `load_in_4bit` are set.
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

    trust_remote_code = False  # not a field; the flag is in `RewardConfig`, but scripts for TRL up to 1.6 read it here

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise UserError("You can't use 8 bit and 4 bit precision at the same time: set one of the two.")
        self.dtype = self.torch_dtype = self.torch_dtype or self.dtype  # scripts read either name
        if isinstance(self.lora_target_modules, list | tuple) and len(self.lora_target_modules) == 1:
            # peft interprets only a string as a pattern or "all-linear", but the command line always gives a list
            self.lora_target_modules = self.lora_target_modules[0]  # type: ignore[assignment]
        warn_of_unmet_needs(self)
