"""The public ops as seen by `torch.compile`: one `torch.library` op each, with its mutations declared and a fake.

Compiled code calls these ops; eager code calls `mha` and `mla` directly and pays nothing for them. Each op takes the output buffer and
declares it mutated; what it returns is the LSE, [Hq, T] float32, or an empty tensor where none was asked for. A descale crosses the
dispatcher as a tensor or as a number, the two never both. `mla_extend` calls back into Python and breaks a graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from tritonattn import mha, mla

NAMESPACE = "tritonattn"
_library = torch.library.Library(NAMESPACE, "DEF")
_SCHEMA_TYPES = {
    "Tensor": "Tensor", "Tensor | None": "Tensor?", "int": "SymInt", "int | None": "SymInt?", "bool": "bool", "float": "float", "float | None": "float?",
    "str": "str", "tuple[int, int]": "int[2]",
}  # fmt: skip


def _flatten(function: Callable, mutated: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """(schema of the arguments, names of the parameters) of an op for `function`; `out` and `return_lse` are not among them."""
    schema, names = [], []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in ("out", "return_lse"):
            continue
        names.append(name)
        kind = parameter.annotation
        if kind == "Scale":
            schema += [f"Tensor? {name}", f"float? {name}_value"]
        elif kind == "Tensor | tuple[Tensor, Tensor]":  # queries of MLA: whole, or latent and rope
            schema += [f"Tensor {name}", f"Tensor? {name}_rope"]
        elif name in mutated:
            schema.append(f"Tensor({name[0]}!) {name}")
        else:
            schema.append(f"{_SCHEMA_TYPES[kind]} {name}")
    return schema, names


def _values(function: Callable, names: list[str], given: dict[str, Any]) -> list[Any]:
    """The arguments of the op for a call of `function`."""
    values: list[Any] = []
    parameters = inspect.signature(function).parameters
    for name in names:
        value = given[name]
        kind = parameters[name].annotation
        if kind == "Scale":
            values += (value, None) if isinstance(value, Tensor) else (None, value)
        elif kind == "Tensor | tuple[Tensor, Tensor]":
            values += (value, None) if isinstance(value, Tensor) else value
        else:
            values.append(list(value) if kind == "tuple[int, int]" else value)
    return values


def _arguments(function: Callable, names: list[str], values: tuple) -> dict[str, Any]:
    """The reverse of `_values`."""
    given: dict[str, Any] = {}
    left = iter(values)
    parameters = inspect.signature(function).parameters
    for name in names:
        value = next(left)
        kind = parameters[name].annotation
        if kind == "Scale":
            number = next(left)
            value = number if value is None else value
        elif kind == "Tensor | tuple[Tensor, Tensor]":
            rope = next(left)
            value = value if rope is None else (value, rope)
        elif kind == "tuple[int, int]":
            value = tuple(value)
        given[name] = value
    return given


def _attention(function: Callable, result: Callable[[dict[str, Any]], tuple[tuple[int, ...], torch.dtype]]) -> Callable:
    """An op that fills `out` and returns the LSE. `result` gives shape and dtype of `out`."""
    name = function.__name__
    schema, names = _flatten(function, ())
    _library.define(f"{name}(Tensor(out!) out, bool return_lse, {', '.join(schema)}) -> Tensor")
    op = getattr(getattr(torch.ops, NAMESPACE), name)

    def run(out: Tensor, return_lse: bool, *values) -> Tensor:
        given = function(**_arguments(function, names, values), out=out, return_lse=return_lse)
        return given[1] if return_lse else out.new_empty((0, 0), dtype=torch.float32)

    def fake(out: Tensor, return_lse: bool, *values) -> Tensor:
        tokens, heads, _ = out.shape
        return out.new_empty((heads, tokens) if return_lse else (0, 0), dtype=torch.float32)

    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)

    @wraps(function)
    def call(*args, **kwargs):
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        out, return_lse = given["out"], given["return_lse"]
        if out is None:
            shape, dtype = result(given)
            out = torch.empty(shape, dtype=dtype, device=given[names[1]].device)
            # As the eager op makes it: decode leaves rows of padding as they are.
            if "seqused_k" in given and mha.may_be_padded(shape[0], given["seqused_k"].shape[0], given["max_seqlen_q"], given["cu_seqlens_q"]):
                out.zero_()
        lse = op(out, return_lse, *_values(function, names, given))
        return (out, lse) if return_lse else out

    return call


def _writer(function: Callable, mutated: tuple[str, ...]) -> Callable:
    """An op that writes into its arguments and returns nothing."""
    name = function.__name__
    schema, names = _flatten(function, mutated)
    _library.define(f"{name}({', '.join(schema)}) -> ()")
    op = getattr(getattr(torch.ops, NAMESPACE), name)

    def run(*values) -> None:
        function(**_arguments(function, names, values))

    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", lambda *values: None, lib=_library)

    @wraps(function)
    def call(*args, **kwargs):
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        return op(*_values(function, names, dict(bound.arguments)))

    return call


def _dtype(q: Tensor) -> torch.dtype:
    return q.dtype if q.dtype.itemsize > 1 else torch.bfloat16


def _like_q(width: Callable[[dict[str, Any]], int]) -> Callable[[dict[str, Any]], tuple[tuple[int, ...], torch.dtype]]:
    def result(given: dict[str, Any]) -> tuple[tuple[int, ...], torch.dtype]:
        q = given["q"] if isinstance(given["q"], Tensor) else given["q"][0]
        return (q.shape[0], q.shape[1], width(given)), _dtype(q)

    return result


flash_attn_varlen_func = _attention(mha.flash_attn_varlen_func, _like_q(lambda given: given["v"].shape[2]))
extend_attention = _attention(mha.extend_attention, _like_q(lambda given: given["v_cache"].shape[3]))
decode_attention = _attention(mha.decode_attention, _like_q(lambda given: given["v_cache"].shape[3]))
mla_decode = _attention(mla.mla_decode, _like_q(lambda given: given["kv_lora_rank"]))
merge_attn_states = _attention(mha.merge_attn_states, lambda given: (tuple(given["out_a"].shape), given["out_a"].dtype))
reshape_and_cache = _writer(mha.reshape_and_cache, ("k_cache", "v_cache"))
mla_cache_write = _writer(mla.mla_cache_write, ("kv_cache",))
