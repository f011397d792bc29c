"""The recompile guard warns neither early nor late, and says what is being compiled."""

import pytest
import torch

from trl_tpu.runtime.native import Runtime
from trl_tpu.training.stopping import RecompileGuard

BATCH = {"input_ids": torch.zeros(4, 2, 64), "attention_mask": torch.zeros(4, 2, 64), "name": "no tensor"}
OTHER = {"input_ids": torch.zeros(4, 2, 77)}


class Counting(Runtime):
    """Plain torch, and a number of compiled programs that the test sets."""

    compiled = 100  # what was compiled before training does not count

    plans_shapes = is_spmd = True

    def compile_count(self) -> int:
        return self.compiled


@pytest.fixture
def runtime() -> Counting:
    return Counting()


def warned(guard: RecompileGuard, runtime: Counting, compiles: int, caplog: pytest.LogCaptureFixture) -> list[int]:
    """Take steps that compile once each; return those, from 1 on, at which the guard warned."""
    steps = []
    for step in range(1, compiles + 1):
        caplog.clear()
        guard.see(BATCH)
        runtime.compiled += 1
        guard.check()
        steps += [step] * len(caplog.records)
    return steps


@pytest.mark.parametrize(("planned", "shared", "first"), [(None, 0, 2), (3, 0, 4), (3, 1, 5)])
def test_the_guard_warns_at_1_2_4_8_programs_too_many(
    planned: int | None, shared: int, first: int, runtime: Counting, caplog: pytest.LogCaptureFixture
) -> None:
    guard = RecompileGuard(runtime)
    for _ in range(2):  # a second run counts anew
        guard.start(planned, shared)
        assert warned(guard, runtime, first + 7, caplog) == [first, first + 1, first + 3, first + 7]
    assert "input_ids [4, 2, 64], attention_mask [4, 2, 64]" in caplog.text and "pad_to_multiple_of" in caplog.text


def test_where_each_operation_is_a_program_a_planned_shape_may_compile_any_number_at_first(
    runtime: Counting, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.is_spmd = False
    guard = RecompileGuard(runtime)
    guard.start(2)

    def step(batch: dict[str, object], compiles: int) -> int:
        caplog.clear()
        guard.see(batch)
        runtime.compiled += compiles
        guard.check()
        return len(caplog.records)

    planned = [(BATCH, 300), (BATCH, 20), (BATCH, 1), (OTHER, 9), (BATCH, 2), (OTHER, 1), (BATCH, 1)]
    assert [step(batch, compiles) for batch, compiles in planned] == [0] * len(planned)
    assert [step(batch, 1) for batch in (BATCH, OTHER, {"input_ids": torch.zeros(1)})] == [1, 1, 0]
    assert step({"input_ids": torch.zeros(2)}, 1) == 1


def test_the_guard_is_silent_about_what_others_compile(runtime: Counting, caplog: pytest.LogCaptureFixture) -> None:
    guard = RecompileGuard(runtime)
    guard.start(2)
    assert warned(guard, runtime, 2, caplog) == []
    for _ in range(10):
        guard.pause()
        runtime.compiled += 50  # an evaluation, say
        guard.resume()
        guard.check()
    assert caplog.records == []
    assert warned(guard, runtime, 1, caplog) == [1]


def test_the_guard_announces_each_program_once_until_it_has_run(runtime: Counting) -> None:
    said: list[str] = []
    guard = RecompileGuard(runtime, said.append)
    guard.start(3)
    guard.see(BATCH, updates=False)
    guard.see(BATCH, updates=False)
    guard.see(BATCH)  # another program
    guard.see(OTHER)
    guard.settle()
    guard.settle()
    guard.see(BATCH)
    assert said == ["compiling shape 1 of 3", "", "compiling shape 2 of 3", "", "compiling shape 3 of 3", ""]
    del said[:]
    guard.see_evaluated(BATCH)  # another program
    guard.see_evaluated(BATCH)
    guard.see_evaluated(OTHER)
    guard.settle()
    assert said == ["compiling shape 1 for evaluation", "", "compiling shape 2 for evaluation", ""]
    RecompileGuard(Runtime(), said.append).see(BATCH)  # where nothing compiles
    assert len(said) == 4
