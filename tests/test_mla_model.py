"""A small model of DeepSeek-V2's shape (arXiv:2405.04434; random weights): prefill, extend in chunks and absorbed decode of the same
tokens give the hidden states of a plain MLA in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import tritonattn
from tests.cases import cumulative

HIDDEN, HEADS, LAYERS = 96, 16, 2
Q_LORA, LATENT, NOPE, ROPE, V = 48, 64, 32, 16, 32
SCALE = (NOPE + ROPE) ** -0.5 * 1.2  # a model with YaRN scales its scores beyond 1 / sqrt(D)
LENGTHS = [21, 6]
BLOCK_SIZE = 16

Attention = Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_nope [T, H, NOPE], q_rope [T, H, ROPE], latent [T, LATENT], rope [T, ROPE]) -> [T, H, V]"""


def norm(x: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE on the last dimension of [T, .., ROPE]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    angle = positions.to(wide)[:, None] * 10000.0 ** -(torch.arange(0, ROPE, 2, device=x.device).to(wide) / ROPE)
    angle = angle.view(len(positions), *[1] * (x.ndim - 2), ROPE // 2)
    a, b = x.to(wide).chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1).to(x.dtype)


@dataclass
class Model:
    weights: list[dict[str, Tensor]]

    @classmethod
    def random(cls) -> Model:
        gen = torch.Generator().manual_seed(0)
        shapes = {
            "q_a": (Q_LORA, HIDDEN), "q_b": (HEADS * (NOPE + ROPE), Q_LORA), "kv_a": (LATENT + ROPE, HIDDEN),
            "k_b": (HEADS, NOPE, LATENT), "v_b": (HEADS, V, LATENT), "o": (HIDDEN, HEADS * V), "up": (HIDDEN, HIDDEN), "down": (HIDDEN, HIDDEN),
        }  # fmt: skip
        return cls([{k: torch.randn(s, generator=gen).bfloat16() / s[-1] ** 0.5 for k, s in shapes.items()} for _ in range(LAYERS)])

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Model:
        return Model([{name: weight.to(device, dtype) for name, weight in layer.items()} for layer in self.weights])

    def forward(self, x: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        for i, w in enumerate(self.weights):
            y = norm(x)
            q = (norm(y @ w["q_a"].T) @ w["q_b"].T).view(-1, HEADS, NOPE + ROPE)
            latent, rope = (y @ w["kv_a"].T).split([LATENT, ROPE], dim=-1)
            o = attention(i, q[..., :NOPE], rotate(q[..., NOPE:], positions), norm(latent), rotate(rope, positions))
            x = x + o.flatten(1) @ w["o"].T
            x = x + torch.nn.functional.silu(norm(x) @ w["up"].T) @ w["down"].T
        return x

    def up_project(self, layer: int, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        w = self.weights[layer]
        keys = torch.einsum("tl,hdl->thd", latent, w["k_b"])
        return torch.cat([keys, rope[:, None].expand(-1, HEADS, -1)], dim=-1), torch.einsum("tl,hdl->thd", latent, w["v_b"])


def plain(model: Model, tokens: Tensor) -> Tensor:
    """Each request by itself, dense attention in the dtype of the model."""

    def attention(layer, q_nope, q_rope, latent, rope):
        k, v = model.up_project(layer, latent, rope)
        scores = torch.einsum("qhd,khd->hqk", torch.cat([q_nope, q_rope], -1), k) * SCALE
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(torch.ones_like(scores).triu(1) > 0, -math.inf).softmax(-1), v)

    return torch.cat([model.forward(x, torch.arange(len(x)), attention) for x in tokens.split(LENGTHS)])


class Server:
    """Runs the model on the library: a latent cache per layer, and steps of a few tokens of each request."""

    def __init__(self, model: Model, device: torch.device, dtype: torch.dtype) -> None:
        self.model, self.device = model, device
        blocks = [-(-n // BLOCK_SIZE) for n in LENGTHS]
        self.caches = [torch.full((sum(blocks), BLOCK_SIZE, LATENT + ROPE), math.nan, dtype=dtype, device=device) for _ in range(LAYERS)]
        ids = torch.arange(sum(blocks)).flip(0).split(blocks)
        self.table = torch.nn.utils.rnn.pad_sequence(list(ids), batch_first=True, padding_value=10**6).int().to(device)
        self.done = [0] * len(LENGTHS)

    def step(self, tokens: Sequence[Tensor], path: str) -> Tensor:
        """The next tokens of each request, through `prefill`, `extend` or `decode`."""
        counts = [len(x) for x in tokens]
        before, after = self.done, [a + b for a, b in zip(self.done, counts, strict=True)]
        self.done = after
        spans = [torch.arange(a, b) for a, b in zip(before, after, strict=True)]
        table = self.table.cpu()
        slots = torch.cat([table[i, span // BLOCK_SIZE] * BLOCK_SIZE + span % BLOCK_SIZE for i, span in enumerate(spans)]).to(self.device)
        ints = {name: torch.tensor(x, dtype=torch.int32, device=self.device) for name, x in (("before", before), ("after", after))}
        cu, longest = cumulative(counts).to(self.device), max(counts)

        def attention(layer, q_nope, q_rope, latent, rope):
            cache = self.caches[layer]
            tritonattn.mla_cache_write(latent, rope, cache, slots)
            if path == "decode":
                w = self.model.weights[layer]
                q = torch.einsum("thd,hdl->thl", q_nope, w["k_b"]), q_rope
                out = tritonattn.mla_decode(
                    q, cache, seqused_k=ints["after"], block_table=self.table, max_seqlen_k=max(LENGTHS), softmax_scale=SCALE,
                    kv_lora_rank=LATENT, cu_seqlens_q=cu, max_seqlen_q=longest,
                )  # fmt: skip
                return torch.einsum("thl,hdl->thd", out, w["v_b"])
            q = torch.cat([q_nope, q_rope], dim=-1)
            k, v = self.model.up_project(layer, latent, rope)
            common = {"cu_seqlens_q": cu, "max_seqlen_q": longest, "softmax_scale": SCALE, "causal": True}
            if path == "prefill":
                return tritonattn.flash_attn_varlen_func(q, k, v, cu_seqlens_k=cu, max_seqlen_k=longest, **common)
            return tritonattn.mla_extend(
                q, k, v, cache, up_project=lambda *rows: self.model.up_project(layer, *rows), context_lens=ints["before"],
                block_table=self.table, max_context_len=max(before), total_context_len=sum(before), kv_lora_rank=LATENT,
                chunk_tokens=16, **common,
            )  # fmt: skip

        return self.model.forward(torch.cat(list(tokens)), torch.cat(spans).to(self.device), attention)


def serve(model: Model, tokens: Tensor, device: torch.device, schedule: Sequence[tuple[str, Sequence[int]]]) -> Tensor:
    """schedule: (path, tokens of each request) per step. Hidden states in the order of `tokens`."""
    server = Server(model, device, tokens.dtype)
    rest = list(tokens.to(device).split(LENGTHS))
    outputs: list[list[Tensor]] = [[] for _ in LENGTHS]
    for path, counts in schedule:
        now = [x[:n] for x, n in zip(rest, counts, strict=True)]
        rest = [x[n:] for x, n in zip(rest, counts, strict=True)]
        for kept, part in zip(outputs, server.step(now, path).split(list(counts)), strict=True):
            kept.append(part)
    assert not any(map(len, rest))
    return torch.cat([part for parts in outputs for part in parts]).cpu()


SCHEDULES = {
    "prefill": [("prefill", (21, 6))],
    "extend": [("extend", (12, 4)), ("extend", (9, 2))],
    "decode": [("decode", (1, 1))] * 6 + [("decode", (3, 0))] * 5,
    "prefill, extend, decode": [("prefill", (10, 2)), ("extend", (6, 3)), ("decode", (4, 1)), ("decode", (1, 0))],
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hidden_states(device, schedule, dtype):
    model = Model.random()
    tokens = torch.randn(sum(LENGTHS), HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = plain(model.to("cpu", torch.float64), tokens.double())
    allowed = (plain(model.to("cpu", dtype), tokens.to(dtype)).double() - exact).norm()
    got = serve(model.to(device, dtype), tokens.to(dtype), device, schedule).double()
    assert got.isfinite().all()
    error = (got - exact).norm()
    assert error <= 2 * allowed + 1e-6 * exact.norm(), f"{error / exact.norm():.2e}, plain PyTorch in {dtype} {allowed / exact.norm():.2e}"
