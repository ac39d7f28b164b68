"""One candidate in a process of its own: `python -m tritonattn.tuning.trial` reads a job as JSON and prints its outcome as JSON.

A configuration may crash the compiler, hang the GPU or run out of memory; whatever it does, it does alone.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict, replace
from typing import Any

import torch

import tritonattn

from . import codegen, model, table
from .arch import Arch, assume, by_name, detect
from .cases import ENTRY_POINTS, Case, prepare, run
from .models import Model

ERROR_ALLOWED = {"bf16": 0.02, "fp16": 0.004, "fp32": 1e-4}  # largest error over largest value, for the small problem it is checked on


def job(case: Case, config: dict[str, Any], arch: str, device: str | None) -> dict[str, Any]:
    """A job as plain data. device: where to time it; None: compile and predict only."""
    return {"case": asdict(case), "config": config, "arch": arch, "device": device}


def outcome(job: dict[str, Any]) -> dict[str, Any]:
    """What a candidate came to: "refused" with reasons, or "predicted" seconds, or "seconds" on the device and the "error" there."""
    case = Case(**{**job["case"], "shape": Model(**job["case"]["shape"])})
    device = job["device"]
    arch = by_name(job["arch"]) if device is None else detect(device)
    candidate = table.pin(arch, **{case.kernel: job["config"]})
    found: dict[str, Any] = {}
    if arch.backend == "hip" and device is None:
        found = _compile(case, arch, candidate)
    if device is not None:
        with assume(candidate):
            found |= _verify(case, arch, device)
            if "refused" not in found:
                found |= _time(case, arch, device)
    return found


def _compile(case: Case, arch: Arch, candidate: Arch) -> dict[str, Any]:
    with codegen.capture(candidate) as launches:
        run(case, candidate)
    reasons, seconds, bounds = [], 0.0, []
    for launch in launches:
        if launch.kernel in ENTRY_POINTS[case.kernel]:
            report = codegen.read(launch)
            reasons += codegen.judge(report, arch)
            if report.main and report.main.matrix:
                prediction = model.predict(report, launch, arch, case)
                seconds += prediction.seconds
                bounds.append(prediction.bound)
    if reasons:
        return {"refused": reasons}
    return {"predicted": seconds, "bound": " ".join(bounds)}


def _verify(case: Case, arch: Arch, device: str) -> dict[str, Any]:
    """The same call on few, short sequences against the float64 oracle."""
    small = replace(case, batch=2, query_len=min(case.query_len, 70), kv_len=min(case.kv_len, 70 if case.layout == "dense" else 300))
    if small.layout == "dense":
        small = replace(small, kv_len=small.query_len)
    call = prepare(small, arch, device, real=True)
    out = call().double().cpu()
    oracle = getattr(tritonattn.reference, call.func.__name__)
    cpu = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in call.keywords.items()}
    expected = oracle(*(a.cpu() for a in call.args), **cpu)[0]
    error = ((out - expected).abs().max() / expected.abs().max()).item()
    allowed = ERROR_ALLOWED[case.dtype] * (4 if case.kv_dtype == "fp8" else 1)
    return {"error": error} if error <= allowed else {"refused": [f"off by {error:.3g}, {allowed:.3g} allowed"], "error": error}


def _time(case: Case, arch: Arch, device: str) -> dict[str, Any]:
    """Median seconds: on a GPU with the cache flushed between runs, on the interpreter of a small problem."""
    if torch.device(device).type == "cpu":
        small = replace(case, batch=1, query_len=min(case.query_len, 128), kv_len=min(case.kv_len, 256))
        call, times = prepare(replace(small, kv_len=small.query_len) if small.layout == "dense" else small, arch, device, real=True), []
        for _ in range(3):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return {"seconds": statistics.median(times)}
    from triton.testing import do_bench

    call = prepare(case, arch, device, real=True)
    return {"seconds": do_bench(call, warmup=20, rep=100, return_mode="median") * 1e-3}


def main() -> None:
    try:
        found = outcome(json.load(sys.stdin))
    except Exception as error:
        found = {"refused": [f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
