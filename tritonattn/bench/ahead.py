"""Compile what a run will need before it begins, in parallel, and launch nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import torch

from tritonattn.bench.cases import Case, Peers, build
from tritonattn.bench.rows import Row
from tritonattn.bench.runner import Config, pinned, release, table_rows
from tritonattn.paths.launch import preparing
from tritonattn.tuning.arch import Arch, assume, detect


@contextmanager
def compile_only(workers: int) -> Iterator[None]:
    """Within the block a launch, ours or a peer's, only asks for its kernel; all are compiled, in parallel, when the block ends."""
    from triton import AsyncCompileMode, JITFunction

    launch = JITFunction.run

    def compile_it(self, *args, grid, warmup=False, **kwargs):
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    with preparing(), ThreadPoolExecutor(workers) as pool, AsyncCompileMode(pool, ignore_errors=True):
        JITFunction.run = compile_it
        try:
            yield
        finally:
            JITFunction.run = launch


def compile_rows(rows: list[Row], device: torch.device, peers: Peers | None, configs: Iterable[Config], only: str) -> None:
    """Every Triton kernel of these rows, ours with each of the configs. What fails here fails again where it is recorded."""
    configs = list(configs)
    arch = detect(device)
    with compile_only(os.cpu_count() or 1):
        for row in rows:
            with suppress(Exception):
                _ask(build(row, device, peers, only), arch, configs)
            release(device)


def _ask(case: Case, arch: Arch, configs: list[Config]) -> None:
    for call in case.calls.values():
        used = table_rows(call, arch)
        for config in configs:
            with assume(pinned(arch, config, case.kernel, used)), suppress(Exception):
                call()
