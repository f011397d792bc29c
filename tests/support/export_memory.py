"""Export a model of several shards and write how much memory that took: run by a test.

python tests/support/export_memory.py FOLDER {state,files,merged} [DTYPE]

It exports the checkpoint that `make_checkpoint` has written, in the dtype.

The measure is the peak of the process's resident memory above what it had before, and of that what is its own: the
pages of mapped files count as resident too, though the system takes them back when it needs them.
"""

import json
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import exports
import peft
import torch
from allocator import give_back_at_once
from transformers import AutoModelForSequenceClassification, LlamaConfig, PreTrainedModel

from trl_tpu.checkpoint.export import export_checkpoint
from trl_tpu.checkpoint.state_dict import trained_weights

# 94 million float32 weights: 380 MB, of which the embedding and a layer are a tenth each
CONFIG: dict[str, Any] = {
    "vocab_size": 12288,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 9,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 128,
    "num_labels": 1,
    "pad_token_id": 0,
}
SHARD = "60MB"


class Peak:
    """Looks at the process's memory every few milliseconds, as a context."""

    def __enter__(self) -> "Peak":
        self.before = self._now()
        self.resident, self.own = self.before
        self._running = True
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._running = False
        self._thread.join()

    def _watch(self) -> None:
        while self._running:
            resident, own = self._now()
            self.resident, self.own = max(self.resident, resident), max(self.own, own)
            time.sleep(0.002)

    @staticmethod
    def _now() -> tuple[int, int]:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        resident, own = (int(re.search(rf"{key}:\s+(\d+) kB", status)[1]) for key in ("VmRSS", "RssAnon"))  # type: ignore[index]
        return resident * 1024, own * 1024


def make_checkpoint(folder: Path, way: str) -> Path:
    """A checkpoint in ``folder``, to be exported by another process, whose memory is measured."""
    config = LlamaConfig(**CONFIG)
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config)
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
        export_checkpoint(folder / "c", out, max_shard_size=SHARD, merge=way == "merged", dtype=dtype)
    sizes = sorted(path.stat().st_size for path in out.glob("*.safetensors"))
    measured = {
        "resident": peak.resident - peak.before[0],
        "own": peak.own - peak.before[1],
        "largest_file": sizes[-1],
        "files": len(sizes),
        "bytes": sum(sizes),
    }
    (folder / "measured.json").write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    give_back_at_once()
    main(Path(sys.argv[1]), sys.argv[2], getattr(torch, sys.argv[3]) if sys.argv[3:] else None)
