"""The tensors of a call with everything poisoned that must not be read, marks where nothing must be written, and what is right.

The oracle is `reference.attend`, request by request over the keys and values that the request has: pages and paths do not enter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import tritonattn
from tritonattn import layouts, reference
from tritonattn.fuzz.recipes import Recipe
from tritonattn.problem import FP8_DTYPES
from tritonattn.tuning.arch import detect

MARK = 768.0  # in every dtype exactly
WILD = 10**9  # a table entry that faults, or shows, when it is followed


@dataclass
class Call:
    """A call on CPU tensors. ``run(device)`` gives what the op gave; ``verify`` says what is wrong with it."""

    op: str
    args: dict[str, Any]
    verify: Callable[[Any], list[str]]
    make: dict[str, Any] = field(default_factory=dict)  # of the router, whose `run` then takes args
    plan: tuple[list[int], list[int], Tensor | None] | None = None

    def run(self, device: torch.device) -> Any:
        args = {name: onto(value, device) for name, value in self.args.items()}
        self.moved = args
        if self.plan is None:
            return getattr(tritonattn, self.op)(**args)
        router = getattr(tritonattn, self.op)(**{name: onto(value, device) for name, value in self.make.items()}, device=device)
        query, seq, table = self.plan
        return router.run(router.plan(query, seq, onto(table, device)), **args)


def onto(value: Any, device: torch.device) -> Any:
    """To the device, tensors with their strides and what lies between their elements."""
    if isinstance(value, tuple):
        return tuple(onto(item, device) for item in value)
    if not isinstance(value, Tensor) or value.device.type == "meta":
        return value
    base = value if value._base is None else value._base
    return base.to(device, copy=True).as_strided(value.shape, value.stride(), value.storage_offset())


def fill(tensor: Tensor, poison: str) -> Tensor:
    if tensor.dtype in FP8_DTYPES:
        nan = 0x80 if "fnuz" in str(tensor.dtype) else 0x7F
        tensor.view(torch.uint8).fill_({"nan": nan, "inf": 0x7C if "e5m2" in str(tensor.dtype) else 0x7E, "huge": 0x7B, "zero": 0}[poison])
    else:
        tensor.fill_({"nan": math.nan, "inf": math.inf, "huge": 6e4, "zero": 0.0}[poison])
    return tensor


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


class Inputs:
    def __init__(self, recipe: Recipe):
        self.r = recipe
        self.op: str = recipe["op"]
        self.dtype = getattr(torch, recipe["dtype"])
        self.kv_dtype = getattr(torch, recipe["fp8"]) if recipe["fp8"] else self.dtype
        self.q_dtype = self.kv_dtype if recipe["fp8_q"] else self.dtype
        self.generator = torch.Generator().manual_seed(recipe["seed"])
        self.cache_names: tuple[str, ...] = ()
        self.heads = recipe["kv_heads"] * recipe["group"]

    # -- tensors --------------------------------------------------------------------------------------------------

    def random(self, *shape: int, dtype: torch.dtype | None = None, magnitude: float | None = None) -> Tensor:
        real = torch.randn(*shape, generator=self.generator) * (self.r["magnitude"] if magnitude is None else magnitude)
        dtype = dtype or self.dtype
        return reference.quantise(real, None, dtype)

    def view(self, tensor: Tensor) -> Tensor:
        """The same values inside a larger allocation full of poison; "odd": aligned to nothing."""
        if self.r["view"] == "dense" or not tensor.numel():
            return tensor
        shift = 1 if self.r["view"] == "odd" else 16
        shape = [*tensor.shape[:-2], tensor.shape[-2] + 1, tensor.shape[-1] + 2 * shift]
        room = fill(torch.empty(shape, dtype=tensor.dtype), self.r["poison"])[..., :-1, shift : shift + tensor.shape[-1]]
        room.copy_(tensor)
        return room

    def padded(self, tensor: Tensor) -> Tensor:
        """And rows of padding after it."""
        room = fill(torch.empty(len(tensor) + self.r["padding"], *tensor.shape[1:], dtype=tensor.dtype), self.r["poison"])
        room[: len(tensor)] = tensor
        return self.view(room)

    def descale(self, name: str, heads: int) -> float | Tensor | None:
        kind = self.r["descale"]
        number = {"q": 0.5, "k": 0.25, "v": 2.0, "kv": 0.5, "rope": 0.25}[name]
        if kind in ("none", "number"):
            return None if kind == "none" else number
        return torch.tensor([number]) if kind == "one" else torch.rand(heads, generator=self.generator) + 0.25

    def caches(self, keys: list[Tensor], values: list[Tensor], hidden: list[int], descales: tuple[Any, Any]) -> dict[str, Any]:
        """Blocks of shuffled ids; what nobody may read is poison: the first ``hidden`` tokens of each sequence too."""
        r, size = self.r, self.r["block_size"]
        counts = [-(-len(rows) // size) for rows in keys]
        blocks = sum(counts) + 2
        ids = torch.randperm(blocks - 1, generator=self.generator) + 1
        self.table = torch.full((len(keys), max(counts, default=0) + r["slack"] // 50), WILD, dtype=torch.int32)
        gap = 1 if r["view"] == "dense" else 2
        k_cache, v_cache = layouts.allocate(
            r["layout"], gap * blocks, size, r["kv_heads"], keys[0].shape[-1], v_head_size=values[0].shape[-1], dtype=self.kv_dtype
        )
        k_cache, v_cache = fill(k_cache, r["poison"])[::gap], fill(v_cache, r["poison"])[::gap]
        scales = {"k_descale": descales[0], "v_descale": descales[1], "kv_layout": r["layout"]}
        used = 0
        for row, (count, k, v, skip) in enumerate(zip(counts, keys, values, hidden, strict=True)):
            self.table[row, :count] = ids[used : used + count]
            used += count
            at = torch.arange(skip, len(k))
            slots = self.table[row].long()[at // size] * size + at % size if len(at) else at
            reference.reshape_and_cache(k[skip:], v[skip:], k_cache, v_cache, slots, **scales)
            self.table[row, : skip // size] = WILD
        return {"k_cache": k_cache, "v_cache": v_cache}

    def latent_cache(self, rows: list[Tensor], descales: tuple[Any, Any]) -> Tensor:
        """As `caches`, of latent rows."""
        r, size = self.r, self.r["block_size"]
        counts = [-(-len(row) // size) for row in rows]
        ids = torch.randperm(sum(counts) + 1, generator=self.generator) + 1
        self.table = torch.full((len(rows), max(counts, default=0) + r["slack"] // 50), WILD, dtype=torch.int32)
        gap = {"dense": 0, "wide": 48, "odd": 5}[r["view"]]
        width = r["latent"] + r["rope"]
        cache = fill(torch.empty(sum(counts) + 2, size * width + gap, dtype=self.kv_dtype), r["poison"])[:, : size * width].unflatten(1, (size, width))
        used = 0
        for at, (count, row) in enumerate(zip(counts, rows, strict=True)):
            self.table[at, :count] = ids[used : used + count]
            used += count
            position = torch.arange(len(row))
            slots = self.table[at].long()[position // size] * size + position % size if len(row) else position
            reference.mla_cache_write(row[:, : r["latent"]], row[:, r["latent"] :], cache, slots, kv_descale=descales[0], rope_descale=descales[1])
        return cache

    def out(self, tokens: int, width: int) -> Tensor | None:
        kind = self.r["out"]
        if kind == "made":
            return None
        dtype = torch.float32 if kind == "float32" else self.dtype if self.q_dtype.itemsize > 1 else torch.bfloat16
        if kind == "given":
            return torch.full((tokens, self.heads, width), MARK, dtype=dtype)
        return torch.full((tokens, self.heads + 1, width + 8), MARK, dtype=dtype)[:, : self.heads, :width]

    def options(self) -> dict[str, Any]:
        r = self.r
        per_head = {"alibi_slopes": r["alibi"], "sinks": r["sinks"]}
        tensors = {name: torch.rand(self.heads, generator=self.generator) * 2 - int(name == "sinks") if on else None for name, on in per_head.items()}
        return {"softmax_scale": r["scale"], "causal": r["causal"], "window_size": tuple(r["window"]), "softcap": r["softcap"], **tensors}

    def real(self, stored: Tensor, descale: Any) -> Tensor:
        return reference.dequantise(stored, descale, self.r["kv_heads"])

    def kept(self, rows: Tensor, descale: Any) -> Tensor:
        """float64 of what the cache holds of rows [n, heads, D]."""
        return self.real(reference.quantise(rows, descale, self.kv_dtype), descale)

    # -- what is right --------------------------------------------------------------------------------------------

    def verifier(
        self, call: dict[str, Any], q: Tensor, keys: list[Tensor], values: list[Tensor], options: dict[str, Any], *,
        q_lens: list[int], rounded: bool = False, latent: bool = False,
    ) -> Callable[[Any], list[str]]:  # fmt: skip
        """q float64 [T, heads, D]; keys and values float64 per sequence; rounded: the op may round keys or queries to the dtype on the way."""
        starts = cumulative(q_lens).tolist()

        def exact() -> tuple[Tensor, Tensor, float, float]:
            out, lse, score, largest = [], [], 0.0, 0.0
            scale = options["softmax_scale"] or q.shape[2] ** -0.5
            for at, (k, v) in enumerate(zip(keys, values, strict=True)):
                rows = q[starts[at] : starts[at + 1]]
                o, e = reference.attend(rows, k, v, **options)
                out.append(o)
                lse.append(e)
                if len(rows) and len(k):
                    score = max(score, scale * float(rows.norm(dim=2).max() * k.norm(dim=2).max()))
                    largest = max(largest, float(v.abs().max()))
            return torch.cat(out), torch.cat(lse, 1), score, largest

        def verify(result: Any) -> list[str]:
            made = call.get("out") is None
            if not isinstance(result, tuple if self.r["return_lse"] else Tensor):
                return [f"the result is a {type(result).__name__}"]
            out, lse = result if self.r["return_lse"] else (result, None)
            wrong = around(call.get("out"), out)
            out = out.cpu()
            rest = out[starts[-1] :].double()
            if made and not (rest == 0).all():
                wrong.append("rows of padding of a new result must be 0")
            if not made and not ((rest == MARK) | (rest == 0)).all():
                wrong.append("rows of padding must stay or be 0")
            if not starts[-1]:
                return wrong
            want, want_lse, score, largest = exact()
            unit = torch.finfo(self.dtype if self.q_dtype.itemsize > 1 else torch.bfloat16).eps
            score_error = score * (2.0**-19 + (2 * unit if rounded else 0.0) + (2.0**-9 if self.r["fp8_q"] else 0.0))
            if self.r["fp8"] and detect().backend == "hip":  # CDNA multiplies queries as two numbers of 8 bits
                score_error += score * (2.0**-6 if "e5m2" in self.r["fp8"] else 2.0**-8)
            score_error += self.r["softcap"] * 2.0**-21  # tanh by way of exp2 has this error of the cap, however small its argument
            bound = largest * (6 * unit * (2 if latent else 1) + 2 * min(score_error, 1.0)) + 1e-30
            error = (out[: starts[-1]].double() - want).abs()
            if not error.isfinite().all():
                wrong.append(f"out has {int((~error.isfinite()).sum())} elements that are not finite")
            elif error.max() > bound:
                at = [int(i) for i in (error == error.max()).nonzero()[0]]
                wrong.append(f"out is off by {float(error.max()):.3g} at {at}, allowed is {bound:.3g}")
            blind = want_lse == -math.inf
            if not (out[: starts[-1]].transpose(0, 1)[blind] == 0).all():
                wrong.append("a row that sees no key must be 0")
            if lse is not None:
                if lse.shape != (self.heads, len(out)) or lse.dtype is not torch.float32:
                    return [*wrong, f"lse is {lse.dtype} {list(lse.shape)}"]
                lse = lse.cpu()[:, : starts[-1]].double()
                if not (lse[blind] == -math.inf).all():
                    wrong.append("the LSE of a row that sees no key must be -inf")
                off = (lse - want_lse)[~blind].abs()
                bound = 2 * score_error + 2e-4 + 1e-5 * float(want_lse[~blind].abs().max()) if len(off) else 0.0
                if len(off) and not bool(off.max() <= bound):
                    wrong.append(f"lse is off by {float(off.max()):.3g}, allowed is {bound:.3g}")
            return wrong

        return verify

    # -- sequences ------------------------------------------------------------------------------------------------

    def sequences(self, lens: list[int]) -> tuple[list[Tensor], list[Tensor]]:
        r = self.r
        keys = [self.random(n, r["kv_heads"], r["head_size"]) for n in lens]
        values = [self.random(n, r["kv_heads"], r["v_head_size"], magnitude=1.0) for n in lens]
        nothing = [torch.zeros(0, r["kv_heads"], size, dtype=self.dtype) for size in (r["head_size"], r["v_head_size"])]
        return keys or nothing[:1], values or nothing[1:]

    def unseen(self, contexts: list[int]) -> list[int]:
        """Tokens left of every window."""
        left = self.r["window"][0]
        return [max(context - left, 0) if left >= 0 else 0 for context in contexts]

    def rows(self, lens: list[int]) -> list[Tensor]:
        return [self.random(n, self.r["latent"] + self.r["rope"], magnitude=1.0) for n in lens]

    def latent_scales(self) -> dict[str, Any]:
        return {"kv_descale": self.descale("kv", 1), "rope_descale": self.descale("rope", 1) if self.r["pair"] or self.r["shared"] else None}

    def kept_rows(self, rows: Tensor, scales: dict[str, Any]) -> Tensor:
        latent = self.r["latent"]
        rope_scale = scales["kv_descale"] if scales["rope_descale"] is None else scales["rope_descale"]
        parts = ((rows[:, None, :latent], scales["kv_descale"]), (rows[:, None, latent:], rope_scale))
        return torch.cat([self.kept(part, scale) for part, scale in parts], 2)


def around(given: Tensor | None, out: Tensor) -> list[str]:
    """What was written beside a given ``out`` that is part of something wider."""
    if given is None:
        return []
    wrong = [] if out.shape == given.shape and out.dtype is given.dtype else [f"out is {out.dtype} {list(out.shape)}"]
    wide = out._base
    if wide is not None and wide.ndim == 3 and given._base is not None:
        if not ((wide[:, given.shape[1] :] == MARK).all() and (wide[:, :, given.shape[2] :] == MARK).all()):
            wrong.append("wrote beside out")
    return wrong
