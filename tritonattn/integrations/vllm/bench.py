"""``python -m tritonattn.integrations.vllm.bench``: a whole model in vLLM with this package's attention and with vLLM's own.

Models are random ones of a given shape, or a checkpoint (`--model DIR`). `--check` compares greedy tokens with transformers in float32, by
regret (how much likelier its best token was than the one vLLM took) and by the difference of log-probabilities: equal tokens flip on near
ties. `--first` times the very first requests, which wait for whatever is compiled that late. `--loads` times requests that are all there at the
start; weights do not matter there. `--host` also tells the host's time in building metadata and in the calls of the layers, per step: what bounds
small steps without graphs. Each variant runs in a process of its own, and each prints one line of JSON per result.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

COMMON = {
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "hidden_act": "silu", "rope_theta": 10000.0,
    "attention_bias": False, "initializer_range": 0.06, "max_position_embeddings": 131072,
}  # fmt: skip
LLAMA = {**COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "mlp_bias": False}
DEEPSEEK = {
    **COMMON, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "rms_norm_eps": 1e-6, "q_lora_rank": None,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "moe_layer_freq": 1, "moe_intermediate_size": 128,
}  # fmt: skip


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, size: int, vocab: int) -> dict[str, Any]:
    return {
        **LLAMA, "hidden_size": hidden, "intermediate_size": max(hidden, 512), "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": size, "vocab_size": vocab,
    }  # fmt: skip


def _deepseek(hidden: int, layers: int, heads: int, vocab: int) -> dict[str, Any]:
    return {
        **DEEPSEEK, "hidden_size": hidden, "intermediate_size": max(hidden, 512), "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "first_k_dense_replace": layers, "vocab_size": vocab,
    }  # fmt: skip


SHAPES = {
    "llama": _llama(256, 2, 8, 2, 64, 512),
    "qwen3-235b": _llama(1024, 4, 64, 4, 128, 32000),  # its attention
    "deepseek": _deepseek(256, 2, 16, 512),
    "deepseek-v3": _deepseek(1024, 4, 128, 32000),  # its attention
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tritonattn.integrations.vllm.bench", description=str(__doc__).split("\n\n")[0])
    parser.add_argument("shape", choices=SHAPES, help="a random model of this shape; with --model, which kind of attention it has")
    parser.add_argument("--model", default="", help="a checkpoint's folder instead")
    parser.add_argument("--prompts", default="", help="a JSON file with a list of token lists, for --check")
    parser.add_argument("--variants", default="ours,stock", help="of ours and stock; both by default")
    parser.add_argument("--layout", default="auto", choices=["auto", "packed", "preshuffled"])
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--eager", action="store_true", help="without graphs")
    parser.add_argument("--check", action="store_true", help="compare with transformers")
    parser.add_argument("--first", action="store_true", help="time the first requests of a server that warmed up as vLLM does by default")
    parser.add_argument("--loads", default="", help="in,out[,requests];... as in 2048,16;128,256;65536,64,8")
    parser.add_argument("--batched-tokens", type=int, default=8192, help="per step; contexts longer than that come in chunks")
    parser.add_argument("--memory", type=float, default=0.5, help="gpu_memory_utilization")
    parser.add_argument("--profile", action="store_true", help="share of each kernel in the last run of each load")
    parser.add_argument("--host", action="store_true", help="host time of the attention backend in the last run of each load; only with --eager")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    variants = args.variants.split(",")
    if args.host and not args.eager:
        parser.error("--host needs --eager: layers are not called where a graph is replayed")
    if len(variants) > 1:
        return _each(list(sys.argv[1:] if argv is None else argv), variants)
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TRITONATTN_VLLM_KV_LAYOUT": args.layout}
    if variants == ["stock"]:
        os.environ["VLLM_PLUGINS"] = "none"
    run(args, variants[0])
    return 0


def _each(argv: list[str], variants: list[str]) -> int:
    """One process per variant, then ours against stock."""
    results: dict[tuple[str, str], float] = {}
    host: dict[tuple[str, str], float] = {}
    for variant in variants:
        command = [sys.executable, "-m", "tritonattn.integrations.vllm.bench", *argv, "--variants", variant]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        print(done.stdout, end="", flush=True)
        if done.returncode:
            return done.returncode
        for line in filter(lambda text: text.startswith("{"), done.stdout.splitlines()):
            result = json.loads(line)
            if "tokens_per_second" in result:
                results[result["load"], variant] = result["tokens_per_second"]
            for kind, times in result.get("host_us", {}).items():
                host[f"{result['load']}, {kind}", variant] = times["both"]
    for load in dict.fromkeys(load for load, _ in results):
        if (load, "stock") in results and (load, "ours") in results:
            print(f"{load}: {results[load, 'ours'] / results[load, 'stock']:.2f} times the output tokens per second of stock")
    for steps in dict.fromkeys(steps for steps, _ in host):
        if (steps, "stock") in host and (steps, "ours") in host:
            print(f"{steps}: {host[steps, 'ours'] / host[steps, 'stock']:.2f} times the host time of stock in attention")
    return 0


def run(args: argparse.Namespace, variant: str) -> None:
    """One variant, in this process."""
    import torch
    from vllm import LLM, SamplingParams

    def say(**result: Any) -> None:
        print(json.dumps({"variant": variant, "shape": args.shape, "graphs": not args.eager, "kv": args.kv_cache_dtype, **result}), flush=True)

    loads = [[int(part) for part in load.split(",")] for load in filter(None, args.loads.split(";"))]
    folder = Path(args.model) if args.model else _make_model(args.shape, args.check)
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    mla = args.shape.startswith("deepseek")
    attention = {"backend": "TRITON_MLA", "mla_prefill_backend": "CUSTOM"} if mla else {"backend": "TRITON_ATTN"}
    if mla and variant == "stock" and not _custom_prefill_for_stock():
        attention.pop("mla_prefill_backend")
    graphs = {} if args.eager else {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
    begin = time.perf_counter()
    # Native ops of vLLM in both variants, so that it runs with and without its compiled extension.
    llm = LLM(
        model=str(folder), skip_tokenizer_init=True, load_format="auto" if args.check or args.model else "dummy", dtype="bfloat16",
        enforce_eager=args.eager, max_model_len=max([4096, *(n + out for n, out, *_ in loads)]), max_num_seqs=64,
        max_num_batched_tokens=args.batched_tokens, gpu_memory_utilization=args.memory, enable_prefix_caching=False, kv_cache_dtype=args.kv_cache_dtype,
        compilation_config={"mode": 0, "custom_ops": ["none"]} | graphs,
        kernel_config={"ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}, "enable_jit_warmup": args.first},
        attention_config=attention,
    )  # fmt: skip
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from tritonattn.integrations.vllm.host_time import HostTime

    used = AttentionBackendEnum[attention["backend"]].get_class().__module__
    if used.startswith("tritonattn.") != (variant == "ours"):
        raise RuntimeError(f"vLLM uses {used} for {variant}")
    say(attention=used, layout=args.layout, ready_after=round(time.perf_counter() - begin, 1))
    rnd = random.Random(0)

    def tokens(count: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": [rnd.randrange(3, vocab) for _ in range(count)]}

    for length in (5, 5, 700, 700) if args.first else ():
        begin = time.perf_counter()
        llm.generate([tokens(length)], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False), use_tqdm=False)
        say(request=length, seconds=round(time.perf_counter() - begin, 3))
    if args.check:
        prompts = json.loads(Path(args.prompts).read_text()) if args.prompts else [tokens(n)["prompt_token_ids"] for n in (5, 17, 130, 700)]
        params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, detokenize=False, logprobs=1)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        chosen = [list(output.outputs[0].token_ids) for output in outputs]
        logprobs = [[at[token].logprob for at, token in zip(o.outputs[0].logprobs, c, strict=True)] for o, c in zip(outputs, chosen, strict=True)]
        for prompt, result in zip(prompts, compare(folder, prompts, chosen, logprobs), strict=True):
            say(prompt=len(prompt), **result)
    for load in loads:
        length, out, *rest = load
        count = rest[0] if rest else 64
        params = SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True, detokenize=False)
        for repeat in range(args.repeats):
            prompts = [tokens(length) for _ in range(count)]
            torch.cuda.synchronize()
            begin = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begin
            say(load=f"{count} x {length} in, {out} out", repeat=repeat, seconds=round(seconds, 4), tokens_per_second=round(count * out / seconds, 1))
        if args.host:
            clock = HostTime(AttentionBackendEnum[attention["backend"]].get_class())
            llm.generate([tokens(length) for _ in range(count)], params, use_tqdm=False)
            say(load=f"{count} x {length} in, {out} out", host_us=clock.report())
            clock.stop()
        if args.profile:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                llm.generate([tokens(length) for _ in range(count)], params, use_tqdm=False)
                torch.cuda.synchronize()
            times: Counter[str] = Counter()
            for event in profile.key_averages():
                times[event.key[:60]] += event.self_device_time_total / 1e3  # what differs later in the name are forms of one kernel
            longest = {name: round(spent, 2) for name, spent in times.most_common(16)}
            say(load=f"{count} x {length} in, {out} out", milliseconds=round(times.total(), 2), kernels=longest)


def _custom_prefill_for_stock() -> bool:
    """A prefill backend of the caller's own, as a dotted path, where vLLM's need an extension that is not there."""
    path = os.environ.get("TRITONATTN_BENCH_STOCK_PREFILL")
    if path:
        from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend

        register_mla_prefill_backend(MLAPrefillBackendEnum.CUSTOM, path)
    return bool(path)


def _make_model(shape: str, weights: bool) -> Path:
    """A folder with the config and, with `weights`, a random checkpoint, the same every time."""
    folder = Path(tempfile.gettempdir()) / "tritonattn-vllm-bench" / shape
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps(SHAPES[shape])
    (folder / "config.json").write_text(config)
    if weights and not (folder / "model.safetensors").exists():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:  # a second process may look for the file at any moment
            AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).save_pretrained(made)
            (Path(made) / "model.safetensors").replace(folder / "model.safetensors")
    return folder


def compare(folder: Path, prompts: list[list[int]], chosen: list[list[int]], logprobs: list[list[float]]) -> list[dict[str, float]]:
    """Tokens and log-probabilities against transformers in float32, every step given the tokens that vLLM had chosen."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").to(device).eval()
    results = []
    with torch.no_grad():
        for prompt, tokens, theirs in zip(prompts, chosen, logprobs, strict=True):
            scores = model(torch.tensor([prompt + tokens], device=device)).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            own = scores.gather(1, torch.tensor(tokens, device=device)[:, None])[:, 0]
            results.append({
                "regret": round(float((scores.max(-1).values - own).max()), 4),
                "difference": round(float((own - torch.tensor(theirs, device=device)).abs().max()), 4),
                "equal": round(float((scores.argmax(-1) == torch.tensor(tokens, device=device)).float().mean()), 3),
            })  # fmt: skip
    return results


if __name__ == "__main__":
    sys.exit(main())
