"""Calls of multi-head latent attention, by op and through the router."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tritonattn.batch import DECODE, classify
from tritonattn.fuzz.inputs import Call, Inputs, cumulative


class Mla(Inputs):
    def build_mla_decode(self) -> Call:
        r, lens = self.r, self.r["lens"]
        q_lens, k_lens = [q for q, _ in lens], [k for _, k in lens]
        q = self.random(sum(q_lens), self.heads, r["latent"] + r["rope"], dtype=self.q_dtype)
        rows = self.rows(k_lens)
        scales = self.latent_scales()
        q_descale = self.descale("q", 1)
        cache = self.latent_cache(rows, (scales["kv_descale"], scales["rope_descale"]))
        options = {"softmax_scale": r["scale"] or 0.2, "causal": r["causal"]}
        wide = self.padded(q)
        args = {
            "q": (wide[..., : r["latent"]], wide[..., r["latent"] :]) if r["pair"] else wide, "kv_cache": cache, "kv_lora_rank": r["latent"],
            "seqused_k": torch.tensor(k_lens, dtype=torch.int32), "block_table": self.table, "max_seqlen_k": max(k_lens, default=0) + r["slack"],
            "cu_seqlens_q": None if r["uniform"] else cumulative(q_lens), "max_seqlen_q": max([1, *q_lens]), "num_splits": r["num_splits"],
            "ragged": r["ragged"],
            "q_descale": q_descale, **scales, **options, "out": self.out(sum(q_lens) + r["padding"], r["latent"]), "return_lse": r["return_lse"],
        }  # fmt: skip
        exact = [self.kept_rows(row, scales) for row in rows]
        verify = self.verifier(args, self.real(q, q_descale), exact, [row[..., : r["latent"]] for row in exact], options, q_lens=q_lens)
        return Call(self.op, args, verify)

    def _projections(self) -> tuple[Callable[..., Any], Tensor, Tensor]:
        r = self.r
        nope = r["head_size"]
        w_k, w_v = (torch.randn(self.heads, size, r["latent"], generator=self.generator) * r["latent"] ** -0.5 for size in (nope, r["v_head_size"]))

        def up_project(latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
            wide = torch.promote_types(latent.dtype, torch.float32)
            k, v = (torch.einsum("nl,hdl->nhd", latent.to(wide), w.to(latent.device, wide)).to(latent.dtype) for w in (w_k, w_v))
            return torch.cat([k, rope[:, None].expand(-1, self.heads, -1)], 2), v

        return up_project, w_k, w_v

    def _mla(self, stored: list[int]) -> tuple[dict[str, Any], list[Tensor], list[Tensor], Tensor, Tensor]:
        """Cache and new tokens as arguments, exact keys and values of each sequence, and the two weights."""
        r = self.r
        up_project, w_k, w_v = self._projections()
        contexts = [c for _, c in r["lens"]]
        rows, scales = self.rows([q + c for q, c in r["lens"]]), self.latent_scales()
        cache = self.latent_cache([row[:n] for row, n in zip(rows, stored, strict=True)], (scales["kv_descale"], scales["rope_descale"]))
        nothing = torch.zeros(0, r["latent"] + r["rope"], dtype=self.dtype)
        new = torch.cat([nothing, *(row[c:] for row, c in zip(rows, contexts, strict=True))])
        k, v = up_project(new[:, : r["latent"]], new[:, r["latent"] :])
        exact: tuple[list[Tensor], list[Tensor]] = ([], [])
        for row, n in zip(rows, stored, strict=True):
            real = torch.cat([self.kept_rows(row[:n], scales)[:, 0], row[n:].double()])
            for part, found in zip(exact, up_project(real[:, : r["latent"]], real[:, r["latent"] :]), strict=True):
                part.append(found)
        given = {"k": self.padded(k), "v": self.padded(v), "kv_cache": cache, "up_project": up_project, **scales}
        return given, *exact, w_k, w_v

    def build_mla_extend(self) -> Call:
        r = self.r
        q_lens, contexts = [q for q, _ in r["lens"]], [c for _, c in r["lens"]]
        q = self.random(sum(q_lens), self.heads, r["head_size"] + r["rope"])
        given, keys, values, _, _ = self._mla(contexts)
        options = {"softmax_scale": r["scale"] or 0.2, "causal": r["causal"]}
        args = {
            "q": self.padded(q), **given, "kv_lora_rank": r["latent"], "cu_seqlens_q": cumulative(q_lens), "context_lens": torch.tensor(contexts).int(),
            "block_table": self.table, "max_seqlen_q": max(q_lens, default=0) + r["slack"], "max_context_len": max(contexts, default=0) + r["slack"],
            "total_context_len": sum(contexts) if r["total"] else None, "chunk_tokens": r["chunk_tokens"], **options,
            "out": self.out(sum(q_lens) + r["padding"], r["v_head_size"]), "return_lse": r["return_lse"],
        }  # fmt: skip
        return Call(self.op, args, self.verifier(args, q.double(), keys, values, options, q_lens=q_lens, rounded=True, latent=True))

    def build_MlaRouter(self) -> Call:
        r = self.r
        q_lens, contexts = [q for q, _ in r["lens"]], [c for _, c in r["lens"]]
        seq = [q + c for q, c in r["lens"]]
        q = self.random(sum(q_lens), self.heads, r["head_size"] + r["rope"])
        kinds = classify(q_lens, contexts, r["threshold"]).tolist()
        given, keys, values, w_k, w_v = self._mla([n if kind == DECODE else c for n, c, kind in zip(seq, contexts, kinds, strict=True)])
        nope, wide = r["head_size"], torch.float32

        def absorb(x: Tensor) -> tuple[Tensor, Tensor]:
            x = x.nan_to_num(0.0, 0.0, 0.0)  # padding of a graph may be among them
            return torch.einsum("thd,hdl->thl", x[..., :nope].to(wide), w_k.to(x.device)).to(x.dtype), x[..., nope:]

        def up_project_v(x: Tensor) -> Tensor:
            return torch.einsum("thl,hdl->thd", x.to(wide), w_v.to(x.device)).to(x.dtype)

        options = {"softmax_scale": r["scale"] or 0.2, "causal": r["causal"]}
        make = {
            "num_heads": self.heads, "dtype": self.dtype, "kv_lora_rank": r["latent"], "qk_nope_head_dim": nope, "qk_rope_head_dim": r["rope"],
            "v_head_dim": r["v_head_size"], "kv_dtype": self.kv_dtype, "decode_threshold": r["threshold"], "chunk_tokens": r["chunk_tokens"],
            "block_size": r["block_size"] if r["slack"] else None, "kv_descale": given.pop("kv_descale"), "rope_descale": given.pop("rope_descale"), **options,
        }  # fmt: skip
        args = {"q": self.padded(q), **given, "absorb": absorb, "up_project_v": up_project_v, "out": self.out(sum(q_lens) + r["padding"], r["v_head_size"]),
                "return_lse": r["return_lse"]}  # fmt: skip
        verify = self.verifier(args, q.double(), keys, values, options, q_lens=q_lens, rounded=True, latent=True)
        return Call(self.op, args, verify, make, (q_lens, seq, self.table))
