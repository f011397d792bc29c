"""Export a model of several shards and write the memory this took: run by a test.

python tests/support/export_memory.py FOLDER [DTYPE]

It exports the checkpoint FOLDER/c in the given dtype, and merges adapters.

The result is the peak of allocated memory above that before the export. Pages of mapped files are not counted: the
system can drop them when it needs memory.
"""

import json
import sys
import threading
from pathlib import Path

import checkpoints
import torch
from environment import private_bytes, return_freed_memory

from trl_tpu.checkpoint.export import export_checkpoint


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


def main(folder: Path, dtype: torch.dtype | None) -> None:
    out, merge = folder / "out", (folder / "c" / "adapter_config.json").is_file()
    tiny = checkpoints.checkpoint_of(checkpoints.llama(), folder / "tiny")
    export_checkpoint(tiny, folder / "tiny_out")  # imports and allocations of the first use do not count
    with Peak() as peak:
        export_checkpoint(folder / "c", out, max_shard_size="27MB", merge=merge, dtype=dtype)
    sizes = [path.stat().st_size for path in out.glob("*.safetensors")]
    (folder / "measured.json").write_text(json.dumps({"allocated": peak.most - peak.before, "files": sizes}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    return_freed_memory()
    main(Path(sys.argv[1]), getattr(torch, sys.argv[2]) if sys.argv[2:] else None)
