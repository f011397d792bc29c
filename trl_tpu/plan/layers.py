"""Trace and compile the trainer's step for a layout: two depths of a deep model, extended in a straight line.

Layers that are alike cost alike, and compiling all of a large model's takes long.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import astuple, replace
from typing import Any

from .compile import CompiledProgram, compile_for
from .needs import least_memory
from .trace import StepRequest, trace_step
from .workload import Layout

_FEW = 8  # layers that are compiled as they are


def compile_layout(
    layout: Layout, arguments: Mapping[str, Any], peft_config: Any, depths: tuple[int, int] | None
) -> CompiledProgram:
    """Trace the trainer's step of ``layout`` and compile it.

    Args:
        layout: What to compile.
        arguments: Of `RewardConfig`, as the user gave them; the layout's own go before them.
        peft_config: A `peft.LoraConfig`, or None.
        depths: Numbers of layers to compile in place of all; None compiles all.

    Raises:
        RuntimeError: The trainer or the compiler refuses it.
    """
    config, (rows, length) = layout.workload.config, layout.shape

    def compile_layers(layers: int) -> CompiledProgram:
        request = StepRequest(
            with_layers(config, layers),
            layout.topology.chips,
            length,
            rows if layout.workload.is_packed else None,
            {**arguments, **layout.arguments},
            peft_config,
            str(layout.workload.module.dtype).removeprefix("torch."),
            layout.workload.answers,
        )
        return compile_for(trace_step(request), layout.topology.compiled_as)

    layers, least = config.num_hidden_layers, least_memory(layout)
    # another program updates the weights where gradients accumulate, and only that takes the optimizer's state
    idle = least.optimizer if layout.workload.args.gradient_accumulation_steps > 1 else 0
    made = extend(compile_layers, depths, layers, least.bound - idle) if depths else compile_layers(layers)
    return replace(made, arguments=made.arguments + idle)


def extend(
    compile_layers: Callable[[int], CompiledProgram], depths: tuple[int, int], layers: int, least: int = 0
) -> CompiledProgram:
    """Return the program of ``layers`` layers, from those of two ``depths``.

    Args:
        compile_layers: Compiles a number of layers.
        depths: The two, the smaller first.
        layers: How many there are.
        least: Bytes that all layers need at least. Where few layers need most for something else, as for embeddings,
            the straight line says less.
    """
    first, second = (astuple(compile_layers(each)) for each in depths)
    times = (layers - depths[0]) / (depths[1] - depths[0])
    made = CompiledProgram(*(max(round(a + (b - a) * times), 0) for a, b in zip(first, second, strict=True)))
    return replace(made, temporary=max(made.temporary, least - made.arguments - made.results))


def two_depths(config: Any) -> tuple[int, int] | None:
    """Choose numbers of layers to compile in place of all; None where all are few.

    Kinds of layers repeat with a period: between the two depths, and from there to all, are whole periods.
    """
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["layer"] * layers
    period = next(size for size in range(1, layers + 1) if all(kinds[i] == kinds[i % size] for i in range(layers)))
    more = max(period, 2)
    first = more + layers % more
    return (first, first + more) if layers > max(_FEW, first + more) else None


def with_layers(config: Any, layers: int) -> Any:
    """Return a copy of a model's config with its first ``layers`` layers."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return config
