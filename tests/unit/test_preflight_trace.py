"""Of the programs of a step one is planned, and all state of the others stays on the chips beside it."""

from trl_tpu.preflight.trace import Argument, TracedProgram, pass_of


def argument(name: str, kind: str, size: int, parts: int = 4) -> Argument:
    return Argument(name, kind, (size,), "float32", 4 * size, parts, "{replicated}", kind != "batch")


WEIGHT, FROZEN = argument("w", "weight", 1000), argument("f", "weight", 3000)
BUFFER = argument("gradient of w", "gradient", 1000)
MOMENTS = (argument("exp_avg of w", "optimizer", 1000), argument("exp_avg_sq of w", "optimizer", 1000))
BATCH, RATE = argument("input_ids", "batch", 64), argument("", "other", 1, parts=1)


def test_a_pass_over_a_batch_is_planned_even_where_the_update_is_the_longer_program() -> None:
    over_batch = TracedProgram(b"short", (WEIGHT, FROZEN, BUFFER, BATCH), 4, {"fsdp": 4})
    update = TracedProgram(b"a longer program", (WEIGHT, BUFFER, *MOMENTS, RATE), 4, {"fsdp": 4})
    planned = pass_of((over_batch, update))
    assert (planned.hlo, planned.beside) == (b"short", MOMENTS)
    assert planned.bytes_per_chip() == {"weight": 4000, "gradient": 1000, "batch": 64}
    assert planned.state_per_chip() == {"weight": 4000, "gradient": 1000, "optimizer": 2000}


def test_beside_one_program_there_is_nothing() -> None:
    step = TracedProgram(b"step", (WEIGHT, *MOMENTS, BATCH), 4, {"fsdp": 4})
    assert pass_of((step,)) == step
