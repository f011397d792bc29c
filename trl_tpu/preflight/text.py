"""The report as text, for somebody who has not seen one before."""

import textwrap

from .chips import GB, GiB, MiB, Topology
from .report import UNSEEN, Report
from .search import Attempt, Found

_SUFFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_NAMES = ((1e9, "billion"), (1e6, "million"), (1e3, "thousand"))


def text_of(report: Report) -> str:
    """All of it, in paragraphs."""
    parts = [
        _head(report),
        _verdict(report),
        _memory(report),
        _work(report),
        _traffic(report),
        _time(report),
        *(_wrap(note) for note in report.notes),
        _wrap(UNSEEN),
    ]
    return "\n\n".join(part for part in parts if part)


def _head(report: Report) -> str:
    case = report.case
    trained = case.model.trained_parameters
    share = "" if trained == case.model.parameters else f", {scaled(trained, _NAMES)} of them trained"
    lines = [
        f"{scaled(case.model.parameters, _NAMES)} parameters{share}, on {case.topology}: {case.topology.chips} "
        f"chip(s) as mesh {case.mesh}, remat {case.remat}",
        f"A step: {case.pairs:,} pairs in {case.rows:,} rows of {case.length:,} tokens, over all chips"
        + (f"; {case.accumulation} such passes before each update" if case.accumulation > 1 else ""),
    ]
    return "\n".join([*lines, *([_wrap(report.basis)] if report.basis else [])])


def _verdict(report: Report) -> str:
    needed, there = sized(report.peak), sized(report.case.topology.chip.memory)
    if report.fits:
        return f"IT FITS: {needed} of the {there} of each chip are used, {sized(report.free)} are free."
    return f"IT DOES NOT FIT: {needed} are needed on each chip, {sized(-report.free)} more than its {there}."


def _memory(report: Report) -> str:
    explained = {
        "weights": "as the sharding plan splits them",
        "optimizer": f"what {report.case.optim} keeps of each trained weight",
        "gradients": "of the trained weights",
        "activations": f"kept for the backward by remat {report.case.remat}",
        "batch and other inputs": "",
        "working space": "what the compiler needs besides: gathered weights, a layer's own results",
        "program": "the instructions",
    }
    rows = [(kind, sized(size), explained[kind]) for kind, size in report.memory_by_kind().items()]
    times = report.peak / max(report.least.bound, 1)
    rows.append(("in all", sized(report.peak), f"{times:.2f} times the first four, which no program can do without"))
    lines = _table("Memory of a chip", rows)
    if report.program.aliased < 0.99 * report.updated:
        lines += (
            f"\n  Only {sized(report.program.aliased)} of the {sized(report.updated)} of state that changes are "
            "updated in place: the rest is there twice."
        )
    if not report.fits:
        lines += "".join(f"\n  {sized(size):>10}  {name}" for name, size in report.program.largest_buffers[:5])
    return lines


def _work(report: Report) -> str:
    case, flops = report.case, report.flops
    compiled = report.flops_compiled
    counted = {"needed": flops.useful, "with remat": flops.with_remat, "compiled": compiled}
    why = {
        "needed": "by formula",
        "with remat": f"{flops.with_remat / flops.useful:.2f} times what is needed: layers computed again",
        "compiled": f"{compiled / flops.useful:.2f} times what is needed",
    }
    if case.remat != "full":
        del counted["with remat"]
    rows = [
        (name, f"{scaled(each)}FLOP", f"{scaled(each / case.pairs)}FLOP a pair, {why[name]}")
        for name, each in counted.items()
    ]
    lines = [_table("Operations of a step, of all chips", rows)]
    if case.lengths.tokens < 0.95 * case.rows * case.length:
        filled = case.lengths.tokens / (case.rows * case.length)
        lines.append(f"Of the columns of the rows {filled:.0%} hold a token; padding is computed too, but not needed.")
    if case.masks:
        lines.append("Attention with masks computes every query of a row with every key, whoever may see whom.")
    return "\n".join([lines[0], *(_indented(line) for line in lines[1:])])


def _traffic(report: Report) -> str:
    rows, too_much = [], False
    for axes, (compiled, needed) in report.traffic.items():
        why = f"{compiled / needed:.2f} times the {scaled(needed)}B that the mesh needs" if needed else "not needed"
        too_much |= compiled > 1.1 * needed
        rows.append((axes, f"{scaled(compiled)}B", why))
    if not rows:
        return ""
    lines = _table("Sent between chips in a step, to each chip, by mesh axis", rows)
    if too_much:
        largest = (f"{scaled(size)}B in {what}" for what, size in report.largest_collectives())
        lines += "".join(f"\n{_indented(line)}" for line in ("Most is sent by:", *largest))
    return lines


