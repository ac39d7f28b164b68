"""Batches of unlike lengths that the device alone knows: cut there, by the rule by which the router cuts on the host.

On a stand-in of the device with few compute units, where short batches fill it and short sequences pay.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tritonattn
from tests import cases, mla_cases
from tritonattn import layouts
from tritonattn.paths.cut import run_cut
from tritonattn.plan import MAX_LENGTH, MAX_SPLITS, UNLIMITED, Cut, device_plan, most_work, part_counts, split_length, split_rule
from tritonattn.problem import AttnProblem
from tritonattn.scratch import Fresh
from tritonattn.tuning.arch import assume, by_name, detect
from tritonattn.tuning.table import lookup, pin, rows

RAGGED = [(1, 20), (1, 700), (2, 3), (0, 0), (1, 1), (3, 333), (0, 50)]
ONE_EACH = [(1, 20), (1, 700), (1, 3), (1, 0), (1, 1), (1, 333)]


@contextmanager
def few_units(device, count=4, **config):
    base = replace(detect(device), compute_units=count)
    with assume(pin(base, cut={**rows("cut", base)[-1].config, "cut_keys": 1, **config})):
        yield


@pytest.fixture
def works(device, monkeypatch):
    """The lists that the ops have made on the device, on few units."""
    made = []

    def spy(*args, **kwargs):
        made.append(run_cut(*args, **kwargs))
        return made[-1]

    for name in ("decode", "mla_decode"):
        monkeypatch.setattr(import_module(f"tritonattn.paths.{name}"), "run_cut", spy)
    with few_units(device):
        yield made


def lists(work):
    return work.items.view(-1, 3).tolist(), work.merges.view(-1, 3).tolist()


def most_parts(works):
    return max(parts for work in works for _, _, parts in lists(work)[0])


# -- right -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", layouts.PAGED_LAYOUTS)
@pytest.mark.parametrize("options", [
    {}, {"window_size": (250, 0)}, {"window_size": (200, 1), "causal": False},
    {"softcap": 3.0, "sinks": torch.tensor([0.5, -2.0, 6.0]), "alibi_slopes": torch.tensor([0.1, 0.0, 0.3])},
], ids=["", "window", "window to both sides", "softcap, sinks, alibi"])  # fmt: skip
def test_ragged_batches(device, works, layout, options):
    """Float64, LSE, poison where nothing may look, pages in any order, query tokens of several numbers, none, and sequences without keys."""
    cases.decode(RAGGED, layout=layout, options=options).check(device)
    assert most_parts(works) > 1


@pytest.mark.parametrize("layout", ["nhd", "preshuffled"])
def test_heads_dtypes_and_an_fp8_cache(device, works, layout):
    kv_dtype = cases.fp8_dtypes(device)[0]
    with few_units(device, 12):
        cases.decode(RAGGED, layout=layout, heads=(8, 2), head_size=64, dtype=torch.bfloat16).check(device)
        cases.decode(RAGGED, layout=layout, heads=(6, 2), dtype=torch.bfloat16, kv_dtype=kv_dtype, k_descale=0.5, v_descale=0.25).check(device)
    assert len(works) == 2 and most_parts(works[:1]) > 1 and most_parts(works[1:]) > 1


def test_one_query_token_each_and_padding(device, works):
    case = cases.decode(ONE_EACH)
    case.check(device, cu_seqlens_q=None)
    assert most_parts(works) > 1


@pytest.mark.parametrize("lens", [RAGGED, ONE_EACH], ids=["ragged queries", "one each"])
@pytest.mark.parametrize("heads", [3, 20])
def test_mla(device, works, lens, heads):
    with few_units(device, 12):
        mla_cases.decode(lens, heads=heads).check(device, **({"cu_seqlens_q": None} if lens is ONE_EACH else {}))
    assert most_parts(works) > 1


@settings(max_examples=12)
@given(
    lens=st.lists(
        st.one_of(st.just((0, 0)), st.tuples(st.integers(1, 3), st.integers(0, 60)), st.tuples(st.just(1), st.integers(300, 900))), min_size=2, max_size=9
    ),
    layout=st.sampled_from(layouts.PAGED_LAYOUTS), window=st.sampled_from([(-1, -1), (-1, -1), (100, 0)]), units=st.sampled_from([1, 2, 5, 16]),
    latent=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_lengths(device, lens, layout, window, units, latent, seed):
    lens = [(min(query, seq) if seq else query, seq) for query, seq in lens]
    case = mla_cases.decode(lens, seed=seed) if latent else cases.decode(lens, layout=layout, seed=seed, options={"window_size": window})
    with few_units(device, units):
        case.check(device)


def test_sequences_that_are_said_to_be_alike_are_cut_alike(device, works):
    cases.decode(RAGGED).check(device, ragged=False)
    mla_cases.decode(RAGGED).check(device, ragged=False)
    assert not works


# -- by the router's rule ----------------------------------------------------------------------------------------------------


REQUESTS = st.lists(
    st.one_of(st.just((0, 0)), st.tuples(st.integers(1, 3), st.integers(4, 60)), st.tuples(st.integers(1, 3), st.integers(4, 200_000)), st.just((1, 5000))),
    min_size=2, max_size=24,
)  # fmt: skip


@settings(max_examples=25)
@example([(1, 128)] * 63 + [(1, 131072)], 66, 4, -1, True)
@example([(1, 4096)] * 24, 66, 1, -1, False)  # all cut, and rounded into too many parts
@example([(1, 7 + 31 * i % 9000) for i in range(700)], 304, 1, 2000, False)
@example([(1, 100_000), (1, 100_000)], 1, 8, -1, False)
@given(REQUESTS, st.sampled_from([1, 3, 20, 132, 304]), st.sampled_from([1, 2, 8]), st.sampled_from([-1, -1, 100, 3000]), st.booleans())
def test_the_lists_are_those_of_the_router(device, requests, units, kv_heads, left, narrow):
    query, seq = [q for q, _ in requests], [s for _, s in requests]
    with few_units(device, units, **({"BLOCK_B": 4, "OTHERS": 16, "BLOCK_S": 8} if narrow else {})):
        router = tritonattn.Router(
            2 * kv_heads, kv_heads, 64, dtype=torch.bfloat16, device=device, kv_layout="nhd", decode_threshold=3, window_size=(left, 0 if left >= 0 else -1),
            block_size=16,
        )  # fmt: skip
        decode = router.plan(query, seq, torch.zeros(1, 12500, dtype=torch.int32, device=device).expand(len(seq), -1)).decode
        arch = detect(device)
        rule = Cut(lookup("cut", arch), *split_rule(arch, router.paged, decode.plan, 3, len(seq)), 200_000)
        work = run_cut(
            rule, torch.tensor(seq, dtype=torch.int32, device=device), cases.cumulative(query).to(device), num_seqs=len(seq), max_seqlen_q=3,
            window_left=left if left >= 0 else UNLIMITED, scratch=Fresh(device),
        )  # fmt: skip
    assert lists(work) == lists(decode.work)
    assert (work.num_items, work.num_merges, work.num_parts) == (decode.work.num_items, decode.work.num_merges, decode.work.num_parts)


# -- whatever the device holds -----------------------------------------------------------------------------------------------


class Fenced(Fresh):
    """Scratch between marks."""

    def take(self, name, numel, dtype):
        self.whole = torch.full((numel + 128,), -7, dtype=dtype, device=self.device)
        return self.whole[64:-64]


WILD = st.one_of(st.integers(-(2**31), 2**31 - 1), st.sampled_from([0, 1, -1, 2**31 - 1, -(2**31), 2**30, 2**29, 4096]))


@settings(max_examples=40)
@example([(-(10**6), 1), (1000, 2), (1000, 3)], 4, 1, 131072, 1, UNLIMITED, False)  # a sum that is too small
@example([(2**29, 0)] * 9, 4, 1, MAX_LENGTH // 2, 1, UNLIMITED, False)  # one that 32 bits do not hold
@example([(2**29, 0)] * 16 + [(2**28, 0)], 1, 1, MAX_LENGTH // 2, 1, UNLIMITED, False)
@given(
    st.lists(st.tuples(WILD, WILD), min_size=1, max_size=40), st.integers(1, 300), st.integers(1, 5000),
    st.sampled_from([1, 77, 131072, MAX_LENGTH // 2]), st.sampled_from([1, 4]), st.sampled_from([0, 100, UNLIMITED]), st.booleans(),
)  # fmt: skip
def test_no_list_leaves_its_room(device, wild, parts, least, max_keys, max_seqlen_q, window_left, has_starts):
    """Each sequence stands in the list, whole or in parts that come first and are merged, and nothing is written beside it."""
    lens, starts = (torch.tensor(values, dtype=torch.int32, device=device) for values in ([n for n, _ in wild], [0, *(n for _, n in wild)]))
    with few_units(device, BLOCK_B=4, OTHERS=16):
        scratch = Fenced(device)
        work = run_cut(
            Cut(lookup("cut", detect(device)), parts, least, max_keys), lens, starts if has_starts else None, num_seqs=len(wild),
            max_seqlen_q=max_seqlen_q, window_left=window_left, scratch=scratch,
        )  # fmt: skip
    assert (work.num_items, work.num_merges, work.num_parts) == most_work(len(wild), parts)
    assert (scratch.whole[:64] == -7).all() and (scratch.whole[-64:] == -7).all()
    items, merges = lists(work)
    live = [item for item in items if item[2]]
    assert items == live + [[0, 0, 0]] * (len(items) - len(live))
    splits = [count for _, _, count in live]
    assert splits == sorted(splits, reverse=True) and max(splits) <= MAX_SPLITS and sum(n > 1 for n in splits) <= work.num_parts
    found = {}
    for place, (seq, split, count) in enumerate(live):
        found.setdefault(seq, []).append((place, split, count))
    assert sorted(found) == list(range(len(wild)))
    for own in found.values():
        first, _, count = own[0]
        assert own == [(first + i, i, count) for i in range(count)]
    several = sorted([seq, own[0][0], len(own)] for seq, own in found.items() if len(own) > 1)
    assert sorted(merge for merge in merges if merge[2]) == several and merges[len(several) :] == [[0, 0, 0]] * (len(merges) - len(several))


def test_a_sequence_without_queries_needs_no_key(device):
    rule = Cut(lookup("cut", detect(device)), 4, 1, 131072)
    lens, starts = (torch.tensor(values, dtype=torch.int32, device=device) for values in ([1000, 900, 10], [0, 0, 1, 2]))
    work = run_cut(rule, lens, starts, num_seqs=3, max_seqlen_q=1, window_left=UNLIMITED, scratch=Fresh(device))
    assert [item for item in lists(work)[0] if item[2]] == [*([1, split, 4] for split in range(4)), [2, 0, 1], [0, 0, 1]]


# -- where it is done --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["MI300X", "MI355X", "H200"])
def test_the_one_long_sequence_is_spread(name):
    """63 sequences of 128 keys and one of 131072: no program reads more than a few times its share. Where all are short, or one is alone, or
    the caller has chosen, nothing is cut on the device."""
    arch = by_name(name)
    for problem in (
        AttnProblem(64, 4, 128, 128, torch.bfloat16, torch.bfloat16, "plain", 16, True),
        AttnProblem(16, 1, 576, 512, torch.bfloat16, torch.bfloat16, "latent", 64, True),
    ):
        lens = [128] * 63 + [131072]
        plan = device_plan(arch, problem, 64, 1, 131072)
        length = split_length(sum(lens), max(lens), plan.cut.parts, MAX_SPLITS, plan.cut.least)
        assert 131072 / part_counts(131072, length) < 2.5 * max(sum(lens) / plan.cut.parts, 131072 / MAX_SPLITS)
        assert device_plan(arch, problem, 64, 1, 131072) is plan
        for other in ((64, 1, 512), (1, 1, 131072), (64, 1, 131072, 1), (64, 1, 131072, 7), (64, 1, 131072, 0, 500)):
            assert device_plan(arch, problem, *other).cut is None


def test_num_splits_is_the_callers_choice(device, works):
    """And then the bits of a row do not depend on the lengths of other sequences."""
    batch, other = cases.Batch([(1, 20), (1, 700), (2, 333)]), cases.Batch([(1, 650), (1, 700), (2, 2)], seed=1)
    other.keys[1], other.values[1], other.q[1] = batch.keys[1], batch.values[1], batch.q[1]
    one, two = (cases.decode(b.refresh()).run(device, num_splits=3) for b in (batch, other))
    assert torch.equal(one[0][1], two[0][1]) and torch.equal(one[1][:, 1], two[1][:, 1])
    assert not works


def test_the_same_call_has_the_same_bits(device, works):
    for case in (cases.decode(RAGGED), mla_cases.decode(RAGGED)):
        first = [x.clone() for x in case.run(device)]
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(case.run(device), first, strict=True))
    assert most_parts(works) > 1
