"""The text that a user reads before renting a TPU: does it fit, what limits it, how long it takes at best."""

import textwrap
from collections.abc import Iterable

from ..parallel.chips import GiB, MiB
from .needs import computed_flops, least_memory, least_seconds, least_traffic, most_pairs_per_second, needed_flops
from .search import Attempt
from .workload import Layout, Workload

UNSEEN = "Real steps take longer than these bounds: the first minutes of a run on the TPU itself are the test."
_SUFFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def report(attempt: Attempt, pairs_to_train: float | None = None) -> str:
    """Describe one layout and what the compiler said of it.

    Args:
        attempt: The layout.
        pairs_to_train: All of the training, each as often as it is gone through; None leaves the hours out.
    """
    layout = attempt.layout
    parts = [_head(layout), _verdict(attempt), _memory(attempt), _time(layout, pairs_to_train)]
    return "\n\n".join(parts)


def _head(layout: Layout) -> str:
    model, (rows, length) = layout.workload.model, layout.shape
    return (
        f"{scaled(model.parameters)}parameters, {scaled(model.trained_parameters)}trained, on {layout.topology}: "
        f"{layout.topology.chips} chip(s) as mesh {layout.mesh}, remat {layout.remat}\n"
        f"A micro-batch: {layout.pairs:,} pairs in {rows:,} rows of {length:,} tokens, over all chips"
    )


def _verdict(attempt: Attempt) -> str:
    available = sized(attempt.layout.topology.chip.memory)
    needed = attempt.refusal if attempt.program is None else f"{sized(attempt.program.peak)} are needed"
    return f"{'IT FITS' if attempt.fits else 'IT DOES NOT FIT'}: {needed}, each chip has {available}."


def _memory(attempt: Attempt) -> str:
    least, program, rows = least_memory(attempt.layout), attempt.program, []
    if program is not None:
        rows = [
            ("arguments", sized(program.arguments), "weights, optimizer, gradients that accumulate, the batch"),
            ("temporary", sized(program.temporary), "gradients, activations, gathered weights, a layer's own results"),
            ("results", sized(program.results), ""),
            ("program", sized(program.generated_code), "the instructions"),
            ("in all", sized(program.peak), f"as compiled, {program.peak / max(least.bound, 1):.2f} times the least"),
        ]
    kinds = ", ".join(f"{name} {sized(size)}" for name, size in vars(least).items())
    return _table("Memory of a chip", [*rows, ("the least", sized(least.bound), f"by formula: {kinds}")])


def _time(layout: Layout, pairs_to_train: float | None) -> str:
    chip, chips, seconds = layout.topology.chip, layout.topology.chips, least_seconds(layout)
    needed, computed, traffic = needed_flops(layout), computed_flops(layout), least_traffic(layout)
    sent = ", ".join(f"{scaled(size)}B over {axis}" for axis, size in traffic.items()) or "nothing"
    what = {
        "arithmetic": f"{scaled(computed / chips)}FLOP at {scaled(chip.peak_flops)}FLOP/s in bfloat16",
        "memory": f"at {scaled(chip.memory_bandwidth)}B/s: what is kept or received is written and read",
        "links": f"{sent} at {scaled(chip.link_bandwidth)}B/s, over all links in one direction",
    }
    best, limit, rate = max(seconds.values()), max(seconds, key=seconds.__getitem__), most_pairs_per_second(layout)
    mfu = needed / chips / chip.peak_flops / best
    filled = layout.lengths.tokens / layout.tokens
    notes = [
        f"{scaled(needed)}FLOP are needed, and {computed / needed:.2f} times that computed: remat computes layers "
        f"again, and {filled:.0%} of the columns hold a token. Attention with masks comes on top.",
        f"At best {best:.4g} s, limited by {limit}, if all of it happens at once. So at most {rate:,.1f} pairs a "
        f"second, and at most {mfu:.0%} of the chips' arithmetic used for the model (MFU).",
    ]
    if pairs_to_train:
        hours = pairs_to_train / rate / 3600
        notes.append(f"{pairs_to_train:,.0f} pairs: at least {hours:,.1f} h, {hours * chips:,.4g} chip-hours.")
    rows = [(part, f"{each:.4g} s", what[part]) for part, each in seconds.items()]
    return _table(f"Time of a micro-batch at the chip's published speeds ({chip.source}), by formula", rows, notes)


def found(attempts: list[Attempt]) -> str:
    """List what a search compiled."""
    if not attempts:
        return "Nothing fits, by formula. Name a larger slice, or train adapters (--use_peft)."
    note = "Left out are layouts that need more memory by formula than there is, or promise less by formula."
    if not any(each.fits for each in attempts):
        note = "None of these fits. Allow more to be tried with --compiles, or train adapters (--use_peft)."
    return _table("The best layouts by formula, each compiled", [_outcome(each) for each in attempts], [note])


def _outcome(attempt: Attempt) -> tuple[str, str, str]:
    layout = attempt.layout
    flags = " ".join([str(layout.topology), *(f"--{name} {value}" for name, value in layout.arguments.items())])
    needed = "" if attempt.program is None else sized(attempt.program.peak)
    fits = f"FITS, at most {most_pairs_per_second(layout):,.1f} pairs a second"
    return flags, needed, fits if attempt.fits else f"does not fit. {attempt.refusal}"


def notes(workload: Workload, depths: tuple[int, int] | None) -> str:
    """Return notes on where the figures come from, and what they cannot show."""
    parts = [workload.basis, UNSEEN]
    if depths is not None:
        parts.append(
            f"Compiled were {depths[0]} and {depths[1]} of the {workload.model.layers} layers, and memory extended in "
            "a straight line. --scan_layers or --all_layers compile the whole program."
        )
    return "\n\n".join(map(_wrap, parts))


def _table(title: str, rows: list[tuple[str, str, str]], notes: Iterable[str] = ()) -> str:
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
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
