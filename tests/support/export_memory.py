"""Export a model of several shards and write the memory this took: run by a test.

python tests/support/export_memory.py FOLDER {state,files,merged} [DTYPE]

It exports the checkpoint written by `make_checkpoint` in the given dtype.

The result is the peak of allocated memory above that before the export. Pages of mapped files are not counted: the
system can drop them when it needs memory.
"""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import checkpoints
import peft
import torch
from environment import private_bytes, return_freed_memory
from transformers import AutoModelForSequenceClassification, LlamaConfig, PreTrainedModel

from trl_tpu.checkpoint.export import export_checkpoint
from trl_tpu.checkpoint.state_dict import trained_weights

# 42 million float32 weights, 168 MB; the embedding and each layer are a tenth
CONFIG: dict[str, Any] = checkpoints.SIZES | {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 2048}
CONFIG |= {"num_hidden_layers": 9, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128}


class Peak:
    """Context that samples the process's memory every few milliseconds."""

    def __enter__(self) -> "Peak":
        self.before = self.most = private_bytes()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._end.wait(0.002):
            self.most = max(self.most, private_bytes())


def make_checkpoint(folder: Path, way: str) -> Path:
    """Write a checkpoint into ``folder`` for an export by another process, whose memory is measured."""
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(LlamaConfig(**CONFIG))
    if way == "files":
        model.save_pretrained(folder / "c")
        return folder / "c"
    if way == "merged":
        model.save_pretrained(folder / "base")
        read = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=1)
        adapted: Any = peft.get_peft_model(read, peft.LoraConfig(task_type="SEQ_CLS", target_modules="all-linear"))
        adapted.peft_config["default"].save_pretrained(folder / "c")
        checkpoints.write_state(folder / "c/state", trained_weights(adapted))
        return folder / "c"
    return checkpoints.checkpoint_of(model, folder / "c")


def main(folder: Path, way: str, dtype: torch.dtype | None) -> None:
    out = folder / "out"
    tiny = checkpoints.checkpoint_of(checkpoints.llama(), folder / "tiny")
    export_checkpoint(tiny, folder / "tiny_out")  # imports and allocations of the first use do not count
    with Peak() as peak:
        export_checkpoint(folder / "c", out, max_shard_size="27MB", merge=way == "merged", dtype=dtype)
    sizes = [path.stat().st_size for path in out.glob("*.safetensors")]
    (folder / "measured.json").write_text(json.dumps({"allocated": peak.most - peak.before, "files": sizes}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    return_freed_memory()
    main(Path(sys.argv[1]), sys.argv[2], getattr(torch, sys.argv[3]) if sys.argv[3:] else None)
