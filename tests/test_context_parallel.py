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


def test_what_needs_whole_positions_is_refused():
    q = torch.zeros(1, 2, 32)
    with pytest.raises(ValueError, match=r"window_size is not supported over several ranks; alibi_slopes is not"):
        cp_decode_attention(
            q, q, q, seqused_k=q, block_table=q, max_seqlen_k=1, window_size=(3, -1), alibi_slopes=torch.zeros(2)
        )  # fmt: skip
