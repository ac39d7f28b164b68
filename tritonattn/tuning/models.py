"""Attention shapes of models in the field, as one GPU sees them before tensor parallelism. Source: each model's config.json."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Model:
    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int = 0  # 0: head_size
    window: int = 0  # sliding window of its local layers, in tokens; 0: none
    softcap: float = 0.0
    sinks: bool = False
    latent: int = 0  # MLA: width of the latent, whose rope part makes up the rest of a cached row
    rope: int = 0

    @property
    def is_mla(self) -> bool:
        return self.latent > 0

    def shared(self, tensor_parallel: int) -> Model:
        """What one of so many GPUs has; KV heads are replicated where there are fewer of them. ValueError where it cannot be divided."""
        kv_heads = max(1, self.num_kv_heads // max(1, tensor_parallel))
        if tensor_parallel < 1 or self.num_heads % tensor_parallel or (self.num_heads // tensor_parallel) % kv_heads:
            heads = f"{self.num_heads} heads and {self.num_kv_heads} KV heads"
            raise ValueError(f"tensor_parallel must divide {heads}, got {tensor_parallel}")
        return replace(self, num_heads=self.num_heads // tensor_parallel, num_kv_heads=kv_heads)


MODELS = {
    "llama-3-8b": Model(32, 8, 128),
    "llama-3-70b": Model(64, 8, 128),
    "qwen3-30b": Model(32, 4, 128),
    "qwen3-235b": Model(64, 4, 128),
    "qwen3-next": Model(16, 2, 256),
    "gpt-oss-120b": Model(64, 8, 64, window=128, sinks=True),
    "gemma-2-9b": Model(16, 8, 256, window=4096, softcap=50.0),
    "gemma-3-27b": Model(32, 16, 128, window=1024),
    "phi-3-mini": Model(32, 32, 96, window=2047),
    "phi-2": Model(32, 32, 80),
    "deepseek-r1": Model(128, 128, 192, 128, latent=512, rope=64),
    "kimi-k2": Model(64, 64, 192, 128, latent=512, rope=64),
    "minicpm3": Model(40, 40, 96, 64, latent=256, rope=32),
}


def model(name: str) -> Model:
    """ValueError that lists the known names."""
    if name not in MODELS:
        raise ValueError(f"model must be one of {', '.join(MODELS)}; got {name!r}")
    return MODELS[name]


def parse_shape(text: str) -> Model:
    """ "64/4x128" or "16/16x192/128": query heads / KV heads x head size [/ head size of V]."""
    match = re.fullmatch(r"(\d{1,5})/(\d{1,5})x(\d{1,5})(?:/(\d{1,5}))?", text)
    numbers = [int(number) for number in match.groups("0")] if match else [0]
    if match is None or min(numbers[:3]) < 1 or numbers[0] % numbers[1]:
        raise ValueError(f"--shape must look like 64/4x128 or 16/16x192/128, query heads a multiple of KV heads, got {text!r}")
    heads, kv_heads, head_size, v_head_size = numbers
    return Model(heads, kv_heads, head_size, v_head_size)


def named_shape(shape: str | None, named: str | None) -> Model | None:
    """What --shape or --model says; None without either."""
    if shape and named:
        raise ValueError(f"--shape and --model exclude each other, got {shape} and {named}")
    return parse_shape(shape) if shape else model(named) if named else None
