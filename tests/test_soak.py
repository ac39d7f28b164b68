"""The soak test serves every setup, and notices what it is there for."""

from __future__ import annotations

import json
import random

import pytest

import tritonattn
from tritonattn.cli import main
from tritonattn.soak import NOWHERE, Result, serve
from tritonattn.soak.layers import SETUPS
from tritonattn.soak.server import Load, Pool, Request, Server


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_every_setup_is_right(device, setup):
    result = serve(setup, device, 60, seed=3, steps=12)
    assert not result.wrong and not result.leaks
    assert result.steps == 12 and result.checked > 12 and set(result.kinds) == {"prefill", "extend", "decode"}


def test_command(tmp_path, capsys):
    path = tmp_path / "soak.json"
    assert main(["soak", "--only", "gqa bf16 pre", "--steps", "3", "--json", str(path)]) == 0
    assert "0 wrong" in capsys.readouterr().out
    assert json.loads(path.read_text())["results"][0]["steps"] == 3
    assert main(["soak", "--only", "nothing"]) == 2
    assert main(["soak", "--minutes", "0"]) == main(["soak", "--minutes", "nan"]) == 2


def exchanged(table):
    """The first two blocks of each request the other way round."""
    table = table.clone()
    if table.shape[1] > 1:
        rows = (table[:, 1] < NOWHERE).nonzero().flatten()
        table[rows, :2] = table[rows, :2].flip(1)
    return table


@pytest.mark.parametrize("fault", ["lost write", "old plan", "wrong block"])
def test_faults_are_found(device, monkeypatch, fault):
    original, plan_of = tritonattn.reshape_and_cache, tritonattn.Router.plan
    if fault == "lost write":
        monkeypatch.setattr(tritonattn, "reshape_and_cache", lambda k, v, kc, vc, slots, **rest: original(k, v, kc, vc, slots[:-1], **rest))
    elif fault == "old plan":
        monkeypatch.setattr(tritonattn.Router, "plan", lambda self, q, s, t: plan_of(self, q, [n and max(n - 1, m) for n, m in zip(s, q, strict=True)], t))
    else:
        monkeypatch.setattr(tritonattn.Router, "plan", lambda self, q, s, table: plan_of(self, q, s, exchanged(table)))
    result = serve(SETUPS[0], device, 60, seed=3, steps=40)
    assert result.wrong


def test_a_leak_is_found():
    assert Result("", device_growth=1 << 30).leaks and not Result("", device_growth=1 << 10).leaks


def test_the_server_shares_takes_back_and_preempts():
    """Host arithmetic alone: no block has two owners with different tokens, and what is freed is named once."""
    load = Load(vocabulary=8, blocks=40, block_size=4, longest=100, budget=40, running=8, threshold=3)
    server = Server(load, 0)
    for _ in range(600):
        slices = server.next()
        server.pool.freed.clear()
        assert sum(len(piece.tokens) for piece in slices) <= load.budget
        holds: dict[int, tuple] = {}
        for request in server.running:
            for i, block in enumerate(request.blocks[: request.computed // 4]):
                assert holds.setdefault(block, tuple(request.tokens[: 4 * i + 4])) == tuple(request.tokens[: 4 * i + 4])
        for piece in slices:
            assert piece.stop <= len(piece.request.blocks) * 4
        server.finish(slices)
    assert min(server.seen[name] for name in ("finished", "preempted", "drafts taken back", "tokens found in the cache")) > 10


def test_a_block_is_poisoned_when_its_last_owner_is_gone():
    pool = Pool(4, 2, random.Random(0))
    first = Request([1, 2, 3, 4, 5], 5, computed=5, blocks=[pool.take(), pool.take(), pool.take()])
    pool.publish(first)
    second = Request([1, 2, 3, 9], 9)
    pool.match(second)
    assert second.blocks == first.blocks[:1] and second.computed == 2
    pool.drop(first.blocks)
    assert pool.freed == [first.blocks[2]], "the full ones stay findable"
    third = Request([1, 2, 3, 4, 7], 9)
    pool.match(third)
    assert third.blocks == first.blocks[:2]
    pool.drop(third.blocks)
    taken = [pool.take() for _ in range(3)]
    assert first.blocks[1] in taken and first.blocks[0] not in taken, "that one is still in use"
    assert pool.freed == [first.blocks[2], first.blocks[1]] and pool.take() is None
