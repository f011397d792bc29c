"""Together several hosts see every pair once, in order, on the right devices; and all of them do the same."""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from meeting import Meeting
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback

from trl_tpu.batching.mesh_loader import rows_of_host
from trl_tpu.data.collators import DataCollatorForPreference, PadToLengths, PairRows
from trl_tpu.data.loader import host_batches, read_own
from trl_tpu.parallel.mesh import MeshShape
from trl_tpu.training import agreement
from trl_tpu.training.agreement import HostAgreement
from trl_tpu.training.same_run import check_alike


def positions_of_hosts(order: Sequence[int], hosts: int) -> list[tuple[int, ...]]:
    """Where in the mesh the devices of each host are, if device ``order[p]`` is at position p of the mesh."""
    return [tuple(np.flatnonzero(np.isin(order, own)).tolist()) for own in np.split(np.arange(len(order)), hosts)]


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], MeshShape]:
    """Hosts of several devices in any order, as where several slices are put together, and a mesh over all of them."""
    hosts = draw(st.sampled_from([1, 2, 4, 16]))
    devices = hosts * draw(st.sampled_from([1, 4, 8]))
    order = draw(st.permutations(range(devices)) | st.just(range(devices)))
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    tensor = draw(st.sampled_from(sizes))
    data = draw(st.sampled_from([size for size in sizes if devices // tensor % size == 0]))
    slices = draw(st.sampled_from([size for size in (1, 2) if data % size == 0]))
    return positions_of_hosts(order, hosts), MeshShape(data, devices // tensor // data, tensor, slices)


def rows_at_position(count: int, mesh: MeshShape) -> list[list[int]]:
    """By definition: dimension 0 over `data` and `fsdp`, whole over `tensor`; positions in the mesh's order."""
    parts = np.arange(count).reshape(mesh.data, mesh.fsdp, -1)
    places = itertools.product(range(mesh.data), range(mesh.fsdp), range(mesh.tensor))
    return [parts[data, fsdp].tolist() for data, fsdp, _ in places]


@settings(max_examples=300)
@given(clusters(), st.integers(1, 3))
def test_a_hosts_rows_are_those_of_its_devices_and_all_hosts_have_all(
    cluster: tuple[list[tuple[int, ...]], MeshShape], each: int
) -> None:
    hosts, mesh = cluster
    count = each * mesh.batch_shards
    at_position = rows_at_position(count, mesh)
    times = np.zeros(count, dtype=int)
    for positions in hosts:
        held = sorted(set(itertools.chain(*(at_position[position] for position in positions))))
        assert rows_of_host(positions, count, mesh).tolist() == held
        times[held] += 1
    assert (times >= 1).all() and (mesh.tensor > 1 or (times == 1).all())


def test_a_batch_that_the_mesh_does_not_divide_is_whole_everywhere() -> None:
    assert rows_of_host((4, 5, 6, 7), 12, MeshShape(fsdp=8)).tolist() == list(range(12))


# ---- padded batches: each host reads its own pairs


def tokenized(count: int) -> Dataset:
    chooser = np.random.default_rng(0)
    halves = ("chosen_ids", "rejected_ids")
    rows: list[dict[str, Any]] = [
        {half: chooser.integers(1, 99, chooser.integers(3, 30)).tolist() for half in halves} for _ in range(count)
    ]
    return Dataset.from_list([row | {"margin": float(index)} for index, row in enumerate(rows)])


class Counting:
    """A dataset that notes which of its pairs are read."""

    def __init__(self, pairs: Dataset) -> None:
        self.pairs, self.column_names, self.with_format = pairs, pairs.column_names, pairs.with_format
        self.reads: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.reads.append(indices)
        return self.pairs.__getitems__(indices)


@pytest.mark.parametrize(("count", "tensor"), [(2, 1), (4, 2), (16, 8)])
def test_padded_batches_of_all_hosts_are_one_hosts_and_each_reads_its_own_pairs(
    count: int, tensor: int, tmp_path: Any
) -> None:
    """Over an epoch in shuffled order whose last batch is short."""
    mesh = MeshShape(fsdp=4 * count // tensor, tensor=tensor)
    batch = 2 * mesh.batch_shards
    pairs = tokenized(3 * batch + max(1, batch // 3))
    order = np.random.default_rng(1).permutation(len(pairs)).tolist()
    collate = PairRows(PadToLengths(DataCollatorForPreference(0, None), (8, 16, 24, 32), 0), batch, 0)
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    whole = list(host_batches(pairs, collate, batch, order, args))  # type: ignore[arg-type]
    read: list[int] = []
    devices = np.random.default_rng(2).permutation(4 * count).tolist()
    for positions in positions_of_hosts(devices, count):
        rows = rows_of_host(positions, batch, mesh)
        counting: Any = Counting(pairs)
        own, own_collate = read_own(counting, collate, rows)
        for ours, theirs in zip(host_batches(own, own_collate, batch, order, args), whole, strict=True):  # type: ignore[arg-type]
            assert ours.keys() == theirs.keys()
            assert torch.equal(ours["pair_mask"], theirs["pair_mask"])
            real = torch.from_numpy(rows)[theirs["pair_mask"][rows]]
            for name, value in ours.items():
                assert value.shape == theirs[name].shape and value.dtype == theirs[name].dtype, name
                assert torch.equal(value[real], theirs[name][real]), name
        own_reads = [index for indices in counting.reads for index in indices[:-1]]  # without the longest pair
        of_rows = [start + row for start in range(0, len(order), batch) for row in rows if start + row < len(order)]
        assert own_reads == [order[index] for index in of_rows]
        read += own_reads
    if tensor == 1:
        assert sorted(read) == sorted(order)
    assert set(read) == set(order)


# ---- decisions: hosts are threads, which meet as processes do


Asks = Callable[[int, int, TrainerControl], bool]
"""Of a host and a step: sets what a callback asks for there, and returns whether a SIGTERM has come."""


def agreement_of(meeting: Meeting, index: int) -> HostAgreement:
    agreed = HostAgreement(meeting.of(index), create_autospec(Accelerator, instance=True, num_processes=1))
    agreed.start(0)
    return agreed


def decide_together(hosts: int, steps: int, asks: Asks, args: TrainingArguments) -> tuple[list[list[Any]], Meeting]:
    """What each host decides at the end of each step; all take the same steps, or this would not end."""
    meeting = Meeting(hosts)

    def run(index: int) -> list[Any]:
        agreed = agreement_of(meeting, index)
        state, decided = TrainerState(max_steps=steps, logging_steps=args.logging_steps), []
        for step in range(1, steps + 1):
            state.global_step, state.epoch = step, step / (steps + 1)
            control = DefaultFlowCallback().on_step_end(args, state, TrainerControl())
            told = asks(index, step, control)
            requests = agreed.decide(args, state, control, {"SIGTERM": told})
            decided.append((step, control.should_save, control.should_log, control.should_training_stop, requests))
            if control.should_training_stop or requests["SIGTERM"]:
                break
        return decided

    with ThreadPoolExecutor(hosts) as pool:
        return list(pool.map(run, range(hosts))), meeting


@pytest.fixture
def arguments(tmp_path: Path) -> TrainingArguments:
    return TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", logging_steps=10, save_strategy="no", max_steps=40
    )


def test_what_one_host_asks_for_all_do_at_the_same_step(arguments: TrainingArguments) -> None:
    def asks(host: int, step: int, control: TrainerControl) -> bool:
        control.should_save |= host == 1 and step == 5
        return host == 0 and step >= 23

    decided, _ = decide_together(3, 40, asks, arguments)
    assert all(of_host == decided[0] for of_host in decided)
    (saved,) = (step for step, saves, *_ in decided[0] if saves)
    assert 5 <= saved <= 10  # at the log at the latest
    last, *_, requests = decided[0][-1]
    assert 23 <= last <= 30 and requests == {"SIGTERM": True}
    assert [step for step, _, logs, *_ in decided[0] if logs] == [step for step in (10, 20, 30) if step <= last]


def test_hosts_do_not_meet_at_every_step(arguments: TrainingArguments, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is due: after the first step, in as many as take some seconds on the slowest host."""
    clock = itertools.count()
    monkeypatch.setattr(agreement.time, "monotonic", lambda: next(clock) * 0.01)
    _, meeting = decide_together(2, 40, lambda *_: False, arguments)
    assert 4 <= meeting.times <= 20  # the logs at 10, 20, 30 and 40 among them


def test_a_request_to_stop_between_micro_batches_waits_for_the_hosts_to_meet(arguments: TrainingArguments) -> None:
    """There the loop would break on this host alone."""
    meeting = Meeting(2)

    def run(index: int) -> tuple[bool, bool]:
        agreed = agreement_of(meeting, index)
        between = TrainerControl(should_training_stop=index == 1, should_save=True)
        agreed.postpone(between)
        control = TrainerControl()
        agreed.decide(arguments, TrainerState(global_step=10, epoch=0.1, max_steps=40), control, {})
        return between.should_training_stop, control.should_training_stop

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [(False, True)] * 2


def test_a_stop_agreed_on_is_not_put_off_by_what_callbacks_ask_for_after_the_save(
    arguments: TrainingArguments,
) -> None:
    """All know that they have saved, so they meet then, also at a step at which nothing is due."""
    meeting = Meeting(2)

    def run(index: int) -> tuple[bool, bool]:
        agreed = agreement_of(meeting, index)
        state, control = TrainerState(global_step=1, epoch=0.1, max_steps=40), TrainerControl()
        stops = agreed.decide(arguments, state, control, {"SIGTERM": index == 1})["SIGTERM"]
        control.should_training_stop = stops and index == 0  # as a callback may ask for it after a save
        agreed.decide(arguments, state, control, {}, now=True)
        return stops, control.should_training_stop

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [(True, True)] * 2


def test_one_process_decides_at_once(arguments: TrainingArguments) -> None:
    decided, meeting = decide_together(1, 7, lambda host, step, control: step == 3, arguments)
    assert [step for step, *_ in decided[0]] == [1, 2, 3] and meeting.times == 0


def test_hosts_of_different_runs_are_refused_by_what_differs() -> None:
    run = {"seed": 42, "train data": "10 pairs (00)", "the step to resume from": 3}
    check_alike([run] * 16)
    others = [run, run, run | {"seed": 43}, run | {"the step to resume from": None}]
    with pytest.raises(ValueError) as error:
        check_alike(others)
    assert "seed is 42 on hosts 0, 1, 3 and 43 on host 2" in str(error.value)
    assert "the step to resume from is 3 on hosts 0, 1, 2 and null on host 3" in str(error.value)
    assert "train data" not in str(error.value)
