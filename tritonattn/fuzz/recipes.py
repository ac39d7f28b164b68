"""What is drawn: a recipe is a flat dictionary of plain values from which a whole call follows, so it can be pasted, kept and replayed.

`DEFAULTS` is the plainest call; a recipe names what differs from it, so shrinking leads back to it.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Recipe = dict[str, Any]

ATTENTION = ("flash_attn_varlen_func", "extend_attention", "decode_attention", "mla_decode", "mla_extend", "Router", "MlaRouter")
MOVES = ("merge_attn_states", "reshape_and_cache", "gather_cache", "mla_cache_write", "mla_gather_cache")
OPS = (*ATTENTION, *MOVES)
MLA = ("mla_decode", "mla_extend", "MlaRouter", "mla_cache_write", "mla_gather_cache")

DEFAULTS: Recipe = {
    "seed": 0, "lens": [[1, 4]], "kv_heads": 1, "group": 1, "head_size": 32, "v_head_size": 32, "latent": 32, "rope": 16, "dtype": "float32",
    "fp8": "", "fp8_q": False, "layout": "nhd", "block_size": 16, "causal": True, "window": [-1, -1], "softcap": 0.0, "scale": None, "alibi": False,
    "sinks": False, "descale": "none", "num_splits": 0, "ragged": True, "chunk_tokens": 32768, "threshold": 1, "magnitude": 1.0, "poison": "nan",
    "view": "dense", "padding": 0, "slack": 0, "return_lse": True, "out": "made", "shared": False, "pair": False, "uniform": False, "total": False,
    "invariant": False, "slots": "int64", "wrong": None,
}  # fmt: skip


def recipes(op: str, fp8: tuple[str, ...], longest: int) -> st.SearchStrategy[Recipe]:
    """Valid calls of ``op``. fp8: names of the 8-bit floats of the device; longest: most keys of a sequence."""

    def often(usual: Any, *others: Any) -> st.SearchStrategy[Any]:
        return st.sampled_from([usual, usual, *others])

    queries = st.one_of(st.integers(0, 4), st.integers(0, 40))
    keys = st.one_of(st.sampled_from([0, 1, 15, 16, 17, 31, 32, 33]), st.integers(0, longest))
    draws: dict[str, st.SearchStrategy[Any]] = {
        "seed": st.integers(0, 999), "lens": st.lists(st.tuples(queries, keys).map(list), min_size=0, max_size=5),
        "dtype": st.sampled_from(["float32", "bfloat16", "float16"]), "magnitude": often(1.0, 0.0, 0.01, 8.0, 100.0),
        "poison": often("nan", "inf", "huge"), "view": often("dense", "wide", "odd"), "padding": often(0, 1, 5), "slack": often(0, 1, 100),
        "return_lse": st.booleans(), "out": often("made", "given", "wide", "float32"),
    }  # fmt: skip
    if op not in ("merge_attn_states",):
        draws |= {"fp8": st.sampled_from(["", "", *fp8]), "descale": st.sampled_from(["none", "number", "one", "heads"])}
        draws |= {"block_size": st.sampled_from([16, 1, 8, 32, 48, 64, 100]), "slots": st.sampled_from(["int64", "int32"])}
    if op in MLA:
        draws |= {"latent": st.sampled_from([32, 64, 48, 80, 512]), "rope": st.sampled_from([16, 64, 48]), "group": st.integers(1, 20)}
    else:
        sizes = st.sampled_from([32, 64, 128, 40, 72, 80, 96, 120, 192, 256])
        draws |= {"layout": st.sampled_from(["nhd", "hnd", "preshuffled"]), "kv_heads": st.integers(1, 3), "group": st.integers(1, 9)}
        draws |= {"head_size": sizes, "v_head_size": st.one_of(st.none(), sizes)}
    if op in ("mla_extend", "MlaRouter"):
        draws |= {"head_size": st.sampled_from([32, 64, 48]), "v_head_size": st.sampled_from([32, 64, 40])}
    if op in ATTENTION:
        draws |= {"causal": often(True, False), "scale": st.sampled_from([None, 0.1, 1.0])}
        if op not in MLA:
            window = st.tuples(st.integers(-1, longest), st.integers(-1, 9)).map(list)
            draws |= {"window": st.one_of(st.just([-1, -1]), window), "softcap": often(0.0, 2.0, 50.0), "alibi": st.booleans(), "sinks": st.booleans()}
        if op in ("decode_attention", "mla_decode"):
            draws |= {"num_splits": st.sampled_from([0, 1, 2, 3, 7, 40]), "ragged": st.booleans()}
            draws |= {"fp8_q": st.booleans(), "uniform": st.booleans(), "pair": st.booleans()}
        if op == "flash_attn_varlen_func":
            draws |= {"fp8_q": st.booleans()}
        if op in ("extend_attention", "mla_extend", "Router", "MlaRouter"):
            draws |= {"chunk_tokens": st.sampled_from([32768, 1, 16, 33, 100]), "shared": st.booleans(), "total": st.booleans()}
        if "Router" in op:
            draws |= {"threshold": st.integers(1, 4), "invariant": st.booleans()}
    # Every choice is optional, so that a failing recipe shrinks to the few that matter.
    return st.fixed_dictionaries({"op": st.just(op)}, optional=draws)


def settle(recipe: Recipe) -> Recipe:
    """All choices of a recipe, those that exclude each other brought in line."""
    full = DEFAULTS | recipe
    if full["v_head_size"] is None:
        full["v_head_size"] = full["head_size"]
    if not full["fp8"]:
        full["fp8_q"] = False
    if full["op"] == "flash_attn_varlen_func":
        full["fp8"] = full["fp8"] if full["fp8_q"] else ""
    x = 16 if full["fp8"] else 4 if full["dtype"] == "float32" else 8
    if full["layout"] == "preshuffled":
        for name in ("block_size", "head_size"):
            full[name] = -(-full[name] // x) * x
    if full["op"] in MLA:
        full["kv_heads"] = 1
        if full["descale"] == "heads":
            full["descale"] = "one"
    if not any(keys for _, keys in full["lens"]):
        full["slack"] = 0  # a block table without columns, where tokens may be cached, is refused
    if full["uniform"]:
        most = max((query for query, _ in full["lens"]), default=1) or 1
        full["lens"] = [[most, keys] for _, keys in full["lens"]]
    if full["op"] in ("Router", "MlaRouter"):
        full["padding"] = max(full["padding"], 0)
    return full
