"""Mixed batches of MLA through one plan: every request as if it were alone, in any order."""

import math

import numpy as np
import pytest
import torch

import tritonattn
from tests import cases, mla_cases
from tritonattn import reference
from tritonattn.batch import Kind

NOPE, ROPE, LATENT, V, HEADS = 32, 16, 64, 32, 3
SCALE = 0.2
MIXED = [(20, 20), (1, 40), (30, 126), (1, 7), (2, 33), (1, 1), (9, 25)]


class Layer:
    """One layer: queries and latent rows of a batch, the weights, the cache that holds what each path needs."""

    def __init__(self, lens, *, block_size=16, dtype=torch.float32, kv_dtype=None, kv_descale=None, rope_descale=None, seed=0, threshold=1):
        self.batch = mla_cases.Batch(lens, heads=HEADS, latent=LATENT, rope=ROPE, dtype=dtype, seed=seed)
        gen = torch.Generator().manual_seed(7)
        self.up_project = mla_cases.UpProject(*(torch.randn(HEADS, n, LATENT, generator=gen) * LATENT**-0.5 for n in (NOPE, V)))
        self.scales = {"kv_descale": kv_descale, "rope_descale": rope_descale}
        self.dtype, self.kv_dtype, self.block_size, self.threshold = dtype, kv_dtype, block_size, threshold
        batch = self.batch
        kinds = tritonattn.classify(batch.query_lens, batch.context_lens, threshold)
        self.stored = stored = [seq if kind == Kind.DECODE else seq - query for (query, seq), kind in zip(lens, kinds, strict=True)]
        self.cache = mla_cases.latent_cache(
            [rows[:n] for rows, n in zip(batch.rows, stored, strict=True)], LATENT, block_size=block_size, dtype=kv_dtype, **self.scales
        )
        self.q = batch.random(batch.tokens + cases.PAD_ROWS, HEADS, NOPE + ROPE)
        self.q[batch.tokens :] = math.nan
        new = torch.cat([rows[len(rows) - query :] for (query, _), rows in zip(lens, batch.rows, strict=True)])
        pad = torch.full((cases.PAD_ROWS, HEADS, 1), math.nan, dtype=dtype)
        self.k, self.v = (torch.cat([x, pad.expand(-1, -1, x.shape[2])]) for x in self.up_project(new[:, :LATENT], new[:, LATENT:]))
        starts = cases.cumulative(batch.query_lens).tolist()
        for start, (query, _), kind in zip(starts, lens, kinds, strict=False):
            if kind == Kind.DECODE:  # whose new keys and values are not read
                self.k[start : start + query] = math.nan
                self.v[start : start + query] = math.nan

    def absorb(self, q):
        w = self.up_project.w_k.to(q.device)
        latent = torch.einsum("thd,hdl->thl", q[..., :NOPE].float(), w).to(q.dtype)
        return latent, q[..., NOPE:]

    def up_project_v(self, latent):
        return torch.einsum("thl,hdl->thd", latent.float(), self.up_project.w_v.to(latent.device)).to(latent.dtype)

    def router(self, device, **changes):
        sizes = {
            "num_heads": HEADS, "kv_lora_rank": LATENT, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": V,
            "decode_threshold": self.threshold, "chunk_tokens": 48, "block_size": self.block_size,
        }  # fmt: skip
        options = {"softmax_scale": SCALE, "dtype": self.dtype, "device": device, "kv_dtype": self.kv_dtype, **self.scales}
        return tritonattn.MlaRouter(**sizes | options | changes)

    def run(self, device, router=None, poison="nan", **options):
        router = router or self.router(device)
        q, k, v, cache, table = (x.to(device) for x in (self.q, self.k, self.v, self.cache.poisoned(poison), self.cache.table))
        plan = router.plan(self.batch.query_lens, self.batch.seq_lens, table)
        out, lse = router.run(
            plan, q, k, v, cache, absorb=self.absorb, up_project=self.up_project, up_project_v=self.up_project_v, return_lse=True, **options
        )
        assert ((out[self.batch.tokens :] == 0) | (out[self.batch.tokens :] == cases.MARK)).all()
        assert (lse[:, self.batch.tokens :] == -math.inf).all()
        return out[: self.batch.tokens].cpu(), lse[:, : self.batch.tokens].cpu(), plan

    def exact(self):
        """Every request by itself, not absorbed, in float64; cached rows as the cache holds them."""
        outs, lses = [], []
        starts = cases.cumulative(self.batch.query_lens).tolist()
        for i, stored in enumerate(self.stored):
            rows = self.batch.rows[i].double().clone()
            if stored:
                rows[:stored] = reference._latent_rows(self.cache.clean, self.cache.table[i], stored, LATENT, *self.scales.values())
            keys = torch.einsum("nl,hdl->nhd", rows[:, :LATENT], self.up_project.w_k.double())
            keys = torch.cat([keys, rows[:, None, LATENT:].expand(-1, HEADS, -1)], -1)
            values = torch.einsum("nl,hdl->nhd", rows[:, :LATENT], self.up_project.w_v.double())
            out, lse = reference.attend(self.q[starts[i] : starts[i + 1]].double(), keys, values, softmax_scale=SCALE, causal=True)
            outs.append(out)
            lses.append(lse)
        return torch.cat(outs), torch.cat(lses, 1)

    def check(self, device, tolerance=2e-5, **options):
        out, lse, plan = self.run(device, **options)
        exact, exact_lse = self.exact()
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=tolerance)
        torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=10 * tolerance)
        return out, lse, plan


