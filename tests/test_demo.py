"""The demo's parts, and the whole command on a model small enough for the interpreter."""
from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

gguf = pytest.importorskip("gguf")
pytest.importorskip("tokenizers")

from tritonattn.cli import main  # noqa: E402
from tritonattn.demo import PROMPTS, attention, choose_device, engine, session  # noqa: E402
from tritonattn.demo.llama import Llama  # noqa: E402
from tritonattn.demo.scheduler import Blocks, Request, Scheduler, Slice  # noqa: E402
from tritonattn.demo.weights import Gguf, default_path  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A Llama of two layers with random weights, over single bytes."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    hidden, inner, q_heads, kv_heads, layers = 96, 64, 3, 1, 2
    byte_tokens = [chr(c) for c in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_tokens, "he"]
    random = torch.Generator().manual_seed(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_embedding_length(hidden)
    writer.add_head_count(q_heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e"])
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    shapes = {"attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_q": (hidden, hidden), "attn_k": (kv_heads * 32, hidden),
              "attn_v": (kv_heads * 32, hidden), "attn_output": (hidden, hidden), "ffn_gate": (inner, hidden),
              "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}
    named = {f"blk.{layer}.{name}.weight": shape for layer in range(layers) for name, shape in shapes.items()}
    for name, shape in {"token_embd.weight": (len(tokens), hidden), "output_norm.weight": (hidden,), **named}.items():
        scale = 1.0 if "norm" in name else 3.0 / math.sqrt(shape[-1])
        values = torch.ones(shape) if "norm" in name else torch.randn(shape, generator=random) * scale
        writer.add_tensor(name, values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def smollm() -> Gguf:
    try:
        return Gguf(default_path())
    except FileNotFoundError as error:
        pytest.skip(str(error))


# -- scheduling ---------------------------------------------------------------------------------------------------


@given(st.data())
def test_every_token_is_computed_once_in_its_own_slot(data):
    block_size, budget = data.draw(st.integers(1, 5), "block size"), data.draw(st.integers(1, 9), "budget")
    requests = [Request(index, list(range(data.draw(st.integers(1, 20), "prompt"))), data.draw(st.integers(1, 6), "max_tokens"),
                        data.draw(st.integers(0, 9), "arrival")) for index in range(data.draw(st.integers(0, 5), "requests"))]
    least = max([-(-request.most_tokens // block_size) for request in requests], default=0)
    blocks = Blocks(least + data.draw(st.integers(0, 9), "spare blocks"), block_size)
    scheduler = Scheduler(requests, blocks, budget)
    while not scheduler.done:
        number = scheduler.step
        slices = scheduler.next()
        assert sum(piece.count for piece in slices) <= budget
        held = [block for request in requests for block in request.blocks]
        assert len(held) == len(set(held)) == blocks.used
        for piece in slices:
            assert piece.request.arrival <= number
            assert piece.start == piece.request.computed
            assert piece.stop <= len(piece.request.blocks) * block_size
        scheduler.finish_step(slices, [7] * sum(piece.samples for piece in slices), end=-1)
    assert blocks.used == 0
    for request in requests:
        assert request.finished
        assert len(request.output) == request.max_tokens
        assert request.computed == request.most_tokens


def test_the_end_token_ends_a_request():
    request = Request(0, [1, 2], max_tokens=9)
    scheduler = Scheduler([request], Blocks(9, 16), 32)
    scheduler.finish_step(scheduler.next(), [5], end=6)
    assert not scheduler.done
    scheduler.finish_step(scheduler.next(), [6], end=6)
    assert scheduler.done
    assert request.output == [5, 6]


def test_a_request_larger_than_the_pool_is_refused():
    with pytest.raises(ValueError, match="request 0 needs 3 cache blocks, the pool has 2"):
        Scheduler([Request(0, [1] * 33, max_tokens=1)], Blocks(2, 16), 32)


def test_the_default_prompts_mix_all_three_paths_in_one_step(smollm):
    chat = smollm.chat()
    requests = [Request(index, chat.encode(prompt), 6, session.arrival(index)) for index, prompt in enumerate(PROMPTS)]
    scheduler = Scheduler(requests, Blocks(64, session.BLOCK_SIZE), session.BUDGET)
    mixed = 0
    while not scheduler.done:
        slices = scheduler.next()
        mixed += {(piece.start > 0, piece.count > 1) for piece in slices} == {(True, False), (True, True), (False, True)}
        scheduler.finish_step(slices, [7] * sum(piece.samples for piece in slices), end=-1)
    assert mixed >= 2


# -- model --------------------------------------------------------------------------------------------------------


def greedy(model: Llama, prompt: list[int], count: int, end: int) -> list[int]:
    request = Request(0, prompt, count)
    for _ in engine.serve(model, attention.PlainAttention(), Scheduler([request], Blocks(99, 16), 999), end):
        pass
    return request.output


def test_the_chat_format_and_the_tokenizer(smollm):
    chat = smollm.chat()
    ids = chat.encode("What is 12 + 30?")
    assert chat.decode(ids) == ("system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\n"
                                "user\nWhat is 12 + 30?\nassistant\n")
    assert ids[:3] == [1, 9690, 198]  # <|im_start|> system \n
    assert ids.count(2) == 2  # <|im_end|>
    pieces = [chat.decode([token]) for token in ids]
    assert pieces[pieces.index("1") + 1] == "2"  # each digit is a token of its own


def test_the_model_knows_the_capital_of_france(smollm):
    chat = smollm.chat()
    model = Llama(smollm.config, smollm.weights(torch.float32, torch.device("cpu")))
    assert chat.decode(greedy(model, chat.encode(PROMPTS[0]), 8, chat.end)) == "The capital of France is Paris."


def test_chunks_and_company_change_no_token_of_the_plain_run(tiny):
    file = Gguf(tiny)
    model, chat = Llama(file.config, file.weights(torch.float32, torch.device("cpu"))), file.chat()
    requests = [Request(index, chat.encode(text), 5, arrival=index) for index, text in enumerate(("hello", "there, he said", "a"))]
    for _ in engine.serve(model, attention.PlainAttention(), Scheduler(requests, Blocks(99, 4), 7), chat.end):
        pass
    assert [request.output for request in requests] == [greedy(model, request.prompt, 5, chat.end) for request in requests]


# -- the check ----------------------------------------------------------------------------------------------------


def test_the_check_finds_one_wrong_token(tiny):
    file = Gguf(tiny)
    model, chat = Llama(file.config, file.weights(torch.float32, torch.device("cpu"))), file.chat()
    prompt = chat.encode("hello")
    served = Request(0, prompt, 5, output=greedy(model, prompt, 5, chat.end))
    good = engine.check(model, attention.PlainAttention(), served, tie=0.0)
    assert good.passed
    assert good.equal == len(served.output)
    wrong = replace(served, output=[*served.output[:2], (served.output[2] + 1) % 200])
    bad = engine.check(model, attention.PlainAttention(), wrong, tie=0.0)
    assert not bad.passed
    assert [gap > 0 for gap in bad.gaps] == [False, False, True]
    assert engine.Verdict(bad.gaps, tie=bad.gaps[2]).passed
    assert not engine.Verdict([], tie=0.0).passed


# -- the command --------------------------------------------------------------------------------------------------

WORDS = ["demo", "--prompt", "hello there, this is he", "--prompt", "what", "--prompt", "a longer one, to come in chunks", "--max-tokens", "3"]


def run(tiny: Path, *more: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "tritonattn", *WORDS, "--model", str(tiny), *more], cwd=ROOT, capture_output=True,
                          text=True, env=os.environ | env)


def test_the_command_serves_and_checks(tiny):
    done = run(tiny, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"]
    assert [request["equal_tokens"] for request in report["requests"]] == [len(request["tokens"]) for request in report["requests"]]
    taken = [(part["path"], part["context"] > 0, part["new_tokens"] > 1) for step in report["steps"] for part in step["requests"]]
    assert set(taken) == {("prefill", False, True), ("extend", True, True), ("decode", True, False)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU does")
def test_it_starts_the_interpreter_itself_and_shows_its_work(tiny):
    done = run(tiny, "--device", "cpu", TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr
    for word in ("prefill", "extend", "decode", "passed", "tokens/s", "hello there"):
        assert word in done.stdout


@pytest.mark.skipif(torch.cuda.is_available() or not shutil.which("cc"), reason="the simulator runs CPU tensors and is built with cc")
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_machine_code_for_instinct_gives_the_same_tokens(tiny, arch):
    done = run(tiny, "--device", f"sim:{arch}", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"]
    assert report["device"] == f"CPU, simulated {arch}"


def test_broken_attention_ends_in_exit_code_1(tiny, monkeypatch, capsys):
    class Broken(attention.PlainAttention):
        def __init__(self, *_):
            super().__init__()

        def attend(self, layer, q, k, v):
            return -super().attend(layer, q, k, v)

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(session, "RouterAttention", Broken)
    assert main([*WORDS, "--model", str(tiny), "--device", "cpu"]) == 1
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "said"), [
    (["--max-tokens", "0"], "--max-tokens must be >= 1, got 0"),
    (["--device", "sim"], "--device must be auto, cpu, sim:gfx942, sim:gfx950 or"),
    (["--device", "sim:foo"], "--device must be auto, cpu, sim:gfx942, sim:gfx950 or, where torch finds a GPU, cuda or cuda:N, got sim:foo"),
    (["--device", "tpu"], "--device must be auto, cpu, sim:gfx942, sim:gfx950 or"),
    pytest.param(["--device", "cuda:99"], "device must be one of the GPUs that torch finds", marks=pytest.mark.gpu),
    (["--model", "nowhere.gguf"], "no model at nowhere.gguf"),
])
def test_bad_arguments_are_one_line(words, said, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["demo", "--device", "cpu", *words]) == 2
    assert said in capsys.readouterr().err


def test_auto_takes_the_gpu_where_there_is_one():
    assert choose_device("auto")[0] == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_slice_samples_when_it_reaches_the_last_known_token():
    request = Request(0, [1, 2, 3], max_tokens=2, output=[4])
    assert Slice(request, 3, 1).samples
    assert not Slice(request, 0, 3).samples
