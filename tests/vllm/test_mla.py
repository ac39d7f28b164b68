"""Mixed batches through builder and layer of the TRITON_MLA slot, against float64; decode context parallelism on two simulated ranks."""

from types import SimpleNamespace

import pytest
import torch
from harness import BLOCK_SIZE, attention, common, config, v1_order, v2_order
from vllm.model_executor.layers.attention import mla_attention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.mla import triton_mla
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.ops import dcp
from vllm.v1.kv_cache_interface import MLAAttentionSpec

HEADS, LATENT, ROPE, NOPE, V = 4, 256, 64, 32, 48  # 320 columns: the narrowest that vLLM takes
SCALE = 0.1
MIXED = [(1, 33), (40, 100), (3, 20), (1, 70), (20, 20), (1, 1)]


class Projection(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(LATENT, HEADS * (NOPE + V)) * LATENT**-0.5, requires_grad=False)

    def forward(self, latent):
        return (latent @ self.weight,)


class Gather(dcp.MLADCPManager):
    """Stands for the all-gather of the ranks: the first run of each rank records its rows, the second is given everybody's."""

    def __init__(self, world):
        self.world, self.recorded, self.at, self.rank, self.replay = world, [[] for _ in range(world)], 0, 0, False

    def init_kv_gather(self, *_):
        pass

    def kv_gather(self, everyone, own):
        if self.replay:
            torch.cat([rows[self.at] for rows in self.recorded], out=everyone)
            self.at += 1
        else:
            self.recorded[self.rank].append(own.clone())
            everyone.zero_()


class Mla:
    def __init__(self, monkeypatch, *, kv_cache_dtype="auto", speculated=0, workspace=64, world=1, manager=None, projection=None):
        self.world, self.fp8 = world, kv_cache_dtype.startswith("fp8")
        self.projection = projection or Projection()
        slot = AttentionBackendEnum.TRITON_MLA.get_class()
        vllm_config = config(HEADS, 1, LATENT + ROPE, torch.float32, speculated)
        vllm_config.model_config.max_model_len = 256
        vllm_config.parallel_config.decode_context_parallel_size = world
        vllm_config.cache_config.cache_dtype = kv_cache_dtype
        monkeypatch.setattr(mla_attention, "get_current_vllm_config", lambda: vllm_config)
        monkeypatch.setattr(triton_mla, "get_current_vllm_config", lambda: vllm_config)
        monkeypatch.setattr(mla_attention, "get_num_attention_heads_from_layers", lambda *_: HEADS)
        monkeypatch.setattr(mla_attention.MLACommonMetadataBuilder, "determine_chunked_prefill_workspace_size", staticmethod(lambda _: workspace))
        if world > 1:
            monkeypatch.setattr(mla_attention, "get_dcp_group", lambda: SimpleNamespace(world_size=world))
        prefill = MLAPrefillBackendEnum.CUSTOM.get_class()(HEADS, SCALE, LATENT, NOPE, ROPE, V, vllm_config)
        self.layer = SimpleNamespace(
            q_lora_rank=None, kv_lora_rank=LATENT, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=V, prefill_backend=prefill,
            dcp_manager=manager, _k_scale=torch.tensor(0.25 if self.fp8 else 1.0), _v_scale=torch.tensor(float("nan")),
        )  # fmt: skip
        vllm_config.compilation_config.static_forward_context["layer"] = self.layer
        torch.set_default_dtype(torch.float32)
        self.impl = slot.get_impl_cls()(
            HEADS, LATENT + ROPE, SCALE, 1, None, None, kv_cache_dtype, None, AttentionType.DECODER, None, q_lora_rank=None, kv_lora_rank=LATENT,
            qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, qk_head_dim=NOPE + ROPE, v_head_dim=V, kv_b_proj=self.projection,
        )  # fmt: skip
        assert self.impl.stock_reasons == []
        self.dtype = torch.float8_e4m3fn if self.fp8 else torch.float32
        spec = MLAAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=LATENT + ROPE, dtype=self.dtype)
        self.builder = slot.get_builder_cls()(spec, ["layer"], vllm_config, torch.device("cpu"))
        shape = (40, BLOCK_SIZE, LATENT + ROPE)
        self.cache = torch.full(shape, 0x7F, dtype=torch.uint8) if self.fp8 else torch.full(shape, float("nan"))

    def write(self, latent, rope, slots):
        self.impl.do_kv_cache_update(latent, rope[:, None], self.cache, slots, "fp8" if self.fp8 else "auto", self.layer._k_scale)

    def attend(self, q, latent, rope, metadata, head_dim=V):
        """What vLLM's MLAAttention does with a batch: its first tokens absorbed, the others not. Returns (out, latent out, lse)."""
        decodes = metadata.num_decode_tokens
        out = torch.full((len(q), HEADS * V), float("nan"))
        cache = self.cache.view(self.dtype)
        decoded, lse = None, None
        if len(q) > decodes:
            self.impl.forward_mha(
                q[decodes:], latent[decodes:], rope[decodes:, None], cache, metadata, self.layer._k_scale, output=out[decodes:]
            )  # fmt: skip
        if decodes:
            w_k, w_v = self.projection.weight.view(LATENT, HEADS, NOPE + V).split([NOPE, V], -1)
            nope, pe = q[:decodes].split([NOPE, ROPE], -1)
            decoded, lse = self.impl.forward_mqa((torch.einsum("thn,lhn->thl", nope, w_k), pe), cache, metadata, self.layer)
            out[:decodes] = torch.einsum("thl,lhv->thv", decoded, w_v).flatten(1)
        return out.view(-1, HEADS, V), decoded, lse