@pytest.mark.parametrize("threshold", [1, 2])
@pytest.mark.parametrize("block_size", [16, 48])
def test_mixed_batch_in_any_order(device, block_size, threshold):
    layer = Layer(MIXED, block_size=block_size, threshold=threshold)
    plan = layer.check(device)[2]
    expected = [Kind.PREFILL, Kind.DECODE, Kind.EXTEND, Kind.DECODE, Kind.EXTEND if threshold == 1 else Kind.DECODE, Kind.PREFILL, Kind.EXTEND]
    assert plan.kinds.tolist() == expected


def test_projections_get_the_tokens_that_need_them(device):
    layer = Layer(MIXED)
    seen = []
    absorb = layer.absorb
    layer.absorb = lambda q: seen.append(len(q)) or absorb(q)
    layer.up_project.calls.clear()
    layer.run(device)
    assert seen == [2], "two decode tokens"
    assert sum(layer.up_project.calls) == 96 + 31 + 16, "the context of the extend requests, without gaps"


@pytest.mark.parametrize("lens", [[(1, 40), (1, 7), (0, 0), (1, 100)], [(3, 50), (1, 9)], [(5, 5), (30, 30)], [(9, 60), (2, 18)], []], ids=str)
def test_batches_of_one_kind(device, lens):
    if lens:
        Layer(lens, threshold=3).check(device)
    else:
        router = Layer([(1, 2)]).router(device)
        plan = router.plan([], [], torch.zeros(0, 1, dtype=torch.int32, device=device))
        functions = {"absorb": lambda q: q, "up_project": lambda *rows: rows, "up_project_v": lambda latent: latent}
        empty = torch.zeros(0, HEADS, NOPE + ROPE, device=device)
        assert router.run(plan, empty, empty, empty[..., :V], None, **functions).shape == (0, HEADS, V)


