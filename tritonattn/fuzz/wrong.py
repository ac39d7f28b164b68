"""One argument of a sound call made wrong, in every way that its kind can be: each must be refused by name before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritonattn.fuzz.inputs import MARK, Call

FLOATS = {"q", "k", "v", "k_cache", "v_cache", "kv_cache", "out_a", "out_b", "key", "value", "latent", "rope", "lse_a", "lse_b"}
INTS = {"cu_seqlens_q", "cu_seqlens_k", "seqused_k", "context_lens", "block_table", "starts", "lengths", "slot_mapping"}
COUNTS = {"max_seqlen_q", "max_seqlen_k", "max_context_len", "chunk_tokens", "num_splits", "kv_lora_rank", "total_context_len", "num_q_heads",
          "num_kv_heads", "num_heads", "head_size", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "decode_threshold"}  # fmt: skip
WRITTEN = {("reshape_and_cache", "k_cache"), ("reshape_and_cache", "v_cache"), ("mla_cache_write", "kv_cache")}
OPTIONAL = {"cu_seqlens_q", "total_context_len", "k", "v"}
SIZE = ("longer", "meta", "shorter")  # what disagrees with others may be told of those


def _turned(tensor: Tensor) -> Tensor | None:
    if tensor.ndim < 2:
        return None
    turned = tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    return turned if turned.stride(-1) != 1 and turned.shape[-1] > 1 else None


def _tensor(value: Any, dtypes: dict[str, torch.dtype]) -> Iterator[tuple[str, Any]]:
    yield from (("text", "x"), ("number", 3.0), ("list", [1, 2]))
    if isinstance(value, Tensor):
        yield from ((name, value.to(dtype)) for name, dtype in dtypes.items())
        yield from (("rank", value.unsqueeze(0)), ("no rank", torch.zeros((), dtype=value.dtype)), ("meta", value.to("meta")))
        turned = _turned(value)
        if turned is not None:
            yield "turned", turned


def _overlapping(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Memory that would be written twice."""
    if len(tensor) > 1 and tensor.numel():
        yield "overlapping", tensor[:1].expand(tensor.shape)


def _count(name: str) -> Iterator[tuple[str, Any]]:
    yield from (("negative", -1), ("float", 1.5), ("text", "x"), ("bool", True), ("tensor", torch.tensor(3)))
    if name.startswith("max_"):
        yield "too large", (1 << 30) + 1
    if name not in OPTIONAL:
        yield "none", None


def _number(name: str) -> Iterator[tuple[str, Any]]:
    yield "array", np.array([0.5, 1.0])
    yield from (("nan", math.nan), ("infinite", math.inf), ("negative", -1.0), ("text", "x"), ("bool", True), ("list", [0.5]))
    if name != "descale":
        yield "tensor", torch.ones(1)
    if name == "softmax_scale":
        yield "zero", 0.0
    if name == "softcap":
        yield "none", None


