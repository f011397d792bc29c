"""CPU seconds of one of several hosts to plan the rows of a global batch, and to pack its part of one.

python -m tests.benchmarks.bench_packing --pairs 256 2048 16384 --hosts 8
"""

import itertools
import time
from collections.abc import Iterator

import numpy as np
import real_pairs
from preference_rows import to_columns

from tests.benchmarks.harness import options, show, timed
from trl_tpu.data.collate import sequences_of
from trl_tpu.packing.pack import pack
from trl_tpu.packing.shapes import RowLengths, ShapePlanner, common_prefix


def dialogues() -> Iterator[list[np.ndarray]]:
    """Yield pairs without end. Copies have other token ids, so that they share nothing."""
    tokenized = real_pairs.tokenized(real_pairs.best_pairs())
    pairs = [[np.array(ids, np.int32) for ids in pair] for pair in tokenized]
    for copy in itertools.count(1):
        yield from ([ids + 10_000 * copy for ids in pair] for pair in pairs)


def measured(count: int, hosts: int) -> list[float]:
    seconds, pairs = list[float](), list(itertools.islice(dialogues(), 4 * count))
    lengths = RowLengths.of((same := common_prefix(*both), *(len(ids) - same for ids in both)) for both in pairs)
    with timed(seconds, time.process_time):
        plan = ShapePlanner(lengths.sizes_N, count, hosts, attention_crossover_length=6 * 1024).plan()
    chosen = np.random.default_rng(0).permutation(len(pairs))[:count]
    sequences = sequences_of([to_columns({"answers": pairs[index]}) for index in chosen], 0)
    with timed(seconds, time.process_time):
        batches = pack(sequences, plan, part=(0, hosts))
    columns = hosts * sum(batch.input_ids_RL.size for batch in batches)
    return [*seconds, columns / lengths.sizes_N[chosen].sum()]


if __name__ == "__main__":
    args = options(pairs=["256", "2048", "16384"], hosts=8)
    headings = {"plan, s": ".2f", "pack, s": ".3f", "columns per token": ".3f"}
    show("packing", headings, ((count, measured(int(count), args.hosts)) for count in args.pairs))
