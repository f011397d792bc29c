"""What ``trl-tpu plan`` does and prints, once torch_xla has as many devices as the slice has chips."""

import dataclasses
import json
import sys
import tempfile

from trl_tpu.errors import UserError
from trl_tpu.parallel.chips import parse_topology
from trl_tpu.plan.case import Case
from trl_tpu.plan.compile import CompiledProgram
from trl_tpu.plan.search import CompileStep, attempt, remedies, search
from trl_tpu.plan.text import found_text, refusal_text, search_text, text_of
from trl_tpu.scripts.plan_job import compiler, has_data, job_of
from trl_tpu.scripts.plan_request import PlanRequest


def main(request: PlanRequest, compile_step: CompileStep | None = None) -> int:
    """Plan, and print what was found.

    Args:
        compile_step: What compiles; by default the TPU's own compiler.

    Returns:
        The exit status: 0 if it fits, or of a search anything does, else 1.

    Raises:
        UserError: No model, a mesh that the slice or the model does not fit, several slices.
        RuntimeError: The compiler fails for another reason than memory.
    """
    plan, topology, mesh = request.plan, parse_topology(request.plan.topology), request.training.mesh_shape
    if mesh.slices > 1:
        raise UserError(f"mesh '{mesh}': {topology} is one slice. Plan for one slice; `data` goes over several.")
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(request, folder)
    compile_step = _announced(compile_step or compiler(request, job))
    if plan.search:
        best = search(job, topology, compile_step, plan.compiles)
        attempts = {"attempts": [each.as_json() for each in best.attempts]}
        print(json.dumps(attempts, indent=2) if plan.json else search_text(best, job))
        return 0 if any(each.fits for each in best.attempts) else 1
    case = Case(job, topology, mesh, request.training.remat_policy, request.training.per_device_train_batch_size)
    first = attempt(case, compile_step)
    found = None if first.fits else remedies(job, topology, compile_step, plan.compiles)
    report = first.report
    if report is not None:
        pairs = pairs_to_train(request, case)
        report = dataclasses.replace(report, pairs_to_train=pairs, price_per_chip_hour=plan.price_per_chip_hour)
    if plan.json:
        said = report.as_json() if report is not None else first.as_json()
        tried = found.attempts if found is not None else []
        print(json.dumps(said | {"tried": [each.as_json() for each in tried]}, indent=2))
    else:
        print(text_of(report) if report is not None else refusal_text(first))
        if found is not None:
            print(f"\nWhat would fit:\n\n{found_text(found)}")
    return 0 if first.fits else 1


def pairs_to_train(request: PlanRequest, case: Case) -> float | None:
    """The pairs of all steps; None if neither their number nor a dataset is known."""
    args = request.training
    if args.max_steps > 0:
        return args.max_steps * case.pairs * case.job.accumulation
    pairs = request.plan.pairs_in_dataset or (len(case.job.lengths) if has_data(request) else None)
    return pairs and pairs * args.num_train_epochs


def _announced(compile_step: CompileStep) -> CompileStep:
    """Say what is going on, apart from what is printed: programs take minutes to compile."""

    def say_and_compile(case: Case) -> CompiledProgram:
        print(f"Compiling for {case.topology}: {case} ...", file=sys.stderr, flush=True)
        return compile_step(case)

    return say_and_compile