def ways(name: str, value: Any, op: str) -> Iterator[tuple[str, Any]]:
    """(how, wrong value) for an argument."""
    if name in FLOATS and not isinstance(value, tuple):
        dtypes = {"float64": torch.float64, "int32": torch.int32}
        if isinstance(value, Tensor) and value.itemsize == 1:
            dtypes = {"int32": torch.int32}
        yield from _tensor(value, dtypes)
        if value is not None and not (op in ("Router", "MlaRouter") and "cache" in name):
            yield "none", None
        if (op, name) in WRITTEN:
            yield from _overlapping(value)
    elif name in INTS:
        dtypes = {"float": torch.float32} if name == "slot_mapping" else {"float": torch.float32, "int64": torch.int64, "bool": torch.bool}
        yield from _tensor(value, dtypes)
        if name not in OPTIONAL or op not in ("decode_attention", "mla_decode"):
            yield "none", None
        if isinstance(value, Tensor) and len(value) and name != "slot_mapping":
            yield "longer", torch.cat([value, value[-1:]])
    elif name in COUNTS:
        yield from _count(name)
    elif name == "block_size":
        yield from (("zero", 0), ("float", 1.5), ("text", "x"), ("bool", True))
    elif name in ("softmax_scale", "softcap"):
        yield from _number(name)
    elif name in ("causal", "batch_invariant"):
        yield from (("number", 1), ("none", None), ("text", "yes"), ("tensor", torch.ones(2)))
    elif name == "kv_layout":
        yield from (("latent", "latent"), ("text", "x"), ("none", None), ("number", 3), ("list", ["nhd"]))
    elif name in ("dtype", "kv_dtype"):
        yield from (("int8", torch.int8), ("text", "bfloat16"), ("number", 3), ("float64", torch.float64))
    elif name == "window_size":
        yield from (("number", 3), ("none", None), ("one", (1,)), ("float", (1.5, 0)), ("too small", (-2, 0)), ("text", "ab"), ("nones", (None, None)))
        yield from (("array", np.array([3, 0])), ("tensor", torch.tensor([3, 0])), ("tensors", (torch.tensor(-1), torch.tensor(-1))))
    elif name in ("alibi_slopes", "sinks"):
        yield from (("number", 1.0), ("text", "x"), ("int32", torch.zeros(4).int()), ("too many", torch.zeros(1000)), ("rank", torch.zeros(2, 2)))
    elif name.endswith("_descale"):
        yield from (*_number("descale"), ("zero", 0.0), ("half", torch.ones(1).half()), ("too many", torch.ones(1000)), ("empty", torch.ones(0)))
    elif name == "out" and not isinstance(value, tuple):
        yield from (("text", "x"), ("number", 3.0), ("rank", torch.zeros(2, 2)), ("int32", torch.zeros(1, 1, 1).int()), ("shape", torch.zeros(1, 1, 999)))
        if value is not None:
            yield from _overlapping(value)
    elif name == "out":
        yield from (("text", "x"), ("one", (value[0],)), ("ranks", (value[0].flatten(), value[1])), ("int32", (value[0].int(), value[1])))
        yield "nones", (None, None)
        yield from ((how, (wrong, value[1])) for how, wrong in _overlapping(value[0]))
    elif name == "up_project" and op == "mla_extend":
        yield from (("none", None), ("number", 3))


def _plans(query: list[int], seq: list[int]) -> Iterator[tuple[str, str, Any, Any]]:
    for how, wrong in (("negative", [-1]), ("float", [1.5]), ("text", ["x"]), ("none", [None]), ("ragged", [[1]]), ("huge", [1 << 32])):
        yield "query_lens", how, wrong + query[1:], seq
        yield "seq_lens", how, query, wrong + seq[1:]
    yield "seq_lens", "longer", query, [*seq, 1]
    yield "query_lens", "not a list", 3, seq
    yield "seq_lens", "nothing", query, None


Change = tuple[str, str, Callable[[], None]]


def choices(call: Call) -> list[Change]:
    """(argument, how, change): all that can be made wrong with a call."""

    def put(target: dict[str, Any], name: str, wrong: Any) -> Callable[[], None]:
        return lambda: target.update({name: wrong})

    def replan(query: Any, seq: Any, table: Any) -> Callable[[], None]:
        return lambda: setattr(call, "plan", (query, seq, table))

    found: list[Change] = []
    for target in (call.args, call.make):
        for name, value in target.items():
            found += [(name, how, put(target, name, wrong)) for how, wrong in ways(name, value, call.op)]
    if call.plan is not None and call.plan[0]:
        query, seq, table = call.plan
        found += [(name, how, replan(q, s, table)) for name, how, q, s in _plans(query, seq)]
    return found


def make_wrong(call: Call, which: int | list[str]) -> list[str]:
    """Changes one argument of a sound call, told by a number or as [name, how]; [name, how]. LookupError where that cannot be."""
    found = choices(call)
    chosen = found[which % len(found)] if isinstance(which, int) else next((c for c in found if list(c[:2]) == which), None)
    if chosen is None:
        raise LookupError(which)
    chosen[2]()
    return [chosen[0], chosen[1]]


def judge(call: Call, name: str, how: str, error: Exception | None) -> list[str]:
    """What is wrong with the refusal."""
    if error is None:
        return [f"{name} ({how}) was not refused"]
    text = str(error)
    if not isinstance(error, (ValueError, TypeError)):
        return [f"{name} ({how}): {type(error).__name__}: {text[:300]}"]
    named = any(other in text for other in (name, *(("tensors", *call.args) if how in SIZE else ())))
    said = named and text.startswith((call.op, "Router", "MlaRouter"))
    wrong = [] if said else [f"{name} ({how}) is not what this names: {type(error).__name__}: {text[:300]}"]
    out = call.moved.get("out") if hasattr(call, "moved") else None
    if isinstance(out, Tensor) and out.is_floating_point() and out.numel() and name != "out" and not (out == MARK).all():
        wrong.append(f"{name} ({how}): out was written")
    return wrong
