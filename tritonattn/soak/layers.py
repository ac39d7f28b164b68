"""Layers without a model: the query, key and value of a token are looked up by its number, so what attention must give is known.

`exact` computes a row of any request in float64 from its tokens alone; blocks, slots and steps do not enter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import tritonattn
from tritonattn import layouts, reference
from tritonattn.batch import Plan
from tritonattn.problem import FP8_DTYPES
from tritonattn.soak.server import Load
from tritonattn.tuning.arch import detect


@dataclass(frozen=True)
class Setup:
    """One way to serve."""

    name: str
    mla: bool = False
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False
    kv_layout: str = "preshuffled"
    block_size: int = 16
    threshold: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    per_head: tuple[str, ...] = ()  # options that are random tensors [heads]
    batch_invariant: bool = False

    @property
    def tolerance(self) -> float:
        """Of ||out - exact|| / ||exact|| of a row: rounding to the dtype, for MLA on the way to and from the latent space too."""
        return 1e-4 if self.dtype is torch.float32 else 0.04 if self.mla else 0.02


SETUPS = (
    Setup("gqa bf16 preshuffled"),
    Setup("gqa fp32 hnd", dtype=torch.float32, kv_layout="hnd", block_size=20, threshold=3),
    Setup("gqa fp8 preshuffled speculated", fp8=True, threshold=4),
    Setup("gqa fp16 nhd window sinks", dtype=torch.float16, kv_layout="nhd", options={"window_size": (100, 0)}, per_head=("sinks",), threshold=2),
    Setup("gqa bf16 softcap alibi invariant", kv_layout="hnd", options={"softcap": 20.0}, per_head=("alibi_slopes",), batch_invariant=True),
    Setup("mla bf16", mla=True, block_size=64),
    Setup("mla fp8 speculated", mla=True, fp8=True, block_size=64, threshold=3),
)


def sizes(setup: Setup, device: torch.device) -> tuple[Load, dict[str, int]]:
    """A load, and the sizes of the layer: as served on a GPU, tiny for the interpreter."""
    if device.type == "cuda":
        blocks = (1 << 17) // setup.block_size
        return Load(1024, blocks, setup.block_size, 8192, 2048, 64, setup.threshold), {
            "heads": 16, "kv_heads": 2, "head_size": 128, "latent": 512, "rope": 64, "nope": 128,
        }  # fmt: skip
    return Load(64, -(-160 // setup.block_size) + 2, setup.block_size, 90, 24, 5, setup.threshold), {
        "heads": 4, "kv_heads": 2, "head_size": 32, "latent": 64, "rope": 16, "nope": 32,
    }  # fmt: skip


class Layer:
    """Tables by token number, a router, and the cache, which holds NaN where nothing was written."""

    def __init__(self, setup: Setup, load: Load, shape: dict[str, int], device: torch.device, seed: int):
        self.setup, self.load, self.device = setup, load, device
        self._generator = torch.Generator(device).manual_seed(seed)
        self.kv_dtype = getattr(torch, detect(device).fp8_types[0]) if setup.fp8 else setup.dtype
        self.options = {**setup.options, **{name: self._random(shape["heads"]).abs().float() * 0.1 for name in setup.per_head}}
        self.common: dict[str, Any] = {
            "dtype": setup.dtype, "device": device, "kv_dtype": self.kv_dtype, "decode_threshold": setup.threshold,
            "chunk_tokens": max(load.budget, 32), "block_size": load.block_size,
        }  # fmt: skip
        self._build(shape)
        for cache in self.caches:
            self._fill_nan(cache)

    router: Any
    scale: float
    caches: tuple[Tensor, ...]
    q: Tensor  # [vocabulary, heads, D], in the dtype
    new: tuple[Tensor, Tensor]  # keys, values of a new token, float64
    old: tuple[Tensor, Tensor]  # and as they come from the cache

    def _build(self, shape: dict[str, int]) -> None:
        raise NotImplementedError

    def step(self, plan: Plan, tokens: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse) of a planned batch whose query tokens are ``tokens``, after writing them to ``slots``."""
        raise NotImplementedError

    def exact(self, tokens: list[int], context: int) -> tuple[Tensor, Tensor]:
        """Row (out [heads, Dv], lse [heads]) of the last of ``tokens``, the first ``context`` of which are read from the cache."""
        index = torch.tensor(tokens, device=self.device)
        keys, values = (
            torch.cat([old[index[:context]], new[index[context:]]]) for old, new in zip(self.old, self.new, strict=True)
        )
        with self.device:
            out, lse = reference.attend(self.q[index[-1:]].double(), keys, values, softmax_scale=self.scale, causal=True, **self.options)
        return out[0], lse[:, 0]

    def poison(self, blocks: list[int]) -> None:
        index = torch.tensor(blocks, device=self.device)
        for cache in self.caches:
            row = torch.empty_like(cache[:1])
            self._fill_nan(row)
            bits = torch.uint8 if cache.itemsize == 1 else cache.dtype
            cache.view(bits)[index] = row.view(bits)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator, device=self.device).to(self.setup.dtype)

    def _stored(self, real: Tensor, descale: float | None) -> Tensor:
        """float64 values of what the cache holds of ``real`` [vocabulary, ..]."""
        return reference.dequantise(reference.quantise(real.cpu(), descale, self.kv_dtype), descale, 1).to(self.device)

    @staticmethod
    def _fill_nan(tensor: Tensor) -> None:
        if tensor.dtype in FP8_DTYPES:
            tensor.view(torch.uint8).fill_(0x80 if "fnuz" in str(tensor.dtype) else 0x7F)
        else:
            tensor.fill_(math.nan)


