"""A Llama in plain PyTorch over flat tokens [T]; everything but attention."""
from __future__ import annotations

import torch
import torch.nn.functional as F

from tritonattn.demo.attention import Attention
from tritonattn.demo.weights import Config


class Llama:
    def __init__(self, config: Config, weights: dict[str, torch.Tensor]):
        self.config = config
        self._weights = weights
        half = torch.arange(0, config.head_size, 2, device=self.device, dtype=torch.float32)
        self._frequencies = config.rope_base ** (-half / config.head_size)

    @property
    def dtype(self) -> torch.dtype:
        return self._weights["token_embd.weight"].dtype

    @property
    def device(self) -> torch.device:
        return self._weights["token_embd.weight"].device

    @torch.inference_mode()
    def logits(self, attention: Attention, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """float32 logits [len(rows), vocabulary] at ``rows`` of the flat ``tokens`` [T] with ``positions`` [T]."""
        config, eps = self.config, self.config.norm_eps
        angles = positions[:, None, None] * self._frequencies
        rotation = angles.cos(), angles.sin()
        x = F.embedding(tokens, self._weights["token_embd.weight"])
        for layer in range(config.layers):
            w = {name: self._weights[f"blk.{layer}.{name}.weight"] for name in _BLOCK}
            h = F.rms_norm(x, (config.hidden,), w["attn_norm"], eps)
            q = rotate(F.linear(h, w["attn_q"]).unflatten(-1, (config.q_heads, config.head_size)), rotation)
            k = rotate(F.linear(h, w["attn_k"]).unflatten(-1, (config.kv_heads, config.head_size)), rotation)
            v = F.linear(h, w["attn_v"]).unflatten(-1, (config.kv_heads, config.head_size))
            x = x + F.linear(attention.attend(layer, q, k, v).flatten(1), w["attn_output"])
            h = F.rms_norm(x, (config.hidden,), w["ffn_norm"], eps)
            x = x + F.linear(F.silu(F.linear(h, w["ffn_gate"])) * F.linear(h, w["ffn_up"]), w["ffn_down"])
        last = F.rms_norm(x[rows], (config.hidden,), self._weights["output_norm.weight"], eps)
        # The embedding is the output matrix too, unless the file has one of its own.
        head = self._weights.get("output.weight", self._weights["token_embd.weight"])
        return F.linear(last, head).float()


_BLOCK = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


def rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary embedding of neighbouring pairs, the order in which GGUF stores Llama's Q and K rows. x: [T, heads, D]."""
    cos, sin = rotation
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)