def _time(report: Report) -> str:
    times, chip = report.times, report.case.topology.chip
    rows = [
        ("arithmetic", duration(times.compute), f"at {chip.peak_flops / 1e12:,.0f} TFLOP/s in bfloat16"),
        ("memory", duration(times.memory), f"at {chip.memory_bandwidth / GB:,.0f} GB/s"),
        ("links", duration(times.links), f"at {chip.link_bandwidth / GB:,.0f} GB/s, over all links in one direction"),
    ]
    lines = [
        f"At best {duration(times.fastest)}, limited by {times.limit}, if all of it happens at once; "
        f"{duration(times.slowest)} if one waits for the other.",
        f"So at most {times.most_pairs_per_second:,.1f} pairs a second ({times.pairs_per_second_in_turns:,.1f} in "
        f"turns), and at most {times.most_mfu:.0%} of the chips' arithmetic used for the model (MFU).",
    ]
    if (hours := report.hours) is not None and report.training.pairs is not None:
        chip_hours = [each * report.case.topology.chips for each in hours]
        lines.append(
            f"{report.training.pairs:,} pairs, {report.training.epochs:g} time(s): at least "
            f"{duration(hours[0] * 3600)}, {chip_hours[0]:,.4g} chip-hours ({duration(hours[1] * 3600)} and "
            f"{chip_hours[1]:,.4g} in turns)."
        )
        if report.price is not None:
            costs = [each * report.price for each in chip_hours]
            lines.append(f"At {report.price:g} a chip-hour: at least {costs[0]:,.2f} ({costs[1]:,.2f} in turns).")
    lines.append(f"Compiling took {duration(report.program.compile_seconds)} on this machine.")
    title = f"Time of a step at the chip's published speeds ({chip.source})"
    return "\n".join([_table(title, rows), *(_indented(line) for line in lines)])


def refusal_text(attempt: Attempt) -> str:
    """Of a program that the compiler did not make."""
    needed, there = sized(attempt.needed), sized(attempt.available)
    head = f"{attempt.case.topology}, {attempt.case}\n\n"
    if attempt.is_open:
        least = f"By formula it needs at least {needed} of the {there} of each chip."
        return f"{head}WHETHER IT FITS IS OPEN: the compiler crashed. {least}\n\n{attempt.crash}"
    how = "it needs at least {} by formula" if attempt.crash else "the compiler gave up at {}"
    return f"{head}IT DOES NOT FIT: {how.format(needed)} on each chip, which has {there}."


def remedies_text(tried: list[Attempt]) -> str:
    """What was tried to make it fit."""
    rows = [(each.what, sized(each.needed), _outcome(each)) for each in tried]
    if not rows:
        return "Nothing smaller is left to try: name a larger slice."
    lines = _table("What would make it fit, each compiled unless it cannot fit", rows)
    if not any(each.fits for each in tried):
        lines += "\n  None of these fits. Allow more to be tried with --compiles, or train adapters (--use_peft)."
    return lines


def _outcome(attempt: Attempt) -> str:
    if attempt.fits:
        return (
            f"FITS the {sized(attempt.available)}, at most {attempt.times.most_pairs_per_second:,.1f} pairs a second"
        )
    if attempt.is_open:
        return "at least, by formula; the compiler crashed"
    if attempt.compiled and not attempt.crash:
        return f"too much for {sized(attempt.available)}"
    return f"at least, by formula: cannot fit {sized(attempt.available)}"


def found_text(found: Found, topology: Topology, basis: str) -> str:
    """The best ways to use a slice."""
    rows = []
    for each in found.attempts:
        case = each.case
        pairs = case.pairs // case.mesh.batch_shards
        flags = f"--mesh {case.mesh} --remat {case.remat} --per_device_train_batch_size {pairs}"
        limit = f", limited by {each.times.limit}" if each.fits else ""
        rows.append((flags, sized(each.needed), _outcome(each) + limit))
    head = f"{topology}: {topology.chips} chip(s) of {sized(topology.chip.memory)}\n{_wrap(basis)}\n"
    if not rows:
        return f"{head}\nNothing fits: all {found.too_large} ways need more memory by formula. Name a larger slice."
    lines = _table("The best ways, each compiled, by pairs a second", rows)
    return (
        f"{head}\n{lines}\n\n"
        + _wrap(
            f"Left out: {found.too_large} ways that need more memory by formula than there is, and {found.left} that "
            "promise less by formula; --compiles says how many to compile."
        )
        + f"\n\n{_wrap(UNSEEN)}"
    )


def _table(title: str, rows: list[tuple[str, str, str]]) -> str:
    names, values = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    return "\n".join([title, *(f"  {name:<{names}}  {value:>{values}}  {why}".rstrip() for name, value, why in rows)])


def _wrap(text: str) -> str:
    return textwrap.fill(text, 119)


def sized(size: float) -> str:
    """Bytes of memory: 1.75 GiB."""
    return f"{size / GiB:.2f} GiB" if abs(size) >= GiB / 10 else f"{size / MiB:.2f} MiB"


def scaled(value: float, suffixes: tuple[tuple[float, str], ...] = _SUFFIXES) -> str:
    """Three digits and a suffix: 8.03 G."""
    size, suffix = next(((size, suffix) for size, suffix in suffixes if value >= size), (1.0, ""))
    return f"{value / size:.3g} {suffix}"


def duration(seconds: float) -> str:
    """Three digits of the largest unit that is there at least twice: 5.2 h."""
    units = ((7200, 3600, "h"), (120, 60, "min"), (1, 1, "s"), (0, 1e-3, "ms"))
    size, name = next((size, name) for least, size, name in units if seconds >= least)
    return f"{seconds / size:,.3g} {name}" if seconds < 3.6e6 else f"{seconds / size:,.0f} {name}"


def _indented(text: str) -> str:
    return textwrap.fill(text, 119, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
