"""The fuzzer: what it draws is right, what it should find it finds, and a failure comes out small and does it again."""

from __future__ import annotations

import json
import random
import shlex

import pytest

import tritonattn
from tritonattn.cli import main
from tritonattn.fuzz import Failure, _simpler, explore, named, try_recipe
from tritonattn.fuzz.calls import build
from tritonattn.fuzz.recipes import DEFAULTS, OPS, settle
from tritonattn.fuzz.wrong import choices
from tritonattn.tuning.arch import detect

RICH = {
    "lens": [[1, 17], [3, 40], [0, 0], [2, 0]], "kv_heads": 2, "group": 3, "head_size": 72, "v_head_size": 40, "latent": 48, "dtype": "bfloat16",
    "layout": "preshuffled", "block_size": 48, "window": [9, 0], "softcap": 5.0, "sinks": True, "alibi": True,
    "descale": "heads", "num_splits": 3, "chunk_tokens": 16, "threshold": 3, "view": "odd", "padding": 2, "slack": 100, "out": "wide", "pair": True,
}  # fmt: skip


@pytest.mark.parametrize("op", OPS)
def test_calls_of_every_op(device, op):
    assert not try_recipe({"op": op}, device)
    rich = RICH | ({"head_size": 32} if op in ("mla_extend", "MlaRouter") else {})
    for fp8 in ("", *detect(device).fp8_types):
        assert not try_recipe(rich | {"op": op, "fp8": fp8}, device)


@pytest.mark.parametrize("op", OPS)
def test_refusals_of_every_op(device, op):
    """Every way of being wrong that the plainest call has, with a row of padding: one row overlaps nothing."""
    recipe = {"op": op, "sinks": True, "descale": "number", "out": "given", "padding": 1, "fp8": detect(device).fp8_types[0]}
    for name, how, _ in choices(build(recipe)):
        assert not try_recipe(recipe | {"wrong": [name, how]}, device)


def shifted_window(original):
    return lambda *args, window_size=(-1, -1), **rest: original(*args, window_size=(window_size[0] + (window_size[0] >= 0), window_size[1]), **rest)


def deaf(original):
    def call(*args, **rest):
        try:
            return original(*args, **rest)
        except (TypeError, ValueError):
            return None

    return call


@pytest.mark.parametrize(("fault", "only", "told"), [(shifted_window, "sound", "out is off by"), (deaf, "wrong", "was not refused")])
def test_faults_are_found_and_shrunk(device, tmp_path, monkeypatch, fault, only, told):
    monkeypatch.setattr(tritonattn, "flash_attn_varlen_func", fault(tritonattn.flash_attn_varlen_func))
    monkeypatch.setattr("tritonattn.fuzz.EXAMPLES", 60)
    monkeypatch.setattr("tritonattn.fuzz.GIVE_UP", 1)
    _, (failure,) = explore(["flash_attn_varlen_func"], device, 300, 5, 60, str(tmp_path / "call.json"), only)
    assert told in failure.problem and len(failure.recipe) <= 4, failure
    assert main(shlex.split(failure.command)[1:]) == 1
    monkeypatch.undo()
    assert main(shlex.split(failure.command)[1:]) == 0


class Clock:
    """Time that calls alone take, ten seconds each; every so many-th call fails."""

    def __init__(self, monkeypatch, fails):
        self.now, self.ops, self.fails = 0.0, [], fails
        monkeypatch.setattr("tritonattn.fuzz.time.monotonic", lambda: self.now)
        monkeypatch.setattr("tritonattn.fuzz.try_recipe", self.call)

    def call(self, recipe, device):
        self.now += 10
        self.ops.append(recipe["op"])
        return f"{recipe['op']}: wrong" if self.fails else ""


def test_ops_take_turns(device, tmp_path, monkeypatch):
    """On a slow machine every op has had a call before any has had many."""
    clock = Clock(monkeypatch, fails=False)
    explore(list(OPS), device, 10 * 5 * len(OPS), 1, 60, str(tmp_path / "call.json"))
    assert set(clock.ops) == set(OPS) and max(clock.ops.count(op) for op in OPS) <= 5
    assert clock.now == 10 * 5 * len(OPS)


@pytest.mark.parametrize("fails", [False, True])
def test_the_time_is_kept(device, tmp_path, monkeypatch, fails):
    """Whatever fails: a call that has begun, and a minute of shrinking, are all that may come after."""
    clock = Clock(monkeypatch, fails)
    explore(list(OPS), device, 95, 1, 60, str(tmp_path / "call.json"))
    assert clock.now <= 95 + 10 + fails * 60


def test_a_recipe_is_plain_and_names_what_differs():
    assert settle({"op": "Router"}) == DEFAULTS | {"op": "Router"}
    assert json.loads(Failure({"op": "Router", "wrong": ["q", "meta"]}, "").command.split("'")[1]) == {"op": "Router", "wrong": ["q", "meta"]}
    assert isinstance(named({"op": "Router", "wrong": 17})["wrong"][0], str)
    assert not try_recipe({"op": "Router", "wrong": ["nothing", "text"]}, None), "no such argument: nothing to be refused"


def test_simpler_recipes_are_simpler():
    rng = random.Random(0)
    recipe = {"op": "Router", "lens": [[3, 40], [0, 1]], "softcap": 2.0, "wrong": ["q", "meta"]}
    for _ in range(200):
        steps = list(_simpler(recipe))
        assert recipe not in steps
        if not steps:
            break
        recipe = rng.choice(steps)
    assert recipe == {"op": "Router", "lens": [], "wrong": ["q", "meta"]}


def test_command(capsys):
    assert main(["fuzz", "--minutes", "0.05", "--op", "merge_attn_states"]) == 0
    shown = capsys.readouterr().out
    assert "merge_attn_states:" in shown and "0 failures" in shown
    for words, said in (
        (["--op", "nothing"], "--op must be one of"), (["--minutes", "nan"], "--minutes must be above 0"),
        (["--longest", "-1"], "--longest must be at least 0"),
        (["--replay", "xx"], "--replay must be a JSON object whose \"op\" is one of"), (["--replay", '{"op": "x"}'], "got '{\"op\": \"x\"}'"),
        (["--replay", '{"op": "Router", "len": []}'], "--replay must hold no other choices than"),
        (["--replay", '{"op": "Router", "dtype": "x"}'], "--replay describes no call (AttributeError"),
    ):  # fmt: skip
        assert main(["fuzz", *words]) == 2
        assert said in capsys.readouterr().err
