"""The report as text, for somebody who has not seen one before."""

import textwrap

from ..parallel.chips import GiB, MiB
from .case import Job
from .report import UNSEEN, Report
from .search import Attempt, Found

_SUFFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_NAMES = ((1e9, "billion"), (1e6, "million"), (1e3, "thousand"))


def text_of(report: Report) -> str:
    """All of it, in paragraphs."""
    parts = [_head(report), _verdict(report), _memory(report), _work(report), _traffic(report), _time(report)]
    return "\n\n".join([*filter(None, parts), *map(_wrap, (*report.case.job.notes, UNSEEN))])


def _head(report: Report) -> str:
    case, model, rows, length = report.case, report.case.job.model, *report.case.shape
    trained = model.trained_parameters
    share = "" if trained == model.parameters else f", {scaled(trained, _NAMES)} of them trained"
    passes = f"; {case.job.accumulation} such passes before each update" if case.job.accumulation > 1 else ""
    return (
        f"{scaled(model.parameters, _NAMES)} parameters{share}, on {case.topology}: {case.topology.chips} chip(s) as "
        f"mesh {case.mesh}, remat {case.remat}\n"
        f"A step: {case.pairs:,} pairs in {rows:,} rows of {length:,} tokens, over all chips{passes}\n"
        f"{_wrap(case.job.basis)}"
    )


def _verdict(report: Report) -> str:
    needed, there = report.program.peak, report.case.available
    between = sized(abs(there - needed))
    if report.fits:
        return f"IT FITS: {sized(needed)} of the {sized(there)} of each chip are used, {between} are free."
    return f"IT DOES NOT FIT: {sized(needed)} are needed on each chip, {between} more than its {sized(there)}."


def _memory(report: Report) -> str:
    explained = {
        "weights": "as the sharding plan splits them",
        "optimizer": f"what {report.case.job.optim} keeps of each trained weight",
        "gradients": "of the trained weights",
        "activations": f"kept for the backward by remat {report.case.remat}, at least",
        "working space": "what the compiler needs besides: gathered weights, a layer's own results",
        "program": "the instructions",
    }
    rows = [(kind, sized(size), explained.get(kind, "")) for kind, size in report.memory_by_kind.items()]
    times = report.program.peak / max(report.least.bound, 1)
    rows.append(("in all", sized(report.program.peak), f"{times:.2f} times the first four, which any program needs"))
    largest = [f"{sized(size)} {what}" for what, size in report.program.largest_buffers[:5]]
    return _table("Memory of a chip", rows, [] if report.fits else ["The largest arrays:", *largest])


def _work(report: Report) -> str:
    case, flops = report.case, report.flops

    def row(name: str, operations: float, why: str) -> tuple[str, str, str]:
        return name, f"{scaled(operations)}FLOP", f"{scaled(operations / case.pairs)}FLOP a pair, {why}"

    def more(name: str, operations: float, why: str) -> tuple[str, str, str]:
        return row(name, operations, f"{operations / flops.needed:.2f} times what is needed{why}")

    kernels = f"; {scaled(flops.kernels)}FLOP in attention kernels, by formula" if flops.kernels else ""
    rows = [row("needed", flops.needed, "by formula"), more("compiled", report.flops_compiled, kernels)]
    if flops.recomputed:
        rows.insert(1, more("with remat", flops.needed + flops.recomputed, ": layers computed again"))
    notes = []
    if (filled := case.lengths.tokens / case.columns) < 0.95:
        notes.append(f"Of the columns of the rows {filled:.0%} hold a token; padding is computed too, but not needed.")
    if case.masks:
        notes.append("Attention with masks computes every query of a row with every key, whoever may see whom.")
    return _table("Operations of a step, of all chips", rows, notes)


def _traffic(report: Report) -> str:
    rows, is_too_much = [], False
    for axes, sizes in report.traffic.items():
        compiled, needed = sizes["compiled"], sizes["needed"]
        why = f"{compiled / needed:.2f} times the {scaled(needed)}B that the mesh needs" if needed else "not needed"
        rows.append((axes, f"{scaled(compiled)}B", why))
        is_too_much |= compiled > 1.1 * needed
    largest = [f"{scaled(size)}B in {what}" for what, size in report.largest_collectives[:3]]
    notes = ["Most is sent by:", *largest] if is_too_much else []
    return _table("Sent between chips in a step, to each chip, by mesh axis", rows, notes) if rows else ""


