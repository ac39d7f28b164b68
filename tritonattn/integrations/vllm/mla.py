"""The backend in the TRITON_MLA slot: decode absorbed, prefill and chunked context with keys projected up, cache write and gather.

The cache format is vLLM's (576 columns per token), so that what this package does not take is left to vLLM's own kernels layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import vllm.envs as envs
from torch import Tensor
from vllm.model_executor.layers.attention import mla_attention as common
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, max_decode_query_len
from vllm.v1.attention.backends.mla import triton_mla as stock
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from tritonattn import layouts
from tritonattn.checks.mla import LATENT_STEP, MAX_LATENT, MAX_ROPE
from tritonattn.checks.reasons import HEAD_SIZE_STEP, MAX_HEAD_SIZE
from tritonattn.integrations.vllm import warm
from tritonattn.integrations.vllm.batch import scratch
from tritonattn.paths.cache import run_gather, run_write
from tritonattn.paths.mla_decode import run_mla_decode
from tritonattn.paths.prefill import CHUNK, NEW_TOKENS, run_pass, run_prefill, tile_count
from tritonattn.paths.replay import repeat
from tritonattn.plan import UNLIMITED, ContextRow, decode_plan, device_plan, prefill_row
from tritonattn.problem import AttnParams, AttnProblem, MlaParams
from tritonattn.tuning.arch import detect
from tritonattn.warmup import planned

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class DecodeMetadata(common.MLACommonDecodeMetadata):
    query_start_loc: Tensor | None = None
    max_query_len: int = 1
    max_seq_len: int = 0
    """Host integer, an upper bound: it chooses the number of splits, the lengths on the device are what counts."""


class MetadataBuilder(common.MLACommonMetadataBuilder):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[common.QueryLenSupport] = common.QueryLenSupport.VARLEN
    supports_non_causal_multi_token_decode: ClassVar[bool] = True

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1  # lengths local to a rank are not advanced

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        """Nothing: it refers to vLLM's own tensors alone."""

    def _build_decode(
        self, block_table_tensor, seq_lens_device, max_seq_len, query_start_loc_cpu, query_start_loc_device, num_decode_tokens, max_query_len,
        dcp_tot_seq_lens_device,
    ) -> DecodeMetadata:  # fmt: skip
        return DecodeMetadata(
            block_table_tensor, seq_lens_device, dcp_tot_seq_lens_device, query_start_loc_device, int(max_query_len), int(max_seq_len)
        )

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        context = None if metadata.prefill is None else metadata.prefill.chunked_context
        if context is not None:  # the contexts of all requests end to end: vLLM's chunks are consecutive pieces of that row
            lengths, device = context.context_lens_list, torch.device(self.device)
            ends = [0, *accumulate(lengths), *(0 for _ in lengths)]
            row = torch.tensor(ends, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda").to(device, non_blocking=True)
            cu, starts = row.split_with_sizes([len(lengths) + 1, len(lengths)])
            context.row = ContextRow(starts, context.context_lens, cu)
        return metadata


class TritonMLABackend(stock.TritonMLABackend):
    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # grids follow from the query lengths on the host


class Impl(stock.TritonMLAImpl):
    supports_pcp: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stock_reasons = self._stock_reasons()
        self._fp8 = is_quantized_kv_cache(self.kv_cache_dtype)
        self.supports_quant_query_input = False  # queries stay as exact as they are; only the cache is fp8
        self._runs: dict = {}

    def _stock_reasons(self) -> list[str]:
        """Why this layer is left to vLLM's own kernels; empty where it is not."""
        latent, rope, head = self.kv_lora_rank, self.qk_rope_head_dim, self.qk_nope_head_dim + self.qk_rope_head_dim
        reasons = {
            f"latent width {latent}": latent % LATENT_STEP != 0 or latent > MAX_LATENT,
            f"rope width {rope}": rope % LATENT_STEP != 0 or not 0 < rope <= MAX_ROPE,
            f"head sizes {head} and {self.v_head_dim}": any(size % HEAD_SIZE_STEP or size > MAX_HEAD_SIZE for size in (head, self.v_head_dim)),
            f"a {self.kv_cache_dtype} cache": DTYPES.get(self.kv_cache_dtype, torch.get_default_dtype()) is not torch.get_default_dtype(),
        }
        return [reason for reason, holds in reasons.items() if holds]

    def reserve_workspace(self) -> None:
        """Called in the profiling run: memory that a step will need is seen if it is taken here."""
        if self.stock_reasons:
            super().reserve_workspace()
            return
        tokens = self._vllm_config.scheduler_config.max_num_batched_tokens
        torch.empty(tokens * self.num_heads * (self.v_head_dim + 2), dtype=torch.float32, device=current_platform.device_type)

    def do_kv_cache_update(self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, skip_scale=False) -> None:
        if self.stock_reasons:
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, skip_scale)
        elif kv_cache.numel():
            scale = k_scale if self._fp8 and not skip_scale else None
            repeat(
                self._runs, ("write",), (kv_c_normed, k_pe, kv_cache, slot_mapping, scale),
                lambda: run_write(
                    kv_c_normed[:, None], k_pe.view(-1, 1, self.qk_rope_head_dim), self._halves(kv_cache), slot_mapping.flatten(), scale, scale
                ),
            )  # fmt: skip

    def _halves(self, kv_cache: Tensor) -> layouts.CacheView:
        """The latent columns as K, the rope columns as V."""
        if self._fp8:
            kv_cache = kv_cache.view(current_platform.fp8_dtype())
        return layouts.view_unchecked(kv_cache[..., : self.kv_lora_rank], kv_cache[..., self.kv_lora_rank :], "latent")

    # -- decode ---------------------------------------------------------------------------------------------------

    def forward_mqa(self, q, kv_c_and_k_pe_cache, attn_metadata, layer) -> tuple[Tensor, Tensor | None]:
        if self.stock_reasons:
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        decode, cache = attn_metadata.decode, kv_c_and_k_pe_cache
        q, rope = q if isinstance(q, tuple) else (q, None)
        tokens, heads, _ = q.shape
        count = len(decode.seq_lens)
        # Without others in the batch all of it is decode, a block of non-causal draft tokens of any length too.
        longest = int(decode.max_query_len if attn_metadata.num_prefills else attn_metadata.max_query_len)
        problem = _latent_problem(heads, self.kv_lora_rank, self.qk_rope_head_dim, q.dtype, cache.dtype, cache.shape[1], attn_metadata.causal)
        warm.once((problem, rope is None), q.device, lambda: self._warm_decode(problem, q, rope, cache, layer))
        arch = detect(q.device)
        if envs.VLLM_BATCH_INVARIANT:
            plan = decode_plan(arch, problem, 1, longest, self._vllm_config.model_config.max_model_len, 1)
        else:
            plan = device_plan(arch, problem, count, longest, decode.max_seq_len)
        out = torch.zeros(tokens, heads, self.kv_lora_rank, dtype=q.dtype, device=q.device)  # padding stays 0
        lse = None
        if self.need_to_return_lse_for_decode or self.dcp_world_size > 1:
            lse = torch.full((heads, tokens), float("-inf"), dtype=torch.float32, device=q.device)
        params, arena = MlaParams(self.scale, attn_metadata.causal, None, layer._k_scale if self._fp8 else None), scratch(q.device)
        repeat(
            self._runs, (plan, arena),
            (q, rope, cache, out, lse, *params, decode.query_start_loc, decode.seq_lens, decode.block_table, count, longest),
            lambda: run_mla_decode(
                problem, params, q, rope, cache, out, lse, cu_seqlens_q=decode.query_start_loc, seq_lens=decode.seq_lens,
                block_table=decode.block_table, num_seqs=count, max_seqlen_q=longest, plan=plan, scratch=arena,
            ),
        )  # fmt: skip
        return out, None if lse is None else lse.t()

    def _warm_decode(self, problem: AttnProblem, q: Tensor, rope: Tensor | None, cache: Tensor, layer: Any) -> None:
        """Every decode batch that can come; for `warm.once`."""
        limits = warm.Limits.of(self._vllm_config, max_decode_query_len(self._vllm_config), cache.shape[1])
        for query, seq in planned(limits, detect(q.device), SimpleNamespace(paged=problem)):
            if max(query) <= limits.decode_threshold:
                known, rows = warm.batch(query, seq, cache.shape[1], q.device), warm.tokens(q, sum(query))
                decode = DecodeMetadata(known.block_table_tensor, known.seq_lens, None, known.query_start_loc, known.max_query_len, known.max_seq_len)
                metadata = SimpleNamespace(decode=decode, num_prefills=1, causal=problem.causal)
                self.forward_mqa(rows if rope is None else (rows, warm.tokens(rope, sum(query))), cache, metadata, layer)

    # -- prefill and extend ---------------------------------------------------------------------------------------

    def forward_mha(self, q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale=None) -> None:
        prefill = attn_metadata.prefill
        if self.stock_reasons or prefill.q_data_type != q.dtype:
            super().forward_mha(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale)
            return
        k, v = self._up_project(kv_c_normed, k_pe)
        out = output if output_scale is None else torch.empty(output.shape, dtype=q.dtype, device=q.device)
        rows = out.view(-1, self.num_heads, self.v_head_dim)
        context, starts = prefill.chunked_context, prefill.query_start_loc
        problem, params = _dense_problem(self.num_heads, q.shape[2], self.v_head_dim, q.dtype), AttnParams(self.scale)
        key = (problem, kv_c_and_k_pe_cache.dtype, kv_c_and_k_pe_cache.shape[1])
        warm.once(key, q.device, lambda: self._warm_prefill(q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, k_scale, out))
        longest, count = int(prefill.max_query_len), len(starts) - 1
        if context is None:
            run_prefill(problem, params, q, k, v, rows, None, cu_seqlens_q=starts, cu_seqlens_k=starts, num_seqs=count, max_seqlen_q=longest)
        else:
            self._extend(problem, params, q, k, v, rows, kv_c_and_k_pe_cache, prefill, k_scale, longest, count)
        if output_scale is not None:  # asked for by a prefill backend of vLLM's that could fuse it
            most = torch.finfo(output.dtype).max
            output.copy_((out.float() / output_scale).clamp_(-most, most).to(output.dtype))

    def _warm_prefill(self, q: Tensor, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, k_scale: Tensor, output: Tensor) -> None:
        """Prompts of any length, without and with context; for `warm.once`. The projection runs, on a few copies of one row."""
        count, device = 16, q.device  # tokens; the length that is claimed for them is what chooses
        known = warm.batch([count], [count], kv_cache.shape[1], device)
        queries, latent, rope = (warm.tokens(tensor, count) for tensor in (q, kv_c_normed, k_pe))
        context = None
        if self.dcp_world_size == 1:
            ends, zeros = known.query_start_loc, torch.zeros(1, dtype=torch.int32, device=device)
            chunk = SimpleNamespace(num_context_tokens=count, cu_seq_lens=ends, starts=zeros, request_slice=slice(0, 1), num_requests=1)
            workspace = torch.empty(count, kv_cache.shape[2], dtype=q.dtype, device=device)
            context = SimpleNamespace(row=ContextRow(zeros, known.seq_lens, ends), chunks=[chunk], workspace=workspace)
        for longest in (1 << i for i in range(self._vllm_config.scheduler_config.max_num_batched_tokens.bit_length())):
            for chunked_context in (None, context):
                prefill = SimpleNamespace(
                    q_data_type=q.dtype, chunked_context=chunked_context, query_start_loc=known.query_start_loc, max_query_len=longest,
                    block_table=known.block_table_tensor,
                )  # fmt: skip
                self.forward_mha(queries, latent, rope, kv_cache, SimpleNamespace(prefill=prefill), k_scale, warm.tokens(output, count))

    def _up_project(self, latent: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """[n, latent], [n, 1, rope] -> [n, H, nope + rope], [n, H, v]."""
        wanted = common._get_kv_b_proj_input_dtype(self.kv_b_proj, False)
        projected = self.kv_b_proj(latent if wanted is None else latent.to(wanted))[0].view(len(latent), self.num_heads, -1)
        k_nope, v = projected.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        return self._concat_k_nope_k_pe(k_nope, rope.view(-1, 1, self.qk_rope_head_dim)), v

    def _extend(self, problem, params, q, k, v, out, kv_cache, prefill, k_scale, longest, count) -> None:
        """A pass for each of vLLM's chunks of context, then one for the new tokens; see `paths.extend`."""
        context, starts = prefill.chunked_context, prefill.query_start_loc
        config, arena = prefill_row(detect(q.device), problem, longest), scratch(q.device)
        rows = tile_count(config, q.shape[0], count) * self.num_heads * config.config["BLOCK_M"]
        state_ml = arena.take("extend_ml", rows * 2, torch.float32)
        state_acc = arena.take("extend_acc", rows * self.v_head_dim, torch.float32)
        sequences: dict[str, Any] = {
            "cu_seqlens_q": starts, "num_seqs": count, "tiles": None, "num_tiles": 0, "key_starts": context.row.starts,
            "context_lens": context.row.lengths,
        }  # fmt: skip
        begin = 0
        for chunk in context.chunks:
            latent, rope = self._gather(chunk, context, kv_cache, prefill.block_table, k_scale)
            keys, values = self._up_project(latent, rope)
            end = begin + chunk.num_context_tokens
            run_pass(
                CHUNK, config, problem, params, q, keys, values, out, None, state_ml, state_acc, cu_seqlens_k=context.row.cu,
                chunk=(begin, end, UNLIMITED), **sequences,
            )  # fmt: skip
            begin = end
        run_pass(NEW_TOKENS, config, problem, params, q, k, v, out, None, state_ml, state_acc, cu_seqlens_k=starts, **sequences)

    def _gather(self, chunk, context, kv_cache, block_table, k_scale) -> tuple[Tensor, Tensor]:
        """The chunk's latent and rope rows, dequantised; under decode context parallelism those of all ranks, in order."""
        ranks = self.dcp_world_size
        count = chunk.num_context_tokens if ranks == 1 else chunk.num_local_context_tokens
        cu_rows = chunk.cu_seq_lens if ranks == 1 else chunk.padded_local_cu_seq_lens
        scale = k_scale if self._fp8 else None
        workspace, width = context.workspace, self.kv_lora_rank
        rows = workspace[:count, None]
        run_gather(
            rows[..., :width], rows[..., width:], self._halves(kv_cache), scale, scale, cu_rows=cu_rows, starts=chunk.starts,
            lengths=cu_rows[1:],  # no gaps to skip: any bound that is not too small will do
            block_table=block_table[chunk.request_slice], num_seqs=chunk.num_requests, chunk=(0, count), aligned=False,
        )  # fmt: skip
        if ranks == 1:
            return rows[:, 0, :width], rows[..., width:]
        first = workspace.shape[0] // (ranks + 1)  # vLLM lays the workspace out as [own rows | rows of all ranks]
        everyone = workspace[first : first + ranks * count]
        context.dcp_manager.kv_gather(everyone, workspace[:count])
        latent, rope = everyone[:, None].split([width, self.qk_rope_head_dim], dim=-1)
        latent, rope = common.reorg_kvcache(
            latent, rope, padded_local_chunk_seq_lens_lst=chunk.padded_local_seq_lens,
            local_context_lens_allranks=chunk.local_context_lens_allranks, local_starts=chunk.local_starts,
            sum_seq_len=chunk.num_context_tokens, max_seq_len=chunk.max_seq_len, toks=count,
        )  # fmt: skip
        return latent[:, 0], rope


@lru_cache(maxsize=256)
def _latent_problem(heads, latent, rope, dtype, kv_dtype, block_size, causal) -> AttnProblem:
    return AttnProblem(heads, 1, latent + rope, latent, dtype, kv_dtype, "latent", block_size, causal)


@lru_cache(maxsize=256)
def _dense_problem(heads, head_size, v_head_size, dtype) -> AttnProblem:
    return AttnProblem(heads, heads, head_size, v_head_size, dtype, dtype, "dense", 0, True)
