"""Calls of multi-head attention, by op and through the router."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonattn.batch import DECODE, classify
from tritonattn.fuzz.inputs import Call, Inputs, cumulative


class Mha(Inputs):
    def build_flash_attn_varlen_func(self) -> Call:
        r, lens = self.r, self.r["lens"]
        q_lens, k_lens = [q for q, _ in lens], [k for _, k in lens]
        q = self.random(sum(q_lens), self.heads, r["head_size"], dtype=self.q_dtype)
        k = self.random(sum(k_lens), r["kv_heads"], r["head_size"], dtype=self.q_dtype)
        v = self.random(sum(k_lens), r["kv_heads"], r["v_head_size"], dtype=self.q_dtype, magnitude=1.0)
        scales = {f"{name}_descale": self.descale(name, r["kv_heads"]) for name in "qkv"}
        options = self.options()
        args = {
            "q": self.padded(q), "k": self.padded(k), "v": self.padded(v), "cu_seqlens_q": cumulative(q_lens), "cu_seqlens_k": cumulative(k_lens),
            "max_seqlen_q": max(q_lens, default=0) + r["slack"], "max_seqlen_k": max(k_lens, default=0) + r["slack"], **scales, **options,
            "out": self.out(sum(q_lens) + r["padding"], r["v_head_size"]), "return_lse": r["return_lse"],
        }  # fmt: skip
        exact_k, exact_v = self.real(k, scales["k_descale"]).split(k_lens), self.real(v, scales["v_descale"]).split(k_lens)
        verify = self.verifier(args, self.real(q, scales["q_descale"]), list(exact_k), list(exact_v), options, q_lens=q_lens)
        return Call(self.op, args, verify)

    def build_decode_attention(self) -> Call:
        r, lens = self.r, self.r["lens"]
        q_lens, k_lens = [q for q, _ in lens], [k for _, k in lens]
        q = self.random(sum(q_lens), self.heads, r["head_size"], dtype=self.q_dtype)
        keys, values = self.sequences(k_lens)
        scales = {f"{name}_descale": self.descale(name, r["kv_heads"]) for name in "qkv"}
        hidden = [min(max(n, 0), k) for n, k in zip(self.unseen([k - q for q, k in lens]), k_lens, strict=True)]
        if not lens:
            hidden = [0]
        cache = self.caches(keys, values, hidden, (scales["k_descale"], scales["v_descale"]))
        options = self.options()
        args = {
            "q": self.padded(q), **cache, "seqused_k": torch.tensor(k_lens, dtype=torch.int32), "block_table": self.table[: len(lens)],
            "max_seqlen_k": max(k_lens, default=0) + r["slack"], "cu_seqlens_q": None if r["uniform"] else cumulative(q_lens),
            "max_seqlen_q": max([1, *q_lens]) + (0 if r["uniform"] else min(r["slack"], 1)), "kv_layout": r["layout"], "num_splits": r["num_splits"], **scales,
            "ragged": r["ragged"],
            **options, "out": self.out(sum(q_lens) + r["padding"], r["v_head_size"]), "return_lse": r["return_lse"],
        }  # fmt: skip
        exact = [self.kept(rows, scales["k_descale"]) for rows in keys], [self.kept(rows, scales["v_descale"]) for rows in values]
        count = len(lens)
        return Call(self.op, args, self.verifier(args, self.real(q, scales["q_descale"]), exact[0][:count], exact[1][:count], options, q_lens=q_lens))

    def _paged(self, stored: list[int]) -> tuple[dict[str, Any], dict[str, Any], Any]:
        """Queries on a context, of which the cache holds the first ``stored`` tokens: the tensors of the call, its options, and what it must give."""
        r = self.r
        q_lens, contexts = [q for q, _ in r["lens"]], [c for _, c in r["lens"]]
        q = self.random(sum(q_lens), self.heads, r["head_size"])
        keys, values = self.sequences([q + c for q, c in r["lens"]])
        scales = {f"{name}_descale": self.descale(name, r["kv_heads"]) for name in "kv"}
        cut = [rows[:n] for rows, n in zip(keys, stored or [0], strict=True)], [rows[:n] for rows, n in zip(values, stored or [0], strict=True)]
        cache = self.caches(*cut, self.unseen(contexts) if contexts else [0], (scales["k_descale"], scales["v_descale"]))
        k, v = (torch.cat([rows[c:] for rows, c in zip(many, contexts or [0], strict=True)]) for many in (keys, values))
        options = self.options()
        args = {
            "q": self.padded(q), "k": None if r["shared"] else self.padded(k), "v": None if r["shared"] else self.padded(v), **cache,
            "out": self.out(sum(q_lens) + r["padding"], r["v_head_size"]), "return_lse": r["return_lse"],
        }  # fmt: skip
        exact = self._known(keys, values, stored, scales)
        verify = self.verifier(args, q.double(), *exact, options, q_lens=q_lens, rounded=bool(r["fp8"]) or r["descale"] != "none")
        return args, {**scales, **options}, verify

    def build_extend_attention(self) -> Call:
        r = self.r
        q_lens, contexts = [q for q, _ in r["lens"]], [c for _, c in r["lens"]]
        args, options, verify = self._paged([q + c for q, c in r["lens"]] if r["shared"] else contexts)
        args |= {
            "cu_seqlens_q": cumulative(q_lens), "context_lens": torch.tensor(contexts, dtype=torch.int32), "block_table": self.table[: len(contexts)],
            "max_seqlen_q": max(q_lens, default=0) + r["slack"], "max_context_len": max(contexts, default=0) + r["slack"], "kv_layout": r["layout"],
            "total_context_len": sum(contexts) if r["total"] else None, "chunk_tokens": r["chunk_tokens"], **options,
        }  # fmt: skip
        return Call(self.op, args, verify)

    def _known(self, keys: list[Tensor], values: list[Tensor], stored: list[int], scales: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Of each sequence what the cache holds of the first ``stored`` tokens, and the others as they are."""
        found: tuple[list[Tensor], list[Tensor]] = ([], [])
        for k, v, n in zip(keys, values, stored, strict=False):
            for kept, rows, name in zip(found, (k, v), ("k_descale", "v_descale"), strict=True):
                kept.append(torch.cat([self.kept(rows[:n], scales[name]), rows[n:].double()]))
        return found

    def build_Router(self) -> Call:
        r = self.r
        q_lens, contexts = [q for q, _ in r["lens"]], [c for _, c in r["lens"]]
        seq = [q + c for q, c in r["lens"]]
        kinds = classify(q_lens, contexts, r["threshold"]).tolist()
        args, options, verify = self._paged([n if r["shared"] or kind == DECODE else c for n, c, kind in zip(seq, contexts, kinds, strict=True)])
        make = {
            "num_q_heads": self.heads, "num_kv_heads": r["kv_heads"], "head_size": r["head_size"], "v_head_size": r["v_head_size"], "dtype": self.dtype,
            "kv_layout": r["layout"], "kv_dtype": self.kv_dtype, "decode_threshold": r["threshold"], "chunk_tokens": r["chunk_tokens"],
            "batch_invariant": r["invariant"], "block_size": r["block_size"] if r["slack"] else None, **options,
        }  # fmt: skip
        return Call(self.op, args, verify, make, (q_lens, seq, self.table[: len(seq)]))