class Gqa(Layer):
    def _build(self, shape: dict[str, int]) -> None:
        heads, kv_heads, size = shape["heads"], shape["kv_heads"], shape["head_size"]
        self.scale = size**-0.5
        self.descales = {"k_descale": 0.02, "v_descale": 0.05} if self.setup.fp8 else {}
        self.layout = {"kv_layout": self.setup.kv_layout}
        self.router = tritonattn.Router(
            heads, kv_heads, size, batch_invariant=self.setup.batch_invariant, **self.common, **self.options, **self.descales, **self.layout
        )
        self.caches = layouts.allocate(
            self.setup.kv_layout, self.load.blocks, self.load.block_size, kv_heads, size, dtype=self.kv_dtype, device=self.device
        )
        vocabulary = self.load.vocabulary
        self.q = self._random(vocabulary, heads, size)
        self.k, self.v = (self._random(vocabulary, kv_heads, size) for _ in range(2))
        self.new = self.k.double(), self.v.double()
        self.old = self._stored(self.k, self.descales.get("k_descale")), self._stored(self.v, self.descales.get("v_descale"))

    def step(self, plan: Plan, tokens: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        k, v = self.k[tokens], self.v[tokens]
        tritonattn.reshape_and_cache(k, v, *self.caches, slots, **self.layout, **self.descales)
        return self.router.run(plan, self.q[tokens], k, v, *self.caches, return_lse=True)


class Mla(Layer):
    def _build(self, shape: dict[str, int]) -> None:
        heads, latent, self.rope, self.nope = (shape[name] for name in ("heads", "latent", "rope", "nope"))
        self.scale = (self.nope + self.rope) ** -0.5
        self.descales = {"kv_descale": 0.02, "rope_descale": 0.01} if self.setup.fp8 else {}
        self.router = tritonattn.MlaRouter(
            heads, softmax_scale=self.scale, kv_lora_rank=latent, qk_nope_head_dim=self.nope, qk_rope_head_dim=self.rope, v_head_dim=self.nope,
            **self.common, **self.options, **self.descales,
        )  # fmt: skip
        self.caches = (torch.empty(self.load.blocks, self.load.block_size, latent + self.rope, dtype=self.kv_dtype, device=self.device),)
        vocabulary = self.load.vocabulary
        self.q = self._random(vocabulary, heads, self.nope + self.rope)
        self.rows = self._random(vocabulary, latent), self._random(vocabulary, self.rope)
        self.w_k, self.w_v = (self._random(heads, self.nope, latent) * latent**-0.5 for _ in range(2))
        self.k, self.v = self.up_project(*self.rows)
        self.new = self.k.double(), self.v.double()
        scales = self.descales.get("kv_descale"), self.descales.get("rope_descale")
        self.old = self.up_project(*(self._stored(row[:, None], scale)[:, 0] for row, scale in zip(self.rows, scales, strict=True)))

    def up_project(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        w_k, w_v = self.w_k.to(latent.dtype), self.w_v.to(latent.dtype)
        nope = torch.einsum("nl,hdl->nhd", latent, w_k)
        return torch.cat([nope, rope[:, None].expand(-1, len(w_k), -1)], dim=-1), torch.einsum("nl,hdl->nhd", latent, w_v)

    def absorb(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return torch.einsum("thd,hdl->thl", q[..., : self.nope], self.w_k), q[..., self.nope :]

    def up_project_v(self, latent: Tensor) -> Tensor:
        return torch.einsum("thl,hdl->thd", latent, self.w_v)

    def step(self, plan: Plan, tokens: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        tritonattn.mla_cache_write(*(row[tokens] for row in self.rows), *self.caches, slots, **self.descales)
        functions = {"absorb": self.absorb, "up_project": self.up_project, "up_project_v": self.up_project_v}
        return self.router.run(plan, self.q[tokens], self.k[tokens], self.v[tokens], *self.caches, **functions, return_lse=True)
