"""Together several hosts see every pair once, in order, on the right devices; and all of them do the same."""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from meeting import Meeting
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback

from trl_tpu.batching.mesh_loader import rows_of_host
from trl_tpu.data.collators import DataCollatorForPreference, PadToLengths, PairRows, PlannedRows
from trl_tpu.data.loader import host_batches, read_own
from trl_tpu.packing.schedule import RowPlan
from trl_tpu.packing.shapes import RowShape
from trl_tpu.parallel.mesh import MeshShape
from trl_tpu.training import agreement
from trl_tpu.training.agreement import HostAgreement
from trl_tpu.training.same_run import check_alike

HOSTS = (1, 2, 4, 16)


def chips_of_hosts(hosts: int) -> np.ndarray:
    """Chip numbers [hosts, 4] as a TPU has them: through the grid, of which each host has 2 x 2."""
    across = {1: 2, 2: 2, 4: 4, 16: 8}[hosts]  # chips
    grid = np.arange(4 * hosts).reshape(-1, across)
    blocks = grid.reshape(grid.shape[0] // 2, 2, across // 2, 2).swapaxes(1, 2)
    return blocks.reshape(hosts, 4)


@dataclass(frozen=True)
class Host:
    """A host, and where in the mesh its devices are."""

    index: int
    positions: tuple[int, ...]

    def rows(self, count: int, mesh: MeshShape) -> np.ndarray:
        return rows_of_host(self.positions, count, mesh)


def everyone(devices_of_host: np.ndarray, order: np.ndarray) -> list[Host]:
    """All hosts, where device ``order[p]`` is at position p of the mesh."""
    places = [tuple(np.flatnonzero(np.isin(order, devices)).tolist()) for devices in devices_of_host]
    return [Host(index, own) for index, own in enumerate(places)]


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[Host], MeshShape]:
    """Hosts of four or eight devices in one of three orders, and a mesh over all of them."""
    count = draw(st.sampled_from(HOSTS))
    wiring = draw(st.sampled_from(["in a row", "grid", "any"]))
    each = 4 if wiring == "grid" else draw(st.sampled_from([1, 4, 8]))
    devices = count * each
    order = np.arange(devices)
    if wiring == "any":  # as where several slices are put together
        order = np.array(draw(st.permutations(range(devices))))
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    tensor = draw(st.sampled_from(sizes))
    data = draw(st.sampled_from([size for size in sizes if devices // tensor % size == 0]))
    slices = draw(st.sampled_from([size for size in (1, 2) if data % size == 0]))
    of_host = chips_of_hosts(count) if wiring == "grid" else np.arange(devices).reshape(count, each)
    return everyone(of_host, order), MeshShape(data, devices // tensor // data, tensor, slices)


def rows_at_position(count: int, mesh: MeshShape) -> list[list[int]]:
    """By definition: dimension 0 over `data` and `fsdp`, whole over `tensor`; positions in the mesh's order."""
    parts = np.arange(count).reshape(mesh.data, mesh.fsdp, -1)
    places = itertools.product(range(mesh.data), range(mesh.fsdp), range(mesh.tensor))
    return [parts[data, fsdp].tolist() for data, fsdp, _ in places]


def test_chips_are_numbered_as_on_a_real_slice() -> None:
    """What jax lists for 4 x 4 chips of a v5e: no host's chips are a run of numbers."""
    assert chips_of_hosts(4).tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]


@settings(max_examples=300)
@given(clusters(), st.integers(1, 3))
def test_a_hosts_rows_are_those_of_its_devices(cluster: tuple[list[Host], MeshShape], each: int) -> None:
    hosts, mesh = cluster
    count = each * mesh.batch_shards
    at_position = rows_at_position(count, mesh)
    for host in hosts:
        held = sorted(set(itertools.chain(*(at_position[position] for position in host.positions))))
        assert host.rows(count, mesh).tolist() == held


@settings(max_examples=300)
@given(clusters(), st.integers(1, 3))
def test_hosts_have_all_rows_and_each_once_unless_a_tensor_axis_joins_them(
    cluster: tuple[list[Host], MeshShape], each: int
) -> None:
    hosts, mesh = cluster
    count = each * mesh.batch_shards
    times = np.bincount(np.concatenate([host.rows(count, mesh) for host in hosts]), minlength=count)
    sharing = [len({host.index for host in hosts if part in {at // mesh.tensor for at in host.positions}})
               for part in range(mesh.batch_shards)]  # fmt: skip
    assert times.tolist() == np.repeat(sharing, each).tolist()
    assert (times >= 1).all()
    if mesh.tensor == 1:
        assert (times == 1).all()


def test_a_batch_that_the_mesh_does_not_divide_is_whole_everywhere() -> None:
    assert Host(1, (4, 5, 6, 7)).rows(12, MeshShape(fsdp=8)).tolist() == list(range(12))


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


@pytest.mark.parametrize(
    ("count", "tensor"), [(count, tensor) for count in HOSTS for tensor in (1, 2, 8) if tensor <= 4 * count]
)
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
    for host in everyone(chips_of_hosts(count), np.arange(4 * count)):
        rows = host.rows(batch, mesh)
        if len(rows) == batch:
            assert count == 1 or mesh.batch_shards == 1
            return
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


# ---- packed batches: every host packs all pairs


@pytest.mark.parametrize("count", HOSTS)
def test_packed_batches_put_together_by_devices_are_the_whole_batch(count: int) -> None:
    """Each host packs for itself; what it uploads goes to its devices by their places in the mesh."""
    mesh = MeshShape(fsdp=4 * count)
    pairs = 4 * count
    chooser = np.random.default_rng(0)
    examples = [
        {half: chooser.integers(1, 99, chooser.integers(3, 20)).tolist() for half in ("chosen_ids", "rejected_ids")}
        for _ in range(pairs)
    ]
    plan = RowPlan((RowShape(4 * count, 64),))
    hosts = everyone(chips_of_hosts(count), np.arange(4 * count))
    (packed,) = PlannedRows(plan, pairs, 0)(examples)["packed"].micro_batches
    rows = packed.named_tensors()
    on_devices = {name: torch.full_like(value, -1) for name, value in rows.items() if len(value) % pairs == 0}
    assert {"input_ids_RL", "subtree_end_RL", "last_row_P2", "pair_mask_P"} <= set(on_devices)
    for host in hosts:
        (packed,) = PlannedRows(plan, pairs, 0)(examples)["packed"].micro_batches
        for name, value in packed.named_tensors().items():
            assert torch.equal(value, rows[name]), name
            if name in on_devices:
                own = host.rows(len(value), mesh)
                on_devices[name][own] = value[own]
    for name, value in on_devices.items():
        assert torch.equal(value, rows[name]), name


# ---- decisions: hosts are threads, which meet as processes do


Asks = Callable[[int, int, TrainerControl], bool]
"""Of a host and a step: sets what a callback asks for there, and returns whether a SIGTERM has come."""


def decide_together(hosts: int, steps: int, asks: Asks, args: TrainingArguments) -> tuple[list[list[Any]], Meeting]:
    """What each host decides at the end of each step; all take the same steps, or this would not end."""
    meeting = Meeting(hosts)

    def run(index: int) -> list[Any]:
        agreed = HostAgreement(meeting.of(index), SimpleNamespace(num_processes=1))  # type: ignore[arg-type]
        agreed.start(0)
        state, decided = TrainerState(max_steps=steps, logging_steps=args.logging_steps), []
        for step in range(1, steps + 1):
            state.global_step, state.epoch = step, step / (steps + 1)
            control = DefaultFlowCallback().on_step_end(args, state, TrainerControl())
            told = asks(index, step, control)
            wishes = agreed.decide(args, state, control, {"SIGTERM": told})
            decided.append((step, control.should_save, control.should_log, control.should_training_stop, wishes))
            if control.should_training_stop or wishes["SIGTERM"]:
                break
        return decided

    with ThreadPoolExecutor(hosts) as pool:
        return list(pool.map(run, range(hosts))), meeting


@pytest.fixture
def arguments(tmp_path: Path) -> TrainingArguments:
    return TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", logging_steps=10, save_strategy="no", max_steps=40
    )


@pytest.mark.parametrize("hosts", [2, 3])
def test_what_one_host_asks_for_all_do_at_the_same_step(hosts: int, arguments: TrainingArguments) -> None:
    def asks(host: int, step: int, control: TrainerControl) -> bool:
        control.should_save |= host == 1 and step == 5
        return host == 0 and step >= 23

    decided, _ = decide_together(hosts, 40, asks, arguments)
    assert all(of_host == decided[0] for of_host in decided)
    (saved,) = (step for step, saves, *_ in decided[0] if saves)
    assert 5 <= saved <= 10  # at the log at the latest
    last, *_, wishes = decided[0][-1]
    assert 23 <= last <= 30 and wishes == {"SIGTERM": True}
    assert [step for step, _, logs, *_ in decided[0] if logs] == [step for step in (10, 20, 30) if step <= last]


def test_hosts_do_not_meet_at_every_step(arguments: TrainingArguments, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is due: after the first step, in as many as take some seconds on the slowest host."""
    clock = itertools.count()
    monkeypatch.setattr(agreement.time, "monotonic", lambda: next(clock) * 0.01)
    _, meeting = decide_together(2, 40, lambda *_: False, arguments)
    assert 4 <= meeting.times <= 20  # the logs at 10, 20, 30 and 40 among them


def test_a_wish_to_stop_between_micro_batches_waits_for_the_hosts_to_meet(arguments: TrainingArguments) -> None:
    """There the loop would break on this host alone."""

    def asks(host: int, step: int, control: TrainerControl) -> bool:
        if host == 1 and step == 12:
            between = TrainerControl(should_training_stop=True, should_save=True)
            stopping[1].postpone(between)
            assert not between.should_training_stop and between.should_save
        return False

    stopping: dict[int, HostAgreement] = {}
    original = HostAgreement.start

    def start(self: HostAgreement, step: int) -> None:
        stopping[self.index] = self
        original(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostAgreement, "start", start)
        decided, _ = decide_together(2, 40, asks, arguments)
    assert decided[0] == decided[1]
    last, _, _, stops, _ = decided[0][-1]
    assert stops and 12 <= last <= 20


def test_a_stop_agreed_on_is_not_put_off_by_what_callbacks_ask_for_after_the_save(
    arguments: TrainingArguments,
) -> None:
    """All know that they have saved, so they meet then, also at a step at which nothing is due."""
    meeting = Meeting(2)

    def run(index: int) -> tuple[bool, bool]:
        agreed = HostAgreement(meeting.of(index), SimpleNamespace(num_processes=1))  # type: ignore[arg-type]
        agreed.start(0)
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
    assert "share" in str(error.value)
