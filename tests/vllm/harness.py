"""One attention layer under vLLM's interface: builder, layer, cache and batches as its model runners make them."""

from types import SimpleNamespace

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends import triton_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

BLOCK_SIZE = 16
MAX_MODEL_LEN = 256


def config(num_heads, num_kv_heads, head_size, dtype, speculated=0):
    speculative = SimpleNamespace(num_speculative_tokens=speculated, parallel_drafting=False) if speculated else None
    return SimpleNamespace(
        model_config=SimpleNamespace(
            get_num_attention_heads=lambda _: num_heads, get_num_kv_heads=lambda _: num_kv_heads, get_head_size=lambda: head_size,
            dtype=dtype, rswa_window=None, max_model_len=MAX_MODEL_LEN,
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1, cp_kv_cache_interleave_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=512),
        compilation_config=SimpleNamespace(cudagraph_mode=None, cudagraph_capture_sizes=[1], static_forward_context={}),
        speculative_config=speculative, use_v2_model_runner=True,
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=BLOCK_SIZE),
        attention_config=SimpleNamespace(use_prefill_query_quantization=False),
    )  # fmt: skip


def common(query_lens, seq_lens, block_table, slots, *, upper=None, padded_to=None, causal=True, prefilling=None):
    """What a runner hands to a builder. `upper`: lengths as the host knows them; `padded_to`: requests in the graph."""
    count = len(query_lens)
    tokens = sum(query_lens)
    if padded_to is not None:  # flat query_start_loc, stale lengths, slots of -1
        each = max(query_lens)
        stale = [7] * (padded_to - count)
        query_lens, seq_lens = query_lens + [0] * len(stale), seq_lens + stale
        block_table = torch.cat([block_table, torch.zeros(len(stale), block_table.shape[1], dtype=torch.int32)])
        tokens = padded_to * each
        slots = torch.cat([slots, torch.full((tokens - len(slots),), -1, dtype=slots.dtype)])
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    known = lengths.clone() if upper is None else torch.tensor(upper, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts.clone(), seq_lens=lengths, num_reqs=len(query_lens), num_actual_tokens=tokens,
        max_query_len=max(query_lens), max_seq_len=max(max(seq_lens), int(known.max())), block_table_tensor=block_table, slot_mapping=slots,
        causal=causal, is_prefilling=None if prefilling is None else torch.tensor(prefilling), seq_lens_cpu_upper_bound=known,
    )  # fmt: skip


def v2_order(requests, decode_len=1):
    """(query, sequence) lengths as model runner V2 sorts them: decodes, then everything else by query length."""
    return sorted(requests, key=lambda r: (r[0] != decode_len, r[0]))


def v1_order(requests, threshold=1):
    """[decode : extend : prefill], as model runner V1 does."""
    return sorted(requests, key=lambda r: 0 if r[0] <= threshold else 1 if r[1] > r[0] else 2)