def test_router_of_numbers_of_numpy(device):
    layer = Layer(MIXED)
    sizes = {"num_heads": HEADS, "kv_lora_rank": LATENT, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": V, "decode_threshold": 1}
    sizes = {name: np.int64(value) for name, value in {**sizes, "chunk_tokens": 48, "block_size": 16}.items()}
    layer.check(device, router=layer.router(device, **sizes, softmax_scale=np.float32(SCALE)))


def test_a_batch_of_padding_alone(device):
    layer = Layer([(1, 2)])
    router = layer.router(device)
    functions = {"absorb": layer.absorb, "up_project": layer.up_project, "up_project_v": layer.up_project_v}
    for lens, rows in (([0], 0), ([0, 20], 0), ([0], 2), ([], 2)):
        plan = router.plan([0] * len(lens), lens, torch.zeros(len(lens), 2, dtype=torch.int32, device=device))
        q = torch.full((rows, HEADS, NOPE + ROPE), math.nan, device=device)
        out, lse = router.run(plan, q, None, None, layer.cache.poisoned("nan").to(device), **functions, return_lse=True)
        assert out.shape == (rows, HEADS, V) and (out == 0).all()
        assert lse.shape == (HEADS, rows) and (lse == -math.inf).all()


def test_given_out_and_marks(device):
    layer = Layer(MIXED)
    out = torch.full((layer.batch.tokens + cases.PAD_ROWS, HEADS, V), cases.MARK, device=device)
    got, _, _ = layer.check(device, out=out)
    assert torch.equal(out[: layer.batch.tokens].cpu(), got) and (out[layer.batch.tokens :] == cases.MARK).all()


def test_layers_and_steps_share_a_router(device):
    """One plan for two layers, then a decode step of another size with the same router."""
    layer, other = Layer(MIXED), Layer(MIXED, seed=5)
    router = layer.router(device)
    for each in (layer, other):
        each.check(device, router=router)
    Layer([(1, 41), (1, 8)]).check(device, router=router)


def test_fp8_cache_of_two_descales(device):
    for kv_dtype in cases.fp8_dtypes(device):
        layer = Layer(MIXED[:4], dtype=torch.bfloat16, kv_dtype=kv_dtype, kv_descale=0.25, rope_descale=0.5)
        layer.check(device, tolerance=0.04)


@pytest.mark.parametrize("names", [["kv_descale"], ["rope_descale"], ["kv_descale", "rope_descale"]], ids="+".join)
def test_descales_of_a_layer_replace_each_its_own(device, names):
    layer = Layer(MIXED[:4], kv_descale=0.25, rope_descale=0.5)
    router = layer.router(device, **dict.fromkeys(names, 3.0))
    layer.check(device, router=router, **{name: layer.scales[name] for name in names})


@pytest.mark.parametrize("changes,words", [
    ({"absorb": lambda q: q}, [r"q from absorb must be \[2, 3, 80\]"]),
    ({"absorb": lambda q: q.new_zeros(2, 3, 80, device="meta")}, ["q from absorb must be on"]),
    ({"absorb": lambda q: None}, ["q from absorb must be a tensor, got NoneType"]),
    ({"up_project": lambda latent, rope: latent}, ["up_project must give back a pair .k, v. of tensors, got Tensor"]),
    ({"up_project_v": lambda latent: latent}, [r"v from up_project_v must be \[2, 3, 32\], got \[2, 3, 64\]"]),
    ({"up_project_v": lambda latent: latent[:1, :, :32]}, [r"v from up_project_v must be \[2, 3, 32\], got \[1, 3, 32\]"]),
    ({"up_project_v": lambda latent: None}, ["v from up_project_v must be a tensor, got NoneType"]),
    ({"up_project_v": lambda latent: latent[..., :32].to("meta")}, ["v from up_project_v must be on"]),
    ({"kv_descale": -1.0}, ["kv_descale"]),
    ({"absorb": None, "up_project": 3}, ["absorb must be callable, got NoneType", "up_project must be callable, got int"]),
    ({"k": None, "v": None}, ["k must be a tensor", "v must be a tensor"]),
    ({"kv_cache": torch.zeros(9, 8, 80)}, [r"kv_cache must be \[.., 16, 80\]"]),
])  # fmt: skip
def test_bad_input_is_named(device, changes, words):
    layer = Layer(MIXED)
    router = layer.router(device)
    plan = router.plan(layer.batch.query_lens, layer.batch.seq_lens, layer.cache.table.to(device))
    args = {"q": layer.q, "k": layer.k, "v": layer.v, "kv_cache": layer.cache.clean, "absorb": layer.absorb, "up_project": layer.up_project,
            "up_project_v": layer.up_project_v} | changes  # fmt: skip
    with pytest.raises((ValueError, TypeError)) as error:
        router.run(plan, **{name: cases.to(value, device) for name, value in args.items()})
    for word in words:
        error.match(word)


def test_every_reason_at_once(device):
    layer = Layer(MIXED)
    router = layer.router(device)
    plan = router.plan(layer.batch.query_lens, layer.batch.seq_lens, layer.cache.table.to(device))
    functions = {"absorb": layer.absorb, "up_project": layer.up_project, "up_project_v": None}
    with pytest.raises(ValueError, match=r"up_project_v must be callable.*q must be a tensor.*out must be.*v must have 3 dim.*kv_cache must have 3 dim"):
        router.run(plan, None, layer.k.to(device), layer.v[0].to(device), layer.cache.clean[0].to(device), out=layer.v.int().to(device), **functions)


def test_what_is_no_plan_is_refused(device):
    layer = Layer(MIXED)
    functions = {"absorb": layer.absorb, "up_project": layer.up_project, "up_project_v": layer.up_project_v}
    with pytest.raises(TypeError, match=r"MlaRouter\.run: plan must be one that `plan` gave, got NoneType"):
        layer.router(device).run(None, layer.q, layer.k, layer.v, layer.cache.clean, **functions)


def test_bad_router_is_named():
    with pytest.raises((ValueError, TypeError), match="softmax_scale") as error:
        tritonattn.MlaRouter(0, softmax_scale=0.0, dtype=torch.int8, device="foo", kv_lora_rank=0)
    for word in ("num_heads", "dtype", "kv_lora_rank", "device must be one that torch knows, such as cuda:0 or cpu, got 'foo'"):
        error.match(word)
