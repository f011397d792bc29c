"""Layouts of a training on a TPU slice: token rows of a micro-batch, the compiled program, and reports about them."""

import copy
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property, partial
from math import ceil
from typing import Any

from datasets import Dataset

from ..config.reward_config import RewardConfig
from ..data.length_stats import kind_of_dataset, length_stats
from ..modeling.head_spec import without_adapters
from ..modeling.model_shape import ModelShape, model_shape_of, training_flops
from ..modeling.recurrent_layers import shared_chunk
from ..packing.shapes import BatchShape, RowLengths, ShapePlan, bucket_lengths, round_up
from ..parallel.mesh import GiB, MeshShape, MiB, TpuSlice
from ..runtime import Remat
from ..training.batch_plan import LONG_ROW, plan_shapes_of
from .compile import CompiledProgram, compile_for
from .trace import StepRequest, trace_step

#: Maximum number of layers to compile: 32 layers of an 8B model need more than 24 GB of host memory.
_MAX_COMPILED_LAYERS = 24


@dataclass(frozen=True, eq=False)
class Layout:
    """One way to train a model on one slice.

    Args:
        module: The model on torch's meta device, with its adapters.
        args: The settings of the training.
        lengths: Lengths of the dataset's rows, or of one typical row.
        tokens: The tokenized dataset. None without a dataset; token rows are then assumed to be full.
        topology: The slice.
        mesh: The mesh, used instead of the mesh in ``args``.
        remat: The rematerialization policy, used instead of the policy in ``args``.
        device_batch_size: The `per_device_train_batch_size`, used instead of its value in ``args``.
        given_shape: The micro-batch to compile, over all chips, without generating code. None compiles the largest.
    """

    module: Any
    args: RewardConfig
    lengths: RowLengths
    tokens: Dataset | None
    topology: TpuSlice
    mesh: MeshShape
    remat: Remat
    device_batch_size: int
    given_shape: BatchShape | None = None

    @cached_property
    def model(self) -> ModelShape:
        return model_shape_of(self.module)

    @property
    def batch_size(self) -> int:
        """Number of data rows in a micro-batch over all chips."""
        return self.device_batch_size * self.mesh.batch_shards

    @property
    def answers(self) -> int | None:
        """Maximum number of answers per ranking, or of steps per solution; None for pairs."""
        if self.tokens is None:
            return 2 if self.args.attributes or self.args.step_separator is not None else None
        return None if kind_of_dataset(self.tokens).are_pairs else length_stats(self.tokens).answers

    @cached_property
    def plan(self) -> ShapePlan:
        """The shapes of micro-batches over all chips."""
        args, shards, chunk = self.args, self.mesh.batch_shards, shared_chunk(self.module)
        if args.packing == "false":
            sequences = 1 if args.step_separator is not None else self.answers or 2  # a solution is one sequence
            lengths = bucket_lengths(int(self.lengths.longest_N.max()), args.max_shapes)
            return ShapePlan(tuple(BatchShape(sequences * self.batch_size, length) for length in lengths))
        if self.tokens is None:
            size = int(self.lengths.in_chunks(chunk).sizes_N[0])
            length = args.row_length or int(round_up(size, 128))
            return ShapePlan((BatchShape(ceil(self.batch_size / (length // size) / shards) * shards, length),))
        plan_shapes = partial(
            plan_shapes_of, self.tokens, self.model.hidden, self.batch_size, shards, args, chunk=chunk
        )
        plan = plan_shapes()
        is_long = args.packed_attention == "auto" and plan.longest >= LONG_ROW
        if self.answers is None and (is_long or args.packed_attention == "expanded"):
            return plan_shapes(expands=True, multiple=256)
        return plan

    @cached_property
    def usual(self) -> BatchShape:
        """The micro-batch of most batches, over all chips."""
        if self.args.packing == "false":
            return self.plan.usual(self.lengths.longest_N, self.batch_size)
        prefix = 0 if self.tokens is None else length_stats(self.tokens).shared_prefix
        sizes_N = self.lengths.in_chunks(self.plan.chunk).sizes_N
        return self.plan.usual(sizes_N, self.batch_size, prefix // self.plan.chunk * self.plan.chunk)

    @cached_property
    def shape(self) -> BatchShape:
        """The micro-batch to compile, over all chips."""
        return self.given_shape or max(self.plan.shapes, key=lambda shape: shape.rows * shape.length)

    @property
    def training_flops(self) -> float:
        """Operations that the model needs for a micro-batch over all chips."""
        return training_flops(self.model, self.lengths) / len(self.lengths) * self.batch_size

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of `RewardConfig` that select this layout."""
        return {"mesh": str(self.mesh), "remat": self.remat, "per_device_train_batch_size": self.device_batch_size}

    def __str__(self) -> str:
        data = f"{self.batch_size} rows of the data in {self.shape.rows} token rows of {self.shape.length}"
        return f"mesh {self.mesh}, remat {self.remat}, {data}"


def typical_row(args: RewardConfig) -> RowLengths:
    """Return the lengths of a pair that represents the training data if no dataset is given.

    Both sequences have `max_length` tokens. In packed rows they share half of their tokens. A padded row holds one
    sequence.
    """
    if args.packing == "false":
        length = args.row_length or args.max_length or LONG_ROW
        return RowLengths.of_size(4 * length // 3)  # a sequence has three quarters of a pair's unique tokens
    usual = args.max_length + args.max_length // 2 if args.max_length else LONG_ROW
    length = args.row_length or int(round_up(usual, 128))
    return RowLengths.of_size(length // max(1, length // usual))


# ---- compiling


def compile_layout(
    layout: Layout, arguments: Mapping[str, Any], peft_config: Any, depths: Sequence[int]
) -> CompiledProgram:
    """Trace the trainer's step of ``layout`` and compile it; name the layout on the standard error first.

    Args:
        layout: The layout.
        arguments: The user's arguments of `RewardConfig`. The layout's arguments take precedence.
        peft_config: A `peft.LoraConfig`, or None.
        depths: The numbers of layers to compile, from `depths_of`.

    Raises:
        RuntimeError: The trainer or the compiler rejects the layout.
    """
    print(f"Compiling for {layout.topology}: {layout} ...", file=sys.stderr, flush=True)
    config, chips, length = without_adapters(layout.module).config, layout.topology.chips, layout.shape.length
    rows = None if layout.args.packing == "false" else layout.shape.rows
    settings, dtype = {**arguments, **layout.arguments}, str(layout.module.dtype).removeprefix("torch.")
    request = StepRequest(
        config, chips, length, rows, settings, peft_config, dtype, layout.answers, layout.plan.longest
    )
    requests = [replace(request, model=with_layers(config, depth)) for depth in depths]
    whole = layout.given_shape is None
    programs = [compile_for(trace_step(item), layout.topology.compiled_as, whole) for item in requests]
    return extrapolate(programs, depths, config.num_hidden_layers)


def depths_of(config: Any, compiles_all: bool = False) -> tuple[int, ...]:
    """Return the numbers of layers to compile: all layers, or two smaller numbers for a deep model.

    Kinds of layers repeat with a period. The two numbers, and the second one and all layers, differ by full periods.

    Args:
        config: The model's config.
        compiles_all: Whether to compile all layers of a deep model, too.
    """
    layers = config.num_hidden_layers
    if compiles_all or layers <= _MAX_COMPILED_LAYERS:
        return (layers,)
    kinds = getattr(config, "layer_types", None) or ["layer"] * layers
    period = next(size for size in range(1, layers + 1) if all(kinds[i] == kinds[i % size] for i in range(layers)))
    step = max(period, 2)
    first = step + layers % step
    return (first, first + step) if first + step < layers else (layers,)


def extrapolate(programs: Sequence[CompiledProgram], depths: Sequence[int], layers: int) -> CompiledProgram:
    """Extrapolate the figures of the first and last program linearly to ``layers`` layers."""
    first, last = map(astuple, (programs[0], programs[-1]))
    times = (layers - depths[-1]) / max(depths[-1] - depths[0], 1)
    return CompiledProgram(*(max(round(b + (b - a) * times), 0) for a, b in zip(first, last, strict=True)))


def with_layers(config: Any, layers: int) -> Any:
    """Return a copy of a model's config with only the first ``layers`` layers."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return config


# ---- attempts

#: Function that compiles a layout. If the program needs too much memory, it raises a RuntimeError with the compiler's
#: message.
Compile = Callable[[Layout], CompiledProgram]

# out-of-memory messages of libtpu 0.0.21: about a program, and about a single array that is larger than the memory
_OUT_OF_MEMORY = re.compile(
    r"Used [\d.]+[KMGT]? of [\d.]+[KMGT]? hbm|Allocation \(size=\d+\) would exceed memory \(size=\d+\)", re.IGNORECASE
)


@dataclass(frozen=True)
class Attempt:
    """A layout with its compiled programs, or with empty programs and the compiler's out-of-memory message.

    Attributes:
        program: The program of the largest batches. Its memory decides whether the layout fits.
        usual: The program of most batches, often the same. Its time is that of the layout.
    """

    layout: Layout
    program: CompiledProgram = CompiledProgram(0, 0, 0, 0)
    usual: CompiledProgram = CompiledProgram(0, 0, 0, 0)
    error: str = ""

    @property
    def fits(self) -> bool:
        return not self.error and self.program.peak <= self.layout.topology.chip.memory

    @property
    def flops(self) -> float:
        """Lower bound on the operations per chip and micro-batch: the compiler undercounts kernels and loops."""
        return max(self.usual.flops, self.layout.training_flops / self.layout.topology.chips)

    @property
    def seconds(self) -> dict[str, float]:
        """Minimum time of a usual micro-batch for arithmetic, links and memory, at the chip's published speeds."""
        chip = self.layout.topology.chip
        return {
            "arithmetic": self.flops / chip.peak_flops,
            "links": self.usual.received / chip.link_bandwidth,
            "memory": self.usual.moved / chip.memory_bandwidth,
        }

    @property
    def most_rows_per_second(self) -> float:
        """Upper bound on the data rows per second, with arithmetic, links and memory working concurrently."""
        return self.layout.batch_size / max(self.seconds.values())


def attempt(layout: Layout, compile_one: Compile) -> Attempt:
    """Compile a layout's largest and usual micro-batch, and catch out-of-memory errors.

    Raises:
        RuntimeError: The compiler fails for another reason than memory.
    """
    try:
        program = usual = compile_one(layout)
        if layout.given_shape is None and layout.usual != layout.shape:
            usual = compile_one(replace(layout, given_shape=layout.usual))
        return Attempt(layout, program, usual)
    except RuntimeError as error:
        if (match := _OUT_OF_MEMORY.search(str(error))) is None:
            raise
        return Attempt(layout, error=match[0])


# ---- the report

_SUFFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def report(tried: Attempt, rows_to_train: float | None = None) -> str:
    """Describe one layout and its compiled program.

    Args:
        tried: The layout and its program.
        rows_to_train: Number of data rows over all epochs; None omits the estimate of hours.
    """
    layout, program, chip = tried.layout, tried.program, tried.layout.topology.chip
    model, chips, usual = layout.model, layout.topology.chips, tried.usual
    needed = tried.error or f"{sized(program.peak)} are needed"
    head = (
        f"{scaled(model.parameters)}parameters, {scaled(model.trained_parameters)}trained, on {layout.topology}: "
        f"{chips} chip(s) as mesh {layout.mesh}, remat {layout.remat}\n"
        f"A micro-batch: {layout.batch_size:,} rows of the data, mostly in {layout.usual.rows:,} token rows of "
        f"{layout.usual.length:,}, at most in {layout.shape.rows:,} of {layout.shape.length:,}, over all chips. "
        f"Programs to compile: {len(layout.plan.shapes)}\n\n"
        f"{'IT FITS' if tried.fits else 'IT DOES NOT FIT'}: {needed}, each chip has {sized(chip.memory)}."
    )
    if tried.error:
        return head
    memory = [
        ("arguments", sized(program.arguments), "weights, optimizer state, accumulated gradients, the batch"),
        ("temporary", sized(program.temporary), "gradients, activations, gathered weights, a layer's own results"),
        ("results", sized(program.results), ""),
        ("program", sized(program.generated_code), "the instructions"),
        ("in all", sized(program.peak), "as compiled"),
    ]
    seconds, rate, best = tried.seconds, tried.most_rows_per_second, max(tried.seconds.values())
    sources = {
        "arithmetic": f"{scaled(tried.flops)}FLOP at {scaled(chip.peak_flops)}FLOP/s in bfloat16",
        "links": f"{scaled(usual.received)}B received at {scaled(chip.link_bandwidth)}B/s, over all links",
        "memory": f"{scaled(usual.moved)}B at {scaled(chip.memory_bandwidth)}B/s, each result of an instruction once",
    }
    if not usual.flops:
        sources |= {"links": "unknown: the compiler counts a loop once", "memory": "unknown"}
    times = [(name, f"{duration:.4g} s", sources[name]) for name, duration in seconds.items()]
    mfu = layout.training_flops / chips / chip.peak_flops / best
    notes = [
        f"The model needs {scaled(layout.training_flops / chips)}FLOP per chip. At best {best:.4g} s, limited by "
        f"{max(seconds, key=seconds.__getitem__)}: at most {rate:,.1f} rows per second, and at most {mfu:.0%} of the "
        "chips' arithmetic used for the model (MFU)."
    ]
    if rows_to_train:
        hours = rows_to_train / rate / 3600
        notes.append(f"{rows_to_train:,.0f} rows: at least {hours:,.1f} h, {hours * chips:,.4g} chip-hours.")
    title = f"Time of a usual micro-batch at the chip's published speeds ({chip.source})"
    return "\n\n".join([head, _table("Memory of a chip", memory), _table(title, times, notes)])


def found(attempts: list[Attempt]) -> str:
    """List compiled layouts with the flags that select them. Layouts that fit come first, the fastest at the top."""
    rows, note = [], "None of these fits. Raise --compiles, train adapters (--use_peft true), or name a larger slice."
    for item in sorted(attempts, key=lambda item: (item.fits, item.most_rows_per_second), reverse=True):
        flags = " ".join(f"--{name} {value}" for name, value in item.layout.arguments.items())
        outcome = f"does not fit. {item.error}"
        if item.fits:
            outcome = f"FITS, at most {item.most_rows_per_second:,.1f} rows per second"
            note = "With smaller batches, raise --gradient_accumulation_steps to keep the number of rows per update."
        rows.append((flags, "" if item.error else sized(item.program.peak), outcome))
    return _table("Layouts that were compiled", rows, [note])


def notes(layout: Layout, depths: Sequence[int]) -> str:
    """Return notes on the sources and limits of the figures."""
    sizes_N, optim = layout.lengths.sizes_N, layout.args.optim
    source = "No dataset is named, so lengths are assumed" if layout.tokens is None else "Lengths of the dataset"
    parts = [
        f"{source}: {len(sizes_N):,} rows of {sizes_N.mean():,.0f} unique tokens, {sizes_N.max():,} at most.",
        "Real steps take longer than these bounds. Only a run on the TPU shows by how much.",
    ]
    if layout.args.gradient_accumulation_steps > 1 and not optim.startswith("adam"):
        parts.append(f"The state of {optim} is not counted: it is created after the first micro-batches.")
    if len(depths) > 1:
        parts.append(
            f"{depths[0]} and {depths[1]} layers were compiled, and the figures extrapolated linearly to all layers. "
            "--scan_layers or --all_layers compile all layers; --all_layers may take tens of GB of host memory."
        )
    return "\n\n".join(map(_wrap, parts))


def _table(title: str, rows: list[tuple[str, str, str]], notes: Iterable[str] = ()) -> str:
    names, values = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    lines = [f"  {name:<{names}}  {value:>{values}}  {why}".rstrip() for name, value, why in rows]
    return "\n".join([title, *lines, *(_wrap(note, "  ") for note in notes)])


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 119, initial_indent=indent, subsequent_indent=2 * indent, break_long_words=False)


def sized(size: float) -> str:
    """Format a number of bytes, such as 1.75 GiB."""
    return f"{size / GiB:.2f} GiB" if size >= GiB / 10 else f"{size / MiB:.2f} MiB"


def scaled(value: float) -> str:
    """Format a number with three digits and a suffix, such as 8.03 G."""
    size, suffix = next((item for item in _SUFFIXES if value >= item[0]), (1.0, ""))
    return f"{value / size:.3g} {suffix}"
