"""The report of a plan: whether it fits, what takes the memory, what limits the speed, how long it takes at best."""

import textwrap
from collections.abc import Iterable, Sequence

from ..parallel.mesh import GiB, MiB
from .layouts import Attempt, Layout

_SUFFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def report(attempt: Attempt, pairs_to_train: float | None = None) -> str:
    """Describe one layout and its compiled program.

    Args:
        attempt: The layout.
        pairs_to_train: Pairs of all epochs; None leaves the hours out.
    """
    layout, program, chip = attempt.layout, attempt.program, attempt.layout.topology.chip
    model, chips, (rows, length) = layout.model, layout.topology.chips, layout.shape
    needed = f"{sized(program.peak)} are needed" if program else attempt.refusal
    head = (
        f"{scaled(model.parameters)}parameters, {scaled(model.trained_parameters)}trained, on {layout.topology}: "
        f"{chips} chip(s) as mesh {layout.mesh}, remat {layout.remat}\n"
        f"A micro-batch: {layout.pairs:,} pairs in {rows:,} rows of {length:,} tokens, over all chips\n\n"
        f"{'IT FITS' if attempt.fits else 'IT DOES NOT FIT'}: {needed}, each chip has {sized(chip.memory)}."
    )
    if program is None:
        return head
    memory = [
        ("arguments", sized(program.arguments), "weights, optimizer, gradients that accumulate, the batch"),
        ("temporary", sized(program.temporary), "gradients, activations, gathered weights, a layer's own results"),
        ("results", sized(program.results), ""),
        ("program", sized(program.generated_code), "the instructions"),
        ("in all", sized(program.peak), "as compiled"),
    ]
    seconds, rate, best = attempt.seconds, attempt.most_pairs_per_second, max(attempt.seconds.values())
    operations = f"{scaled(attempt.flops)}FLOP at {scaled(chip.peak_flops)}FLOP/s in bfloat16"
    links = f"{scaled(program.received)}B received at {scaled(chip.link_bandwidth)}B/s, over all links"
    times = [
        ("arithmetic", f"{seconds['arithmetic']:.4g} s", operations),
        ("links", f"{seconds['links']:.4g} s", links if program.flops else "unknown: the compiler counts a loop once"),
    ]
    mfu = layout.needed_flops / chips / chip.peak_flops / best
    notes = [
        f"{scaled(layout.needed_flops / chips)}FLOP are needed by the model. At best {best:.4g} s, limited by "
        f"{max(seconds, key=seconds.__getitem__)}: at most {rate:,.1f} pairs per second, and at most {mfu:.0%} of the "
        "chips' arithmetic used for the model (MFU)."
    ]
    if pairs_to_train:
        hours = pairs_to_train / rate / 3600
        notes.append(f"{pairs_to_train:,.0f} pairs: at least {hours:,.1f} h, {hours * chips:,.4g} chip-hours.")
    title = f"Time of a micro-batch at the chip's published speeds ({chip.source})"
    return "\n\n".join([head, _table("Memory of a chip", memory), _table(title, times, notes)])


def found(attempts: list[Attempt]) -> str:
    """List layouts that were compiled, the fastest that fits first, with the flags that choose them."""
    rows, note = [], "None of these fits. Raise --compiles, train adapters (--use_peft true), or name a larger slice."
    for each in sorted(attempts, key=lambda each: (each.fits, each.most_pairs_per_second), reverse=True):
        flags = " ".join(f"--{name} {value}" for name, value in each.layout.arguments.items())
        outcome = f"does not fit. {each.refusal}"
        if each.fits:
            outcome = f"FITS, at most {each.most_pairs_per_second:,.1f} pairs per second"
            note = "With smaller batches raise --gradient_accumulation_steps, and pairs per update stay the same."
        rows.append((flags, sized(each.program.peak) if each.program else "", outcome))
    return _table("Layouts that were compiled", rows, [note])


def notes(layout: Layout, depths: Sequence[int]) -> str:
    """Return notes on where the figures come from, and what they cannot show."""
    sizes_P, optim = layout.lengths.sizes_P, layout.args.optim
    source = "No dataset is named, so lengths are assumed" if layout.tokens is None else "Lengths of the dataset"
    parts = [
        f"{source}: {len(sizes_P):,} pairs of {sizes_P.mean():,.0f} unique tokens, {sizes_P.max():,} at most.",
        "Real steps take longer than these bounds: only a run on the TPU itself shows how much.",
    ]
    if layout.args.gradient_accumulation_steps > 1 and not optim.startswith("adam"):
        parts.append(f"The state of {optim} is not counted: it is made after the first micro-batches.")
    if len(depths) > 1:
        parts.append(
            f"{depths[0]} and {depths[1]} layers were compiled, and the figures extended in a straight line. "
            "--scan_layers or --all_layers compile the whole program; the latter may take tens of GB of host memory."
        )
    return "\n\n".join(map(_wrap, parts))


def _table(title: str, rows: list[tuple[str, str, str]], notes: Iterable[str] = ()) -> str:
    names, values = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    lines = [f"  {name:<{names}}  {value:>{values}}  {why}".rstrip() for name, value, why in rows]
    return "\n".join([title, *lines, *(_wrap(note, "  ") for note in notes)])


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 119, initial_indent=indent, subsequent_indent=2 * indent, break_long_words=False)


def sized(size: float) -> str:
    """Write bytes of memory: 1.75 GiB."""
    return f"{size / GiB:.2f} GiB" if size >= GiB / 10 else f"{size / MiB:.2f} MiB"


def scaled(value: float) -> str:
    """Write three digits and a suffix: 8.03 G."""
    size, suffix = next((each for each in _SUFFIXES if value >= each[0]), (1.0, ""))
    return f"{value / size:.3g} {suffix}"
