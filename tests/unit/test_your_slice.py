"""The page on slices says what its own command computes, and recommends nothing that does not fit."""

import importlib.util
from types import ModuleType

import pytest
from places import EXAMPLES


@pytest.fixture(scope="module")
def slice_memory() -> ModuleType:
    spec = importlib.util.spec_from_file_location("slice_memory", EXAMPLES / "slice_memory.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_table_is_what_the_command_prints(slice_memory: ModuleType, capsys: pytest.CaptureFixture) -> None:
    slice_memory.main()
    printed = capsys.readouterr().out
    assert printed.count("\n") > 10
    assert printed in (EXAMPLES / "your_slice.md").read_text()


def test_what_is_recommended_leaves_a_fifth_of_a_chip_free(slice_memory: ModuleType) -> None:
    rows = slice_memory.table()
    assert len(rows) == len(slice_memory.CHOICES)
    for name, slice_name, _, _, state, inputs, memory in rows:
        assert state + inputs < 0.8 * memory, (name, slice_name)


def test_state_is_sixteen_bytes_a_trained_parameter_and_four_a_frozen_one(slice_memory: ModuleType) -> None:
    config = slice_memory.AutoConfig.for_model(**slice_memory.MODELS["Qwen2.5-0.5B"])
    model = slice_memory.model_without_weights(config, "float32")
    count = sum(parameter.numel() for parameter in model.parameters())
    full, _ = slice_memory.gigabytes_a_chip(model, "fsdp=-1", 8, 1.0)
    frozen, _ = slice_memory.gigabytes_a_chip(model, "fsdp=-1", 8, 0.0)
    assert full == pytest.approx(16 * count / 8 / 1e9, rel=1e-3)
    assert frozen == pytest.approx(4 * count / 8 / 1e9, rel=1e-3)
