"""One long sequence over several ranks: every rank gets what one rank with all keys gets."""

import os
import sys

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import tritonattn as ta
from tritonattn.context_parallel import cp_decode_attention, cp_mla_decode, merge_over_ranks

BLOCK = 16
QUERY_LENS = (3, 1)
KEYS = (70, 5)  # of the two sequences, the new tokens among them


def shares(world: int) -> list[tuple[int, ...]]:
    """Keys of each sequence per rank, unequal; the short sequence lives on the last rank alone."""
    first = [KEYS[0] // (world + 1)] * (world - 1)
    return [(n, 0) for n in first] + [(KEYS[0] - sum(first), KEYS[1])]


def build(width: int, heads: int, generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.randn(n, heads, width, generator=generator) for n in KEYS]


def paged(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(cache [blocks, BLOCK, heads, width], block table) with NaN in every slot that holds no key."""
    need = [-(-len(r) // BLOCK) for r in rows]
    cache = torch.full((sum(need) + 1, BLOCK, *rows[0].shape[1:]), torch.nan)
    table = torch.zeros(len(rows), max(max(need), 1), dtype=torch.int32)
    block = 1
    for i, r in enumerate(rows):
        for j in range(need[i]):
            part = r[j * BLOCK : (j + 1) * BLOCK]
            cache[block, : len(part)] = part
            table[i, j] = block
            block += 1
    return cache, table


def worker(rank: int, world: int, port: int, failures) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        check(rank, world)
    except Exception as error:  # seen by the parent
        failures.put(f"rank {rank}: {type(error).__name__}: {error}")
    finally:
        dist.destroy_process_group()


def check(rank: int, world: int) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    keys, values = build(32, 2, generator), build(32, 2, generator)
    q = torch.randn(sum(QUERY_LENS), 6, 32, generator=generator)
    sinks = torch.randn(6, generator=generator)
    cu = torch.tensor([0, *QUERY_LENS]).cumsum(0).int()
    spread = shares(world)
    begin = [sum(s[i] for s in spread[:rank]) for i in range(2)]

    def mine(rows):
        return [r[begin[i] : begin[i] + spread[rank][i]] for i, r in enumerate(rows)]

    def lens(counts):
        return torch.tensor(counts, dtype=torch.int32)

    common = {"cu_seqlens_q": cu, "max_seqlen_q": 3}
    (k, table), (v, _) = paged(keys), paged(values)
    want = ta.reference.decode_attention(q, k, v, seqused_k=lens(KEYS), block_table=table, kv_layout="nhd", sinks=sinks, **common)
    (k, table), (v, _) = paged(mine(keys)), paged(mine(values))
    got = cp_decode_attention(
        q, k, v, seqused_k=lens(spread[rank]), block_table=table, max_seqlen_k=max(spread[rank]), kv_layout="nhd", sinks=sinks,
        return_lse=True, **common,
    )  # fmt: skip
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=3e-6)

    rows = build(48, 1, generator)
    mha_table = table
    q = torch.randn(sum(QUERY_LENS), 5, 48, generator=generator)
    whole, table = paged(rows)
    want = ta.reference.mla_decode(q, whole[:, :, 0], seqused_k=lens(KEYS), block_table=table, softmax_scale=0.2, kv_lora_rank=32, **common)
    part, table = paged(mine(rows))
    got = cp_mla_decode(
        q, part[:, :, 0], seqused_k=lens(spread[rank]), block_table=table, max_seqlen_k=max(spread[rank]), softmax_scale=0.2,
        kv_lora_rank=32, return_lse=True, **common,
    )  # fmt: skip
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=3e-6)

    # What only the rank with the new tokens would use is refused on all of them: none waits for another.
    for wrong in ({"sinks": sinks[:2]}, {"sinks": None, "causal": 1}):
        with pytest.raises((ValueError, TypeError), match=r"cp_decode_attention: (sinks must be|causal must be)"):
            cp_decode_attention(
                torch.randn(sum(QUERY_LENS), 6, 32), k, v, seqused_k=lens(spread[rank]), block_table=mha_table, max_seqlen_k=max(spread[rank]),
                kv_layout="nhd", **wrong, **common,
            )  # fmt: skip

    # A rank without any key for a row contributes nothing, whatever its output holds.
    out = torch.full((1, 1, 2), float(rank + 1)) if rank < 2 else torch.full((1, 1, 2), torch.nan)
    lse = torch.tensor([[0.0 if rank < 2 else -torch.inf]])
    out, lse = merge_over_ranks(out, lse)
    torch.testing.assert_close(out, torch.full((1, 1, 2), 1.5))
    torch.testing.assert_close(lse, torch.tensor([[2.0]]).log())
    out, lse = merge_over_ranks(torch.full((1, 1, 2), torch.nan), torch.tensor([[-torch.inf]]))
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the test's ranks are CPU processes")
@pytest.mark.skipif("TRITONATTN_SIM" in os.environ, reason="one simulated device a process is enough")
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_together_are_one_rank(world):
    context = multiprocessing.get_context("spawn")
    failures = context.Queue()
    port = 20000 + (os.getpid() * 7 + world) % 20000
    processes = [context.Process(target=worker, args=(rank, world, port, failures)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    told = [failures.get() for _ in range(failures.qsize())] if sys.platform != "darwin" else []
    assert not told, "\n".join(told)
    assert all(process.exitcode == 0 for process in processes)


@pytest.fixture
def alone():
    """A group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def one_rank(**changes):
    lens = {"seqused_k": torch.tensor([6, 12]).int(), "block_table": torch.tensor([[0, 1], [2, 3]]).int(), "max_seqlen_k": 12}
    cache = torch.zeros(4, 16, 2, 64)
    return {"q": torch.zeros(2, 8, 64), "k_cache": cache, "v_cache": cache, "kv_layout": "nhd", **lens, **changes}


def one_rank_mla(**changes):
    args = one_rank(q=torch.zeros(2, 4, 48), kv_cache=torch.zeros(4, 16, 48), softmax_scale=0.1, kv_lora_rank=32)
    return {name: value for name, value in args.items() if name not in ("k_cache", "v_cache", "kv_layout")} | changes


@pytest.mark.parametrize(("changes", "error", "words"), [
    ({"q": None}, TypeError, ["q must be a tensor, got NoneType"]),
    ({"v_cache": None}, TypeError, ["v_cache must be a tensor, got NoneType"]),
    ({"v_cache": torch.zeros(4, 16, 64)}, ValueError, ["v_cache must have 4 dimensions"]),
    ({"new_tokens_on": "0"}, TypeError, ["new_tokens_on must be an int on the host, got str"]),
    ({"new_tokens_on": None, "causal": 1}, TypeError, ["new_tokens_on must be an int on the host, got NoneType", "causal must be a bool, got int"]),
    ({"new_tokens_on": 3, "window_size": (1, 0)}, ValueError, ["new_tokens_on must be at most 0, got 3", "window_size is not supported over several ranks"]),
    ({"new_tokens_on": -2}, ValueError, ["new_tokens_on must be at least -1, got -2"]),
    ({"causal": "x"}, TypeError, ["causal must be a bool, got str"]),
    ({"window_size": 3, "sinks": torch.zeros(3)}, ValueError, ["window_size must be a pair (left, right), got 3", "sinks must be [8], got [3]"]),
    ({"window_size": (3, -1), "alibi_slopes": torch.zeros(8), "out": torch.zeros(2, 8, 64)}, ValueError,
     ["window_size is not supported over several ranks, got (3, -1); alibi_slopes is not supported over several ranks; out is not supported over"]),
    ({"group": 3}, TypeError, ["group must be a process group that this rank is in, or None, got int"]),
    ({"windw_size": 3}, TypeError, ["cp_decode_attention() got an unexpected keyword argument 'windw_size'"]),
])  # fmt: skip
def test_bad_input_is_named(alone, changes, error, words):
    with pytest.raises(error, match=r"^cp_decode_attention") as caught:
        cp_decode_attention(**one_rank(**changes))
    assert all(text in str(caught.value) for text in words), caught.value


@pytest.mark.parametrize(("changes", "error", "text"), [
    ({"q": ()}, ValueError, "q must be a tensor or a pair (latent, rope), got 0 of them"), ({"kv_lora_rank": None}, TypeError, "kv_lora_rank must be an int"),
    ({"kv_cache": None}, TypeError, "kv_cache must be a tensor"), ({"out": torch.zeros(2, 4, 32)}, ValueError, "out is not supported over several ranks"),
    ({"new_tokens_on": 1}, ValueError, "new_tokens_on must be at most 0, got 1"),
])  # fmt: skip
def test_bad_input_of_mla_is_named(alone, changes, error, text):
    with pytest.raises(error, match=r"^cp_mla_decode: ") as caught:
        cp_mla_decode(**one_rank_mla(**changes))
    assert text in str(caught.value)


def test_what_the_ops_take_is_taken(alone):
    """Options as they are without being given, unlimited windows, and queries of MLA as a list."""
    for window_size in ((-1, -1), [-1, 1 << 30]):
        assert cp_decode_attention(**one_rank(window_size=window_size, out=None, alibi_slopes=None, num_splits=2)).shape == (2, 8, 64)
    q = [torch.zeros(2, 4, 32), torch.zeros(2, 4, 16)]
    assert cp_mla_decode(**one_rank_mla(q=q, out=None)).shape == (2, 4, 32)
