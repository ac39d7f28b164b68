"""The backend in the TRITON_ATTN slot: what it takes, its metadata, its layers.

It derives from vLLM's own, which stays behind it for the features that only that one has, on caches in its format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
import vllm.envs as envs
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, max_decode_query_len
from vllm.v1.attention.backends import triton_attn as stock
from vllm.v1.kv_cache_interface import is_quantized_kv_cache
from vllm.v1.kv_cache_layout import KVCacheLayout

from tritonattn.checks.reasons import HEAD_SIZE_STEP, MAX_HEAD_SIZE, MIN_HEAD_SIZE
from tritonattn.integrations.vllm import layout, warm
from tritonattn.integrations.vllm.batch import CHUNK_TOKENS, Batch, BatchPlan, Kind, Planner, write
from tritonattn.layouts import CacheView
from tritonattn.paths.prefill import run_prefill
from tritonattn.problem import AttnParams, AttnProblem
from tritonattn.tuning.arch import detect
from tritonattn.warmup import planned

ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class Metadata(stock.TritonAttentionMetadata):
    batch: Batch | None = None
    warm: Callable[..., None] | None = None
    """Compiles what layers of a kind can reach; see `MetadataBuilder.warm`."""


class MetadataBuilder(stock.TritonAttentionMetadataBuilder):
    # The three paths launch different grids; batches of decodes alone keep theirs.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.supports_draft_decode_metadata_update = False  # a plan is host work
        self._threshold = max_decode_query_len(vllm_config)
        self._limits = warm.Limits.of(vllm_config, self._threshold, self.block_size)
        self._planners: dict[Kind, Planner] = {}
        layers = vllm_config.compilation_config.static_forward_context
        for impl in {id(impl): impl for name in layer_names if isinstance(impl := getattr(layers.get(name), "impl", None), Impl)}.values():
            if not impl.stock_reasons and impl.attn_type not in ENCODERS:
                kind = impl.kind(vllm_config.model_config.dtype, impl.attn_type != AttentionType.ENCODER_DECODER, False)
                if kind not in self._planners:
                    self._planners[kind] = self._planner(kind, impl)

    def _planner(self, kind: Kind, impl: Impl) -> Planner:
        return Planner(kind, impl, torch.device(self.device), self.block_size, self._threshold, envs.VLLM_BATCH_INVARIANT)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> Metadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        batch = Batch(common_attn_metadata, self._threshold, self._planners, self._planner)
        extended = Metadata.__new__(Metadata)  # its constructor takes the time of a plan
        extended.__dict__.update(vars(metadata), batch=batch, warm=self.warm)
        return extended

    def warm(self, kind: Kind, impl: Impl, params: AttnParams, q: Tensor, k: Tensor | None, v: Tensor | None, cache: CacheView, out: Tensor) -> None:
        """Every batch that a layer of this kind can meet, on its own tensors. For `warm.once`: with launches turned into compilations."""
        planner = self._planner(kind, impl)  # the other's buffers hold the plan of the current step
        for query, seq in planned(self._limits, detect(q.device), planner):
            batch = Batch(warm.batch(query, seq, self.block_size, q.device), self._threshold, {kind: planner}, self._planner)
            q_rows, out_rows = warm.tokens(q, sum(query)), warm.tokens(out, sum(query))
            k_rows, v_rows = (None if tensor is None else warm.tokens(tensor, sum(query)) for tensor in (k, v))
            planner.launch(batch.plan(kind, impl), batch, params, q_rows, k_rows, v_rows, cache, out_rows, warm.Blank(q.device))


class TritonAttentionBackend(stock.TritonAttentionBackend):
    # fp8_e5m2 is refused: vLLM's own TRITON_ATTN takes the name and stores e4m3.
    supported_kv_cache_dtypes = [  # noqa: RUF012
        name for name in stock.TritonAttentionBackend.supported_kv_cache_dtypes if name != "fp8_e5m2"
    ]

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...] | None:
        if layout.chosen() == "packed":
            return None
        return KVCacheLayout.LBHNC, KVCacheLayout.BLHNC, KVCacheLayout.LHBNC, KVCacheLayout.BHLNC

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # grids follow from the query lengths on the host

    @classmethod
    def supports_combination(
        cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix, device_capability
    ) -> str | None:
        if kv_cache_dtype == "fp8_e5m2":
            return "fp8_e5m2: vLLM's TRITON_ATTN would store e4m3 under that name; say fp8 or fp8_e4m3"
        return None


class Impl(stock.TritonAttentionImpl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.supports_quant_query_input = False  # queries stay as exact as they are; only the cache is fp8
        self.stock_reasons = self._stock_reasons()
        self.kv_layout = "packed" if self.stock_reasons else layout.chosen()
        self._fp8 = is_quantized_kv_cache(self.kv_cache_dtype)
        self._slopes: Tensor | None = None
        self._seen: Tensor | None = None
        self._view: CacheView | None = None
        self._kind: tuple[tuple, Kind] | None = None
        self._inverse: tuple[Tensor, tuple[Tensor, Tensor]] | None = None
        softcap = float(self.logits_soft_cap)
        self.params = AttnParams(self.scale, True, self.sliding_window, softcap, None, self.sinks)

    def _stock_reasons(self) -> list[str]:
        """Why this layer is left to vLLM's own kernels; empty where it is not."""
        size = self.head_size
        config = get_current_vllm_config_or_none()
        model = None if config is None else config.model_config
        reasons = {
            "scales per token and head": self._is_per_token_head_quant,
            "chunks with lookback": self.chunk_lookback > -1,
            "ALiBi of square roots": self.use_alibi_sqrt,
            "bidirectional ranges of multimodal tokens": getattr(model, "is_mm_prefix_lm", False) is True,
            "R-SWA": isinstance(getattr(model, "rswa_window", None), int),
            f"head size {size}": size % HEAD_SIZE_STEP != 0 or not MIN_HEAD_SIZE <= size <= MAX_HEAD_SIZE,
            f"a {self.kv_cache_dtype} cache": DTYPES.get(self.kv_cache_dtype, torch.get_default_dtype()) is not torch.get_default_dtype(),
        }
        return [reason for reason, holds in reasons.items() if holds]

    def _is_stock(self, layer: Any) -> bool:
        return bool(self.stock_reasons) or hasattr(layer, "sink_len")  # StaticSinkAttention writes the cache itself, in vLLM's format

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return super().fused_output_quant_supported(quant_key)  # 8-bit results with a scale per tensor, which stays as it is

    def fused_rope_kvcache_supported(self) -> bool:
        return bool(self.stock_reasons) and super().fused_rope_kvcache_supported()

    def slopes(self, device: torch.device) -> Tensor | None:
        """ALiBi slopes on the device."""
        if self._slopes is None and self.alibi_slopes is not None:
            self._slopes = self.alibi_slopes.to(device)
        return self._slopes

    def _of_output(self, output_scale: Tensor, v_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """`AttnParams.out_inverse`. Both scales stay what they are at the first step."""
        if self._inverse is None or self._inverse[0] is not output_scale:
            inverse = output_scale.float().reciprocal().reshape(1)
            self._inverse = output_scale, (inverse, inverse if v_scale is None else inverse * v_scale.float())
        return self._inverse[1]

    def _cache(self, kv_cache: Tensor) -> CacheView:
        if self._view is None or self._seen is not kv_cache:
            typed = kv_cache.view(self.fp8_dtype) if self._fp8 else kv_cache
            self._seen, self._view = kv_cache, layout.view(typed, self.head_size, self.kv_layout)
        return self._view

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping) -> None:
        if self.attn_type in ENCODERS:
            return
        if self._is_stock(layer):
            if self.kv_layout != "packed":
                raise NotImplementedError(f"{type(layer).__name__} writes vLLM's cache format; set {layout.SETTING}=packed")
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        k_scale, v_scale = (layer._k_scale, layer._v_scale) if self._fp8 else (None, None)
        write(key, value, self._cache(kv_cache), slot_mapping, k_scale, v_scale)

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ) -> Tensor:
        if attn_metadata is None:  # the profiling run: memory that a step will need is seen if it is taken here
            torch.empty(self._scratch_bytes(query), dtype=torch.uint8, device=query.device)
            return output.fill_(0)
        causal = attn_metadata.causal
        if self._is_stock(layer) or isinstance(causal, Tensor) or attn_metadata.mm_prefix_range is not None:
            if self.kv_layout != "packed":
                raise NotImplementedError(f"causality per request and multimodal ranges are vLLM's own kernels; set {layout.SETTING}=packed")
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        if output_block_scale is not None:
            raise NotImplementedError("fused output quantization with a scale per block is not supported")
        params = self.params._replace(causal=causal, alibi_slopes=self.slopes(query.device))
        if output_scale is not None:
            params = params._replace(out_inverse=self._of_output(output_scale, layer._v_scale if self._fp8 else None))
        if self.attn_type in ENCODERS:
            return self._encode(params.dense._replace(causal=False), query, key, value, attn_metadata, output)
        if self._fp8:
            params = params._replace(k_descale=layer._k_scale, v_descale=layer._v_scale)
        cache = self._cache(kv_cache)
        plan = self._plan(attn_metadata.batch, query.dtype, causal, key is None or value is None)
        kind = plan.planner.kind
        warm.once((kind, output.dtype), query.device, lambda: attn_metadata.warm(kind, self, params, query, key, value, cache, output))
        plan.planner.launch(plan, attn_metadata.batch, params, query, key, value, cache, output)
        return output

    def kind(self, dtype: torch.dtype, causal: bool, without_keys: bool) -> Kind:
        """What this layer needs of a plan, for queries of this dtype."""
        cached_only = without_keys or self.kv_sharing_target_layer_name is not None or self.attn_type == AttentionType.ENCODER_DECODER
        return Kind(
            self.num_heads, self.num_kv_heads, self.head_size, dtype, "hnd" if self.kv_layout == "packed" else "preshuffled",
            self.fp8_dtype if self._fp8 else dtype, self.sliding_window, self.params.softcap, self.alibi_slopes is not None,
            self.sinks is not None, causal, cached_only,
        )  # fmt: skip

    def _plan(self, batch: Batch, dtype: torch.dtype, causal: bool, without_keys: bool) -> BatchPlan:
        key = (dtype, causal, without_keys)
        if self._kind is None or self._kind[0] != key:
            self._kind = (key, self.kind(*key))
        return batch.plan(self._kind[1], self)

    def _encode(self, params: AttnParams, query: Tensor, key: Tensor, value: Tensor, attn_metadata: Metadata, output: Tensor) -> Tensor:
        """Attention over the tokens at hand, no cache."""
        problem = _dense_problem(self.num_heads, self.num_kv_heads, self.head_size, query.dtype, params.window_size, params.softcap > 0,
                                 params.alibi_slopes is not None, params.sinks is not None)  # fmt: skip
        starts = attn_metadata.query_start_loc
        run_prefill(
            problem, params, query, key, value, output, None, cu_seqlens_q=starts, cu_seqlens_k=starts, num_seqs=len(starts) - 1,
            max_seqlen_q=int(attn_metadata.max_query_len),
        )  # fmt: skip
        return output

    def _scratch_bytes(self, query: Tensor) -> int:
        """About what an extend batch of so many tokens takes: the gathered keys and values, and the float32 state of the queries."""
        gathered = 2 * CHUNK_TOKENS * self.num_kv_heads * self.head_size * query.element_size()
        return gathered + query.shape[0] * self.num_heads * (self.head_size + 2) * 4


@lru_cache(maxsize=256)
def _dense_problem(heads, kv_heads, size, dtype, window_size, softcap, alibi, sinks) -> AttnProblem:
    return AttnProblem(heads, kv_heads, size, size, dtype, dtype, "dense", 0, False, window_size != (-1, -1), softcap, alibi, sinks)