def attention(q, k, v, scale, *, causal=True, window=None, softcap=0.0, slopes=None, sinks=None, two_sided=False, chunk=None):
    """One sequence in float64: q [n, Hq, D] are the last queries over k, v [m, Hkv, D]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    s = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    distance = torch.arange(len(k))[None] - (torch.arange(len(q))[:, None] + len(k) - len(q))
    if slopes is not None:
        s = s + torch.tensor(slopes).double()[:, None, None] * distance
    hidden = distance > 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if window is not None:
        hidden = hidden | (distance <= -window) | (two_sided & (distance >= window))
    if chunk is not None:  # only keys of the query's own chunk of positions
        hidden = hidden | (torch.arange(len(k))[None] < (torch.arange(len(k) - len(q), len(k)) // chunk * chunk)[:, None])
    s = s.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        s = torch.cat([s, sinks.double()[:, None, None].expand(-1, len(q), 1)], -1)
    p = s.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", p, v)


class Layer:
    """A layer of TRITON_ATTN with its cache; `step` runs a batch of requests that are new to it."""

    def __init__(
        self, *, heads=(4, 2), head_size=64, dtype=torch.float32, kv_cache_dtype="auto", window=None, softcap=None, slopes=None, sinks=None,
        attn_type=AttentionType.DECODER, speculated=0, share=None, order=(0, 1, 2, 3), backend=None, blocks=64, block_size=BLOCK_SIZE, **extra,
    ):  # fmt: skip
        self.heads, self.kv_heads = heads
        self.head_size, self.dtype, self.attn_type = head_size, dtype, attn_type
        self.window, self.softcap, self.slopes, self.sinks = window, softcap or 0.0, slopes, sinks
        self.block_size = block_size
        self.backend = backend or AttentionBackendEnum.TRITON_ATTN.get_class()
        fp8 = kv_cache_dtype.startswith("fp8")
        cache_dtype = torch.float8_e4m3fn if fp8 else torch.int8 if kv_cache_dtype.startswith("int8") else dtype
        spec = self.backend.customize_spec(FullAttentionSpec(
            block_size=block_size, num_kv_heads=self.kv_heads, head_size=head_size, dtype=cache_dtype, kv_quant_mode=get_kv_quant_mode(kv_cache_dtype),
        ))  # fmt: skip
        triton_attn.get_num_attention_heads_from_layers = lambda *_: self.heads
        vllm_config = config(self.heads, self.kv_heads, head_size, dtype, speculated)
        self.builder = self.backend.get_builder_cls()(spec, ["layer"], vllm_config, torch.device("cpu"))
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        self.impl = self.backend.get_impl_cls()(
            self.heads, head_size, head_size**-0.5, self.kv_heads, slopes, window, kv_cache_dtype, softcap, attn_type, share, sinks=sinks, **extra
        )
        torch.set_default_dtype(default)
        content = spec.page_size_bytes // (block_size * self.kv_heads * cache_dtype.itemsize)
        logical = (blocks, self.kv_heads, block_size, content)
        garbage = 127 if cache_dtype.itemsize == 1 else float("nan")  # NaN as fp8 too
        cache = torch.full([logical[i] for i in order], garbage, dtype=torch.uint8 if fp8 else cache_dtype)
        self.kv_cache = cache.permute([order.index(i) for i in range(4)])
        scale = 0.5 if fp8 else 1.0
        self.layer = SimpleNamespace(
            _k_scale=torch.tensor(scale), _v_scale=torch.tensor(scale / 2 if fp8 else 1.0), _q_scale=torch.tensor(1.0),
            kv_sharing_target_layer_name=share,
        )  # fmt: skip
        self.free = (torch.randperm(blocks - 1) + 1).tolist()

    def table(self, seq_lens):
        width = MAX_MODEL_LEN // self.block_size
        table = torch.zeros(len(seq_lens), width, dtype=torch.int32)
        for row, length in zip(table, seq_lens, strict=True):
            for i in range(-(-length // self.block_size)):
                row[i] = self.free.pop()
        return table

    def slots(self, row, begin, end):
        at = torch.arange(begin, end)
        return row[at // self.block_size].long() * self.block_size + at % self.block_size

    def tokens(self, count, heads):
        return torch.randn(count, heads, self.head_size).to(self.dtype)

    def step(self, requests, *, causal=True, keys=True, built=None, chunk=None, output_scale=None, **kwargs):
        """Writes contexts, then new tokens; returns (out, expected) for the tokens of the requests (query, sequence lengths).

        output_scale: the result is written as 8-bit codes of so much.
        """
        query_lens, seq_lens = [r[0] for r in requests], [r[1] for r in requests]
        table = self.table(seq_lens)
        q, k, v, expected, slots = [], [], [], [], []
        for row, query, seq in zip(table, query_lens, seq_lens, strict=True):
            new_q, new_k, new_v = self.tokens(query, self.heads), self.tokens(seq, self.kv_heads), self.tokens(seq, self.kv_heads)
            context = seq - query
            if context:
                self.impl.do_kv_cache_update(self.layer, new_k[:context], new_v[:context], self.kv_cache, self.slots(row, 0, context))
            q.append(new_q), k.append(new_k[context:]), v.append(new_v[context:]), slots.append(self.slots(row, context, seq))
            expected.append(attention(
                new_q, new_k, new_v, self.head_size**-0.5, causal=causal, window=self.window, softcap=self.softcap, slopes=self.slopes,
                sinks=self.sinks, chunk=chunk,
            ))  # fmt: skip
        meta = common(query_lens, seq_lens, table, torch.cat(slots), causal=causal, **kwargs)
        self.metadata = self.builder.build(0, meta) if built is None else built(self.builder, meta)
        pad = meta.num_actual_tokens - sum(query_lens)
        q, k, v = (torch.cat([*x, torch.full((pad, *x[0].shape[1:]), float("nan"), dtype=self.dtype)]) for x in (q, k, v))
        self.impl.do_kv_cache_update(self.layer, k, v, self.kv_cache, meta.slot_mapping)
        out = torch.full_like(q, float("nan"), dtype=self.dtype if output_scale is None else current_platform.fp8_dtype())
        if not keys:  # they are in the cache
            k.fill_(float("nan")), v.fill_(float("nan"))
        self.impl.forward(self.layer, q, k, v, self.kv_cache, self.metadata, out, output_scale)
        return out[: sum(query_lens)], torch.cat(expected)
