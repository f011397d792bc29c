"""Together several hosts see every pair once, in order, on the right devices; and all of them do the same."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_tpu.data.collators import PackedRows
from trl_tpu.data.row_plan import RowPlan
from trl_tpu.data.row_shapes import RowShape
from trl_tpu.parallel.hosts import Host, agreed
from trl_tpu.parallel.mesh import MeshShape

HOSTS = (1, 2, 4, 16)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[int, MeshShape]:
    """A number of hosts, and a mesh over all their devices."""
    hosts = draw(st.sampled_from(HOSTS))
    devices = hosts * draw(st.sampled_from([1, 4, 8]))
    sizes = [size for size in range(1, devices + 1) if devices % size == 0]
    tensor = draw(st.sampled_from(sizes))
    data = draw(st.sampled_from([size for size in sizes if devices // tensor % size == 0]))
    return hosts, MeshShape(data, devices // tensor // data, tensor)


def rows_of_device(count: int, mesh: MeshShape) -> list[list[int]]:
    """By definition: dimension 0 over `data` and `fsdp`, whole over `tensor`; devices in the mesh's order."""
    parts = np.arange(count).reshape(mesh.data, mesh.fsdp, -1)
    places = itertools.product(range(mesh.data), range(mesh.fsdp), range(mesh.tensor))
    return [parts[data, fsdp].tolist() for data, fsdp, _ in places]


@settings(max_examples=300)
@given(clusters(), st.integers(1, 3))
def test_a_hosts_rows_are_those_of_its_devices(cluster: tuple[int, MeshShape], each: int) -> None:
    hosts, mesh = cluster
    count = each * mesh.batch_shards
    of_device = rows_of_device(count, mesh)
    own = mesh.devices // hosts
    for index in range(hosts):
        computed = sorted(set(itertools.chain(*of_device[index * own : (index + 1) * own])))
        assert list(range(count))[Host(index, hosts).rows(count, mesh)] == computed


@settings(max_examples=300)
@given(clusters(), st.integers(1, 3))
def test_hosts_with_rows_of_their_own_have_each_row_once_in_order(cluster: tuple[int, MeshShape], each: int) -> None:
    hosts, mesh = cluster
    count = each * mesh.batch_shards
    everyone = [Host(index, hosts) for index in range(hosts)]
    if not everyone[0].uploads_own_rows(mesh):
        assert hosts == 1 or mesh.tensor > 1
        return
    slices = [list(range(count))[host.rows(count, mesh)] for host in everyone]
    assert list(itertools.chain(*slices)) == list(range(count))
    own = mesh.devices // hosts
    for index, rows in enumerate(slices):  # dealt out one part to each device, in order
        dealt = [rows[at * each : (at + 1) * each] for at in range(own)]
        assert dealt == rows_of_device(count, mesh)[index * own : (index + 1) * own]


def test_slices_and_tensor_axes_get_whole_batches() -> None:
    assert Host(1, 4).uploads_own_rows(MeshShape(fsdp=16))
    assert Host(1, 4).uploads_own_rows(MeshShape(data=2, fsdp=8))
    assert not Host(1, 4).uploads_own_rows(MeshShape(fsdp=8, tensor=2))
    assert not Host(1, 4).uploads_own_rows(MeshShape(data=2, fsdp=8, slices=2))
    assert not Host(0, 1).uploads_own_rows(MeshShape(fsdp=16))


@pytest.mark.parametrize("hosts", HOSTS)
def test_packed_batches_are_the_same_on_every_host_and_each_pair_lies_on_one(hosts: int) -> None:
    mesh = MeshShape(fsdp=4 * hosts)
    chooser = np.random.default_rng(0)
    examples = [
        {half: chooser.integers(1, 99, chooser.integers(3, 20)).tolist() for half in ("chosen_ids", "rejected_ids")}
        for _ in range(4 * hosts)
    ]
    plan = RowPlan((RowShape(4 * hosts, 64),))
    batches = [
        PackedRows(plan, len(examples), 0)(examples)["passes"] for _ in range(hosts)
    ]  # each host packs for itself
    for index, (rows,) in enumerate(batches):
        for name, value in rows.items():
            assert torch.equal(value, batches[0][0][name]), name
        own = Host(index, hosts).rows(len(rows["input_ids"]), mesh)
        assert rows["input_ids"][own].shape == (4, 64)
    rows = batches[0][0]
    owners = [
        [index for index in range(hosts) if row in range(4 * hosts)[Host(index, hosts).rows(4 * hosts, mesh)]]
        for row in rows["last_row"][:, 0].tolist()
    ]
    assert all(len(owner) == 1 for owner in owners)
    assert rows["last_row"][:, 0].tolist() == rows["last_row"][:, 1].tolist()  # both dialogues of a pair
    assert rows["pair_mask"].all()


def test_only_the_first_host_speaks() -> None:
    assert [Host(index, 4).speaks for index in range(4)] == [True, False, False, False]
    assert Host().speaks


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=16))
def test_what_any_host_wishes_all_do(wishes: list[tuple[bool, bool, bool]]) -> None:
    assert agreed(wishes) == tuple(np.array(wishes).any(axis=0).tolist())


def test_what_cannot_be_is_an_error_with_the_equation() -> None:
    with pytest.raises(ValueError, match="Of 4 host.s., host 4 does not exist"):
        Host(4, 4)
    with pytest.raises(ValueError, match=r"mesh 'data=1,fsdp=8': 8 devices / 3 hosts is no whole number"):
        Host(0, 3).rows(8, MeshShape(fsdp=8))
    with pytest.raises(ValueError, match=r"mesh 'data=1,fsdp=8': 12 rows / 8 parts of a batch is no whole number"):
        Host(0, 2).rows(12, MeshShape(fsdp=8))
