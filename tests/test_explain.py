"""`tritonattn explain` says what the router would do."""
from __future__ import annotations

import json

import pytest

from tritonattn.cli import main
from tritonattn.explain import parse_requests


def explain(capsys, *words: str) -> dict:
    assert main(["explain", "--json", "--arch", "gfx942", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_requests_are_read():
    assert parse_requests(["1@40x2", "9", "5x3"]) == ([1, 1, 9, 5, 5, 5], [40, 40, 0, 0, 0, 0])


def test_each_request_its_path_and_each_path_its_row(capsys):
    facts = explain(capsys, "300", "1@4095x30", "512@80000")
    assert [request["path"] for request in facts["requests"]] == ["prefill", *["decode"] * 30, "extend"]
    assert facts["order"] == [*range(1, 31), 31, 0]
    decode, extend, prefill = (facts["paths"][path] for path in ("decode", "extend", "prefill"))
    assert decode["row"].startswith("gfx942/decode.json row")
    assert prefill["row"].startswith("gfx942/prefill.json row")
    assert extend["passes"] == "3 over the keys, 80512 in all, at most 32768 a pass"
    assert decode["parts of keys"] == sum(request["splits"] or 0 for request in facts["requests"])
    assert decode["programs"] == 8 * decode["parts of keys"]  # one KV head each
    assert decode["where the device alone knows the lengths"] == "3 parts of each request"


def test_lengths_that_the_device_alone_knows(capsys):
    said = [explain(capsys, *words)["paths"]["decode"]["where the device alone knows the lengths"] for words in (["1@131071", "1@99x127"], ["1@131071"])]
    assert said == ["cut there, in the same way", "114 parts of each request"]


@pytest.mark.parametrize("words, gpu", [([], "MI355X"), (["--arch", "MI308X"], "MI308X")], ids=["variable", "option"])
def test_the_arch_that_the_environment_names(capsys, monkeypatch, words, gpu):
    monkeypatch.setenv("TRITONATTN_ARCH", "MI355X")
    assert main(["explain", "--json", *words, "1@50"]) == 0
    assert json.loads(capsys.readouterr().out)["gpu"] == gpu


def test_padding_takes_no_path(capsys):
    facts = explain(capsys, "0", "0@40")
    assert [(request["path"], request["splits"]) for request in facts["requests"]] == [("none", None)] * 2
    assert not facts["paths"]
    beside = explain(capsys, "0", "1@40x3", "0@40")
    assert [request["path"] for request in beside["requests"]] == ["none", *["decode"] * 3, "none"]
    assert beside["paths"]["decode"]["requests"] == 3


def test_speculated_tokens_decode_below_the_threshold(capsys):
    paths = [[request["path"] for request in explain(capsys, "4@100", *words)["requests"]] for words in ([], ["--decode-threshold", "4"])]
    assert paths == [["extend"], ["decode"]]


@pytest.mark.parametrize("model", ["gpt-oss-120b", "deepseek-r1", "gemma-2-9b"])
def test_models_by_name(capsys, model):
    facts = explain(capsys, "--model", model, "--kv-dtype", "fp8", "--tp", "8", "1@5000", "7@9", "3")
    assert facts["paths"].keys() == {"decode", "extend", "prefill"}
    assert "fp8" in facts["paths"]["decode"]["problem"]
    assert ("1 over the new ones" in facts["paths"]["extend"]["passes"]) == (model == "deepseek-r1")


def test_it_shows_neighbours_that_are_alike_as_one(capsys):
    assert main(["explain", "--arch", "MI355X", "1@4095x30", "0"]) == 0
    shown = capsys.readouterr().out
    assert "0-29" in shown
    assert "padding" in shown
    assert "gfx950" in shown


@pytest.mark.parametrize(("words", "said"), [
    (["1@", "2", "1@5x0", "1@99999999999"], "a request must be NEW, NEW@CONTEXT or NEW@CONTEXTxCOUNT, of tokens below a billion and a count from 1 "
     "to 999999, got 1@, 1@5x0, 1@99999999999"),
    (["--shape", "32x8", "1"], "--shape must look like 64/4x128"),
    (["--shape", "3/2x64", "1"], "query heads a multiple of KV heads, got '3/2x64'"),
    (["--shape", "8/2x20", "1"], "head size of q and k must be a multiple of 8 from 32 to 256, got 20"),
    (["--shape", "8/2x64", "--model", "phi-2", "1"], "--shape and --model exclude each other, got 8/2x64 and phi-2"),
    (["--block-size", "0", "1"], "block_size must be at least 1, got 0"),
    (["--block-size", "12", "1@40"], "block_size must be a multiple of 8 (16 bytes of torch.bfloat16), got 12"),
    (["--shape", "8/2x72", "--kv-dtype", "fp8", "1@40"], "head_size must be a multiple of 16 (16 bytes of torch.float8_e4m3fnuz), got 72"),
    (["--tp", "0", "1"], "tensor_parallel must divide 32 heads and 8 KV heads, got 0"),
    (["--tp", "3", "1"], "tensor_parallel must divide 32 heads and 8 KV heads, got 3"),
    (["--chunk-tokens", "0", "1"], "chunk_tokens must be at least 1, got 0"),
    (["--model", "none", "1"], "model must be one of"),
    (["--model", "kimi-k2", "--batch-invariant", "1"], "--batch-invariant: not for MLA"),
])
def test_bad_arguments_are_one_line(words, said, capsys):
    assert main(["explain", "--arch", "gfx942", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
