"""What a layer can reach is compiled at its first step, which vLLM runs before it serves; whatever is compiled later is reported.

Nothing is launched: plans are made for batches of every kind (`warmup.planned`), by a planner of their own, and no memory is taken
for them. Triton's cache folder, which `tritonattn warmup` fills ahead, makes it a matter of a second.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from tritonattn.paths import launch
from tritonattn.warmup import Compilation, Compilations
from tritonattn.where import is_capturing

logger = logging.getLogger("vllm.tritonattn")
_done: set[Hashable] = set()
_later: Compilations | None = None


class Limits(NamedTuple):
    """What the batches of this server keep to."""

    max_model_len: int
    max_batch: int
    decode_threshold: int
    block_size: int

    @classmethod
    def of(cls, vllm_config: Any, decode_threshold: int, block_size: int) -> Limits:
        return cls(vllm_config.model_config.max_model_len, vllm_config.scheduler_config.max_num_seqs, decode_threshold, block_size)


class Blank:
    """Scratch that is never written: one element, seen many times."""

    def __init__(self, device: torch.device):
        self.device = device

    def take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(1, dtype=dtype, device=self.device).expand(numel)


def tokens(tensor: Tensor, count: int) -> Tensor:
    """The first of a layer's rows, `count` times."""
    return tensor[:1].expand(count, *tensor.shape[1:])


def batch(query: list[int], seq: list[int], block_size: int, device: torch.device) -> SimpleNamespace:
    """What a model runner says of a batch, as far as plans read it."""
    starts = torch.tensor([0, *query], dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
    lengths = torch.tensor(seq, dtype=torch.int32, device="cpu")
    return SimpleNamespace(
        num_reqs=len(query), num_actual_tokens=sum(query), max_query_len=max(query), max_seq_len=max(seq), query_start_loc_cpu=starts,
        query_start_loc=starts.to(device), seq_lens_cpu_upper_bound=lengths, seq_lens=lengths.to(device), is_prefilling=None,
        block_table_tensor=torch.zeros(1, -(-max(seq) // block_size), dtype=torch.int32, device=device).expand(len(seq), -1),
    )  # fmt: skip


def once(key: Hashable, device: torch.device, prepare: Callable[[], None]) -> None:
    """`prepare` with launches turned into compilations, the first time for this key."""
    if key in _done or knobs.runtime.interpret or is_capturing(device):
        return
    _done.add(key)
    begin = time.monotonic()
    with Compilations() as seen, launch.preparing():
        prepare()
    if seen.new:
        logger.info("tritonattn compiled %d kernels ahead in %.1f s", len(seen.new), time.monotonic() - begin)
    _report_later_ones()


def _report_later_ones() -> None:
    global _later
    if _later is None:
        _later = Compilations(on_new=_report).__enter__()


def _report(event: Compilation) -> None:
    if event.module.startswith("tritonattn.") and not launch.is_preparing():
        logger.warning("compiled while serving, in %.1f s: %s (%s)", event.seconds, event.kernel, event.key)
