"""Export a model of several shards and write how much memory that took: run by a test.

python tests/support/export_memory.py FOLDER {state,files,merged} [DTYPE]

It exports the checkpoint that `make_checkpoint` has written, in the dtype.

The measure is the peak of what the process has allocated, above what it had before. Pages of mapped files are not in
it: the system takes them back when it needs them.
"""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import exports
import peft
import torch
from allocator import give_back_at_once, private_bytes
from transformers import AutoModelForSequenceClassification, LlamaConfig, PreTrainedModel

from trl_tpu.checkpoint.export import export_checkpoint
from trl_tpu.checkpoint.state_dict import trained_weights

# 42 million float32 weights: 168 MB, of which the embedding and a layer are a tenth each
CONFIG: dict[str, Any] = exports.SIZES | {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 2048}
CONFIG |= {"num_hidden_layers": 9, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128}


class Peak:
    """Looks at the process's memory every few milliseconds, as a context."""

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
    """A checkpoint in ``folder``, to be exported by another process, whose memory is measured."""
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(LlamaConfig(**CONFIG))
    if way == "files":
        model.save_pretrained(folder / "c")
        return folder / "c"
    if way == "merged":
        model.save_pretrained(folder / "base")
        read = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=1)
        adapted: Any = peft.get_peft_model(read, peft.LoraConfig(task_type="SEQ_CLS", target_modules="all-linear"))
        adapted.peft_config["default"].save_pretrained(folder / "c")
        exports.write_state(folder / "c/state", trained_weights(adapted))
        return folder / "c"
    return exports.checkpoint_of(model, folder / "c")


def main(folder: Path, way: str, dtype: torch.dtype | None) -> None:
    out = folder / "out"
    tiny = exports.checkpoint_of(exports.llama(), folder / "tiny")
    export_checkpoint(tiny, folder / "tiny_out")  # what the first use imports and allocates is not the weights'
    with Peak() as peak:
        export_checkpoint(folder / "c", out, max_shard_size="27MB", merge=way == "merged", dtype=dtype)
    sizes = [path.stat().st_size for path in out.glob("*.safetensors")]
    (folder / "measured.json").write_text(json.dumps({"allocated": peak.most - peak.before, "files": sizes}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    give_back_at_once()
    main(Path(sys.argv[1]), sys.argv[2], getattr(torch, sys.argv[3]) if sys.argv[3:] else None)