def _time(report: Report) -> str:
    chip = report.case.topology.chip
    speeds = {
        "arithmetic": f"at {chip.peak_flops / 1e12:,.0f} TFLOP/s in bfloat16",
        "memory": f"at {chip.memory_bandwidth / 1e9:,.0f} GB/s",
        "links": f"at {chip.link_bandwidth / 1e9:,.0f} GB/s, over all links in one direction",
    }
    rows = [(part, duration(seconds), speeds[part]) for part, seconds in report.seconds.items()]
    at_best, in_turns = map(duration, report.bounds)
    notes = [
        f"At best {at_best}, limited by {report.limit}, if all of it happens at once; {in_turns} if one waits for the "
        "other.",
        f"So at most {report.pairs_per_second[0]:,.1f} pairs a second ({report.pairs_per_second[1]:,.1f} in turns), "
        f"and at most {report.mfu:.0%} of the chips' arithmetic used for the model (MFU).",
    ]
    if report.hours:
        best, turns = (duration(each * 3600) for each in report.hours)
        notes.append(
            f"{report.pairs_to_train:,.0f} pairs: at least {best}, {report.chip_hours[0]:,.4g} chip-hours ({turns} "
            f"and {report.chip_hours[1]:,.4g} in turns)."
        )
    if report.cost:
        best, turns = (f"{each:,.2f}" for each in report.cost)
        notes.append(f"At {report.price_per_chip_hour:g} a chip-hour: at least {best} ({turns} in turns).")
    notes.append(f"Compiling took {duration(report.program.compile_seconds)} on this machine.")
    return _table(f"Time of a step at the chip's published speeds ({chip.source})", rows, notes)


def refusal_text(attempt: Attempt) -> str:
    """What is said of a program that the compiler did not make."""
    needed, there = sized(attempt.needed), sized(attempt.case.available)
    verdict = "WHETHER IT FITS IS OPEN" if attempt.is_open else "IT DOES NOT FIT"
    how = "the compiler crashed; by formula it needs at least" if attempt.crash else "the compiler gave up at"
    said = f"{verdict}: {how} {needed} on each chip, which has {there}."
    return f"{attempt.case.topology}, {attempt.case}\n\n{said}\n\n{attempt.crash}".rstrip()


def found_text(found: Found) -> str:
    """The best ways to use a slice."""
    head = f"{found.topology}: {found.topology.chips} chip(s) of {sized(found.topology.chip.memory)}"
    if not found.attempts:
        return f"{head}\n\nNothing fits, by formula. Name a larger slice, or train adapters (--use_peft)."
    table = _table("The best ways, each compiled, by pairs a second", [_row(each) for each in found.attempts])
    left_out = "Left out are ways that need more memory by formula than there is, or promise less by formula."
    parts = [head, table, _wrap(f"{left_out} --compiles says how many to compile.")]
    if not any(each.fits for each in found.attempts):
        parts.append("None of these fits. Allow more to be tried with --compiles, or train adapters (--use_peft).")
    return "\n\n".join(parts)


def search_text(found: Found, job: Job) -> str:
    """The same, where nothing has been said before."""
    return "\n\n".join([found_text(found), *map(_wrap, (job.basis, *job.notes, UNSEEN))])


def _row(attempt: Attempt) -> tuple[str, str, str]:
    """An attempt by its flags, the memory that it needs, and what became of it."""
    report = attempt.report
    outcome = f"too much for {sized(attempt.case.available)}"
    if report is not None and report.fits:
        rate = f"at most {report.pairs_per_second[0]:,.1f} pairs a second, limited by {report.limit}"
        outcome = f"FITS the {sized(attempt.case.available)}, {rate}"
    elif attempt.crash:
        outcome = "at least, by formula; the compiler crashed"
    return attempt.flags, sized(attempt.needed), outcome


def _table(title: str, rows: list[tuple[str, str, str]], notes: list[str] | None = None) -> str:
    names, values = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    lines = [f"  {name:<{names}}  {value:>{values}}  {why}".rstrip() for name, value, why in rows]
    return "\n".join([title, *lines, *(_wrap(note, "  ") for note in notes or ())])


def _wrap(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 119, initial_indent=indent, subsequent_indent=2 * indent, break_long_words=False)


def sized(size: float) -> str:
    """Bytes of memory: 1.75 GiB."""
    return f"{size / GiB:.2f} GiB" if abs(size) >= GiB / 10 else f"{size / MiB:.2f} MiB"


def scaled(value: float, suffixes: tuple[tuple[float, str], ...] = _SUFFIXES) -> str:
    """Three digits and a suffix: 8.03 G."""
    size, suffix = next((each for each in suffixes if value >= each[0]), (1.0, ""))
    return f"{value / size:.3g} {suffix}"


def duration(seconds: float) -> str:
    """Three digits of the largest unit that is there at least twice: 5.2 h."""
    units = ((7200, 3600, "h"), (120, 60, "min"), (1, 1, "s"), (0, 1e-3, "ms"))
    size, name = next((size, name) for least, size, name in units if seconds >= least)
    return f"{seconds / size:,.3g} {name}" if seconds < 3.6e6 else f"{seconds / size:,.0f} {name}"
