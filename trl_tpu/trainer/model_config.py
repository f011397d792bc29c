"""ModelConfig: which model a script loads, and with which adapters."""

from dataclasses import dataclass, field

from ..errors import UserError
from .field_docs import with_field_docs


@with_field_docs
@dataclass
class ModelConfig:
    """The model of a script, its adapters and its quantization, as command-line flags.

    The fields and defaults are those of TRL's class of this name but for `lora_task_type`, where TRL's default
    (``"CAUSAL_LM"``) fails on a reward model.

    Raises:
        UserError: Both `load_in_8bit` and `load_in_4bit`.
    """

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "A Hub id, a local folder, or synthetic:NAME."}
    )
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of the model on the Hub."})
    dtype: str | None = field(
        default="float32",
        metadata={"help": "Type of the weights.", "choices": ["auto", "bfloat16", "float16", "float32"]},
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "Attention implementation; the model's own default when not given."}
    )
    use_peft: bool = field(default=False, metadata={"help": "Whether to train LoRA adapters."})
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapters."})
    lora_alpha: int = field(
        default=32, metadata={"help": "Scale of the adapters, which are multiplied by lora_alpha / lora_r."}
    )
    lora_dropout: float = field(default=0.05, metadata={"help": "Dropout of the adapters."})
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "Modules that get adapters; a list of one may be all-linear, or a pattern."}
    )
    lora_target_parameters: list[str] | None = field(
        default=None, metadata={"help": "Parameters that get adapters, where a module does not hold them (experts)."}
    )
    lora_modules_to_save: list[str] | None = field(default=None, metadata={"help": "Modules to train and save whole."})
    lora_task_type: str = field(
        default="SEQ_CLS", metadata={"help": "Task type of the adapters; SEQ_CLS trains and saves the score head too."}
    )
    use_rslora: bool = field(
        default=False, metadata={"help": "Whether to scale by lora_alpha/√r (rank-stabilized LoRA) instead."}
    )
    use_dora: bool = field(default=False, metadata={"help": "Whether to train weight-decomposed adapters (DoRA)."})
    load_in_8bit: bool = field(default=False, metadata={"help": "Whether to load the base model in 8 bits (CUDA)."})
    load_in_4bit: bool = field(default=False, metadata={"help": "Whether to load the base model in 4 bits (CUDA)."})
    bnb_4bit_quant_type: str = field(default="nf4", metadata={"help": "4-bit format.", "choices": ["fp4", "nf4"]})
    use_bnb_nested_quant: bool = field(
        default=False, metadata={"help": "Whether to quantize the quantization constants too."}
    )
    bnb_4bit_quant_storage: str | None = field(default=None, metadata={"help": "Type that stores 4-bit weights."})

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise UserError("You can't use 8 bit and 4 bit precision at the same time: set one of the two.")
        if isinstance(self.lora_target_modules, list | tuple) and len(self.lora_target_modules) == 1:
            # peft reads a string as a pattern or as "all-linear"; the command line can only give a list
            self.lora_target_modules = self.lora_target_modules[0]  # type: ignore[assignment]