def expected_of(projection, q, latent, rope, causal=True):
    kv = (latent @ projection.weight).view(len(latent), HEADS, NOPE + V)
    k = torch.cat([kv[..., :NOPE], rope[:, None].expand(-1, HEADS, -1)], -1)
    return attention(q, k, kv[..., NOPE:], SCALE, causal=causal)


def batch_of(requests):
    """Per request: queries, latent and rope rows of the whole sequence; and the blocks they lie in."""
    free = (torch.randperm(39) + 1).tolist()
    data, table = [], torch.zeros(len(requests), 16, dtype=torch.int32)
    for row, (query, seq) in zip(table, requests, strict=True):
        for i in range(-(-seq // BLOCK_SIZE)):
            row[i] = free.pop()
        data.append((torch.randn(query, HEADS, NOPE + ROPE), torch.randn(seq, LATENT), torch.randn(seq, ROPE)))
    return data, table


def slots_of(row, begin, end, rank=0, world=1):
    """Slots of positions; with several ranks those of this one, -1 elsewhere (interleaved token by token)."""
    at = torch.arange(begin, end)
    local = at // world
    return torch.where(at % world == rank, row[local // BLOCK_SIZE].long() * BLOCK_SIZE + local % BLOCK_SIZE, -1)


def run(layer, requests, *, padded_to=None, upper=None, causal=True):
    data, table = batch_of(requests)
    for row, (query, seq), (_, latent, rope) in zip(table, requests, data, strict=True):
        layer.write(latent[: seq - query], rope[: seq - query], slots_of(row, 0, seq - query))
    slots = torch.cat([slots_of(row, seq - query, seq) for row, (query, seq) in zip(table, requests, strict=True)])
    meta = common([r[0] for r in requests], [r[1] for r in requests], table, slots, padded_to=padded_to, upper=upper, causal=causal)
    metadata = layer.builder.build(0, meta)
    pad = meta.num_actual_tokens - len(slots)
    new = [torch.cat([*parts, torch.zeros(pad, *parts[0].shape[1:])]) for parts in zip(
        *[(q, latent[len(latent) - len(q) :], rope[len(rope) - len(q) :]) for q, latent, rope in data], strict=True)]  # fmt: skip
    layer.write(new[1], new[2], meta.slot_mapping)
    out, _, _ = layer.attend(*new, metadata)
    assert not out[len(slots) :].any()
    expected = torch.cat([expected_of(layer.projection, *parts, causal=causal) for parts in data])
    return out[: len(slots)], expected, metadata


def close(out, expected, atol=1e-5, rtol=1e-5):
    torch.testing.assert_close(out.double(), expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize("order", [v1_order, v2_order], ids=["v1", "v2"])
def test_mixed_batch(monkeypatch, order):
    """Context in several chunks: the workspace holds 64 rows."""
    out, expected, metadata = run(Mla(monkeypatch), order(MIXED))
    assert metadata.num_decodes == 3 and len(metadata.prefill.chunked_context.chunks) >= 2
    close(out, expected)


def test_fresh_prompts_alone(monkeypatch):
    out, expected, metadata = run(Mla(monkeypatch), [(5, 5), (17, 17)])
    assert metadata.num_decodes == 0 and metadata.prefill.chunked_context is None
    close(out, expected)


def test_fp8_cache(monkeypatch):
    out, expected, _ = run(Mla(monkeypatch, kv_cache_dtype="fp8"), v2_order(MIXED))
    close(out, expected, atol=0.15, rtol=0.1)


def test_several_tokens_per_decode(monkeypatch):
    """Uneven ones as well, and lengths that the host only bounds."""
    requests = [(4, 40), (2, 9), (4, 70)]
    out, expected, metadata = run(Mla(monkeypatch, speculated=3), requests, upper=[43, 10, 73])
    assert metadata.num_prefills == 0
    close(out, expected)


def test_graph_padding(monkeypatch):
    layer = Mla(monkeypatch)
    out, expected, metadata = run(layer, [(1, 33), (1, 70), (1, 1)], padded_to=5)
    assert metadata.num_decodes == 5
    close(out, expected)


def test_delegation_by_layer(monkeypatch):
    layer = Mla(monkeypatch)
    layer.impl.qk_rope_head_dim = 0
    assert layer.impl._stock_reasons() == ["rope width 0"]


def test_prefill_backend_of_other_layers(monkeypatch):
    """Our registered prefill backend under vLLM's own chunk loop: new tokens and a context chunk with their LSE."""
    layer = Mla(monkeypatch)
    _, _, metadata = run(layer, [(5, 25), (7, 7)])
    backend = metadata.prefill.prefill_backend
    q, k, v = torch.randn(12, HEADS, NOPE + ROPE), torch.randn(12, HEADS, NOPE + ROPE), torch.randn(12, HEADS, V)
    out, lse = backend.run_prefill_new_tokens(q, k, v, True)
    close(out, torch.cat([attention(q[:5], k[:5], v[:5], SCALE), attention(q[5:], k[5:], v[5:], SCALE)]))
    (chunk,) = metadata.prefill.chunked_context.chunks
    keys, values = torch.randn(20, HEADS, NOPE + ROPE), torch.randn(20, HEADS, V)
    given = torch.empty(5, HEADS, V)
    out, lse = backend.run_prefill_context_chunk(chunk, q[chunk.token_slice], keys, values, out=given)
    assert out is given and lse.shape == (HEADS, 5)
    close(out, attention(q[:5], keys, values, SCALE, causal=False))
    close(lse, (torch.einsum("qhd,khd->hqk", q[:5], keys).double() * SCALE).logsumexp(-1))


def test_decode_context_parallel(monkeypatch):
    """Two ranks, each with every second token: natural-log LSE of decodes, gathered context of the others."""
    world, manager, projection = 2, Gather(2), Projection()
    requests = v2_order([(1, 33), (1, 1), (40, 100), (20, 20), (3, 20)])
    ranks = [Mla(monkeypatch, world=world, manager=manager, projection=projection) for _ in range(world)]
    data, table = batch_of(requests)
    partial, outs = [], []
    for replay in (False, True):
        manager.replay, outs, partial = replay, [], []
        for rank, layer in enumerate(ranks):
            manager.rank, manager.at = rank, 0
            for row, (_, seq), (_, latent, rope) in zip(table, requests, data, strict=True):
                layer.write(latent, rope, slots_of(row, 0, seq, rank, world))
            meta = common([r[0] for r in requests], [r[1] for r in requests], table, torch.zeros(sum(r[0] for r in requests), dtype=torch.int64))
            meta.dcp_local_seq_lens = torch.tensor([(seq - rank + world - 1) // world for _, seq in requests], dtype=torch.int32)
            metadata = layer.builder.build(0, meta)
            assert metadata.num_decodes == 2 and layer.impl.lse_base_on_e
            new = [torch.cat(parts) for parts in zip(
                *[(q, latent[len(latent) - len(q) :], rope[len(rope) - len(q) :]) for q, latent, rope in data], strict=True)]  # fmt: skip
            out, decoded, lse = layer.attend(*new, metadata)
            assert lse.dtype == torch.float32 and lse.shape == decoded.shape[:2]
            outs.append(out)
            partial.append((decoded, lse))
    expected = torch.cat([expected_of(projection, *parts) for parts in data])
    merged = dcp._lse_weighted_combine(torch.stack([o for o, _ in partial]), torch.stack([lse for _, lse in partial]))
    w_v = projection.weight.view(LATENT, HEADS, NOPE + V)[..., NOPE:]
    close(torch.einsum("thl,lhv->thv", merged, w_v), expected[:2])
    for out in outs:
        close(out[2:], expected[2:])
