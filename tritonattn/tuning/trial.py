"""One candidate: compiled, judged and predicted, or checked and timed on the device. It runs in a `Worker`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

import tritonattn

from . import codegen, model, stopwatch, table
from .arch import Arch, assume, detect
from .cases import ENTRY_POINTS, Case, prepare, run

REPEATS = 30
ERROR_ALLOWED = {"bf16": 0.02, "fp16": 0.004, "fp32": 1e-4}  # largest error over largest value, for the small problem it is checked on


def start() -> Callable[..., dict[str, Any]]:
    """For a `Worker`: each of them keeps to one thread, there may be one for every core."""
    torch.set_num_threads(1)
    return outcome


def outcome(case: Case, config: dict[str, Any], arch: Arch, device: str | None, ahead: bool = False) -> dict[str, Any]:
    """What a candidate came to. Without a device "predicted" seconds and what they are "bound" by; on one the median "seconds" and the
    "error" there; "refused" with reasons where it cannot be used. ahead: compile also what the check on a device will need."""
    candidate = table.candidate(arch, case.kernel, config)
    if device is None:
        found = _compile(case, arch, candidate)
        if ahead and "refused" not in found:
            with codegen.capture(candidate):
                run(_small(case), candidate)
        return found
    with assume(candidate):
        found = _verify(case, arch, device)
        return found if "refused" in found else found | _time(case, arch, device)


def _compile(case: Case, arch: Arch, candidate: Arch) -> dict[str, Any]:
    with codegen.capture(candidate) as launches:
        run(case, candidate)
    reasons, seconds, bounds = [], 0.0, []
    for launch in launches:
        if launch.kernel in ENTRY_POINTS[case.kernel]:
            report = codegen.read(launch)
            reasons += codegen.judge(report, arch)
            if report.main and report.main.matrix:
                prediction = model.predict(report, arch, case)
                seconds += prediction.seconds
                bounds.append(prediction.bound)
    if reasons:
        return {"refused": reasons}
    return {"predicted": seconds, "bound": " ".join(bounds)}


def _small(case: Case) -> Case:
    """The same call on few, short sequences."""
    dense = case.layout == "dense"
    query_len = min(case.query_len, 70)
    return replace(case, batch=2, query_len=query_len, kv_len=query_len if dense else min(case.kv_len, 300))


def _verify(case: Case, arch: Arch, device: str) -> dict[str, Any]:
    """Against the float64 oracle."""
    call = prepare(_small(case), arch, device, real=True)
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
    return {"seconds": statistics.median(stopwatch.samples(_prepared(case, device), REPEATS, device))}


@lru_cache(maxsize=1)  # candidates of a case come one after another, and its cache may be large
def _prepared(case: Case, device: str):
    return prepare(case, detect(device), device, real=True)
