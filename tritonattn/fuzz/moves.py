"""Calls that compute no attention: merging, cache writes, gathering."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tritonattn import layouts, reference
from tritonattn.fuzz.inputs import MARK, Call, Inputs, around, fill


class Moves(Inputs):
    def build_merge_attn_states(self) -> Call:
        r = self.r
        tokens = sum(q for q, _ in r["lens"])
        parts = [self.random(tokens, self.heads, r["v_head_size"], magnitude=1.0) for _ in range(2)]
        lses = [torch.randn(self.heads, tokens, generator=self.generator) * 10 * r["magnitude"] for _ in range(2)]
        for part, lse in zip(parts, lses, strict=True):
            dead = torch.rand(lse.shape, generator=self.generator) < 0.2
            lse[dead] = {"nan": -math.inf, "inf": math.inf, "huge": math.nan}[r["poison"]]
            part[dead.T] = math.nan
        known = [lse.nan_to_num(-math.inf, math.inf, -math.inf) for lse in lses]
        want, want_lse = reference.merge_attn_states(parts[0], known[0], parts[1], known[1])
        args: dict[str, Any] = {
            "out_a": self.view(parts[0]), "lse_a": lses[0], "out_b": self.view(parts[1]), "lse_b": lses[1], "out": self.out(tokens, r["v_head_size"]),
            "return_lse": r["return_lse"],
        }  # fmt: skip

        def verify(result: Any) -> list[str]:
            out, lse = result if r["return_lse"] else (result, None)
            wrong = around(args["out"], out)
            if not torch.allclose(out.cpu().double(), want, rtol=2 * torch.finfo(self.dtype).eps, atol=1e-5):
                wrong.append(f"out is off by {float((out.cpu().double() - want).abs().max()) if tokens else 0}")
            if lse is not None and not torch.allclose(lse.cpu().double(), want_lse, rtol=1e-5, atol=1e-5):
                wrong.append("lse is off")
            return wrong

        return Call(self.op, args, verify)

    def _slots(self, count: int, room: int) -> Tensor:
        slots = torch.randperm(room, generator=self.generator)[:count].to(getattr(torch, self.r["slots"]))
        outside = torch.rand(len(slots), generator=self.generator)
        slots[outside < 0.2] = -1
        slots[outside < 0.05] = torch.iinfo(slots.dtype).max
        return slots

    def _written(self, caches: tuple[Tensor, ...], write: Callable[..., None]) -> Callable[[Any], list[str]]:
        """Byte for byte what the reference writes, gaps included."""
        want = [x.clone() for x in caches]
        write(*want)

        def verify(_: Any) -> list[str]:
            wrong = []
            for name, expected in zip(self.cache_names, want, strict=True):
                got = self.call.moved[name].cpu()
                bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.itemsize]
                nan = got.float().isnan() & expected.float().isnan()
                different = (got.contiguous().view(bits) != expected.contiguous().view(bits)) & ~nan
                if different.any():
                    wrong.append(f"{name}: {int(different.sum())} elements differ")
            return wrong

        return verify

    def build_reshape_and_cache(self) -> Call:
        r = self.r
        tokens = sum(q for q, _ in r["lens"])
        blocks = -(-tokens // r["block_size"]) + 2
        key, value = self.random(tokens, r["kv_heads"], r["head_size"]), self.random(tokens, r["kv_heads"], r["v_head_size"])
        scales = {f"{name}_descale": self.descale(name, r["kv_heads"]) for name in "kv"} if r["fp8"] else {}
        k_cache, v_cache = layouts.allocate(
            r["layout"], 2 * blocks, r["block_size"], r["kv_heads"], r["head_size"], v_head_size=r["v_head_size"], dtype=self.kv_dtype
        )
        caches = tuple(fill(x, "huge")[:: 2 if r["view"] != "dense" else 1] for x in (k_cache, v_cache))
        slots = self._slots(tokens, blocks * r["block_size"])
        verify = self._written(caches, lambda k, v: reference.reshape_and_cache(key, value, k, v, slots, kv_layout=r["layout"], **scales))
        args = {
            "key": self.padded(key), "value": self.padded(value), "k_cache": caches[0], "v_cache": caches[1], "slot_mapping": slots,
            "kv_layout": r["layout"], **scales,
        }  # fmt: skip
        self.cache_names, self.call = ("k_cache", "v_cache"), Call(self.op, args, verify)
        return self.call

    def build_mla_cache_write(self) -> Call:
        r = self.r
        tokens, latent = sum(q for q, _ in r["lens"]), r["latent"]
        blocks = -(-tokens // r["block_size"]) + 2
        rows = self.rows([tokens])[0]
        scales = self.latent_scales() if r["fp8"] else {}
        cache = fill(torch.empty(2 * blocks, r["block_size"], latent + r["rope"], dtype=self.kv_dtype), "huge")[:: 2 if r["view"] != "dense" else 1]
        slots = self._slots(tokens, blocks * r["block_size"])
        verify = self._written((cache,), lambda c: reference.mla_cache_write(rows[:, :latent], rows[:, latent:], c, slots, **scales))
        args = {"latent": self.padded(rows)[:, :latent], "rope": self.padded(rows)[:, latent:], "kv_cache": cache, "slot_mapping": slots, **scales}
        self.cache_names, self.call = ("kv_cache",), Call(self.op, args, verify)
        return self.call

    def _gathered(self, args: dict[str, Any], want: list[Tensor], rows: int) -> Call:
        """want: float64 rows in the order of the sequences."""
        given = self.r["out"] != "made"
        if given:
            dtype = torch.float32 if self.r["out"] == "float32" else self.dtype
            args["out"] = tuple(torch.full((rows + self.r["padding"], *part.shape[1:]), MARK, dtype=dtype) for part in want)

        def verify(result: Any) -> list[str]:
            wrong = []
            for name, got, part in zip("kv", result, want, strict=True):
                if not torch.allclose(got[:rows].cpu().double(), part, rtol=torch.finfo(got.dtype).eps, atol=1e-7):
                    wrong.append(f"{name} differs")
                if not (got[rows:].double() == MARK).all():
                    wrong.append(f"{name}: rows past the end must stay")
            return wrong

        return Call(self.op, args, verify)

    def _spans(self) -> tuple[list[int], list[int], list[int]]:
        """(stored, starts, lengths) from pairs (length, stored)."""
        stored = [k for _, k in self.r["lens"]]
        lengths = [min(n, k) for n, k in self.r["lens"]]
        return stored, [(k - n) // 2 for n, k in zip(lengths, stored, strict=True)], lengths

    def build_gather_cache(self) -> Call:
        r = self.r
        stored, starts, lengths = self._spans()
        keys, values = self.sequences(stored)
        scales = {f"{name}_descale": self.descale(name, r["kv_heads"]) for name in "kv"}
        cache = self.caches(keys, values, [0] * max(len(stored), 1), (scales["k_descale"], scales["v_descale"]))
        spans = {"starts": torch.tensor(starts).int(), "lengths": torch.tensor(lengths).int()}
        args = {**cache, "block_table": self.table[: len(stored)], **spans, "kv_layout": r["layout"], **scales}
        want = []
        for many, name, width in ((keys, "k_descale", r["head_size"]), (values, "v_descale", r["v_head_size"])):
            rows = [self.kept(row, scales[name])[s : s + n] for row, s, n in zip(many, starts, lengths, strict=False)]
            want.append(torch.cat([torch.zeros(0, r["kv_heads"], width, dtype=torch.float64), *rows]))
        return self._gathered(args, want, sum(lengths))

    def build_mla_gather_cache(self) -> Call:
        r = self.r
        stored, starts, lengths = self._spans()
        rows, scales = self.rows(stored), self.latent_scales()
        cache = self.latent_cache(rows, (scales["kv_descale"], scales["rope_descale"]))
        spans = {"starts": torch.tensor(starts).int(), "lengths": torch.tensor(lengths).int()}
        args = {"kv_cache": cache, "block_table": self.table, **spans, "kv_lora_rank": r["latent"], **scales}
        kept = [self.kept_rows(row, scales)[s : s + n, 0] for row, s, n in zip(rows, starts, lengths, strict=True)]
        whole = torch.cat([torch.zeros(0, r["latent"] + r["rope"], dtype=torch.float64), *kept])
        return self._gathered(args, [whole[:, : r["latent"]], whole[:, r["latent"] :]], sum(lengths))
