"""Tables: the shipped ones are sound, broken ones are named, look-ups find the first row that holds."""

import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import torch

import tritonattn
from tritonattn.plan import decode_plan, prefill_row
from tritonattn.problem import AttnProblem
from tritonattn.tuning import arch, schema, table

SHIPPED = sorted(Path(__file__).resolve().parents[2].glob("autotune_configs/*/*.json"))
KEY = {
    "head_size": 128,
    "v_head_size": 128,
    "dtype": "bf16",
    "kv_dtype": "bf16",
    "kv_layout": "plain",
    "block_size": 16,
    "group": 8,
    "rows": 8,
    "num_heads": 64,
    "batch": 4,
    "max_seqlen_q": 1,
    "max_seqlen_k": 4096,
    "units_per_cu": 0.5,
    "features": "none",
}
ROW = {"when": {}, "config": {"num_warps": 4}, "provenance": {"kind": "default", "note": "test"}}


def document(**changes):
    return {"schema": 1, "arch": "gfx942", "kernel": "merge", "rows": [ROW], **changes}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Put a table where it is found first."""
    monkeypatch.setenv("TRITONATTN_TABLES", str(tmp_path))
    table.forget()

    def put(content, arch_name="gfx942", kernel="merge"):
        path = tmp_path / arch_name / f"{kernel}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        table.forget()
        return path

    yield put
    table.forget()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_shipped_tables(path):
    content = json.loads(path.read_text())
    jsonschema.validate(content, schema.tables())
    rows = table.load(path)
    for row in rows:
        if path.parent.name.startswith("gfx"):
            assert row.provenance["kind"] in ("modelled", "default"), "nothing was timed on AMD hardware"


@pytest.mark.parametrize("name", ["gfx942", "gfx950", "sm_90", "interpreter"])
def test_every_arch_has_every_kernel(name):
    kernels = schema.tables()["properties"]["kernel"]["enum"]
    for kernel in kernels:
        row = table.lookup(kernel, arch.by_name(name), **KEY)
        assert row.options["num_warps"] >= 1 and row.where.startswith(f"{name}/{kernel}.json row ")


BROKEN = {
    "unknown key": document(extra=1),
    "unknown config key": document(rows=[{**ROW, "config": {"num_warps": 4, "BLOK_M": 64}}]),
    "unknown when key": document(rows=[{**ROW, "when": {"headsize": 64}}]),
    "wrong value": document(rows=[{**ROW, "config": {"num_warps": 3}}]),
    "a flag for a number": document(rows=[{**ROW, "config": {"num_warps": True}}]),
    "wrong type": document(rows=[{**ROW, "when": {"head_size": "128"}}]),
    "wrong dtype": document(rows=[{**ROW, "when": {"dtype": ["bf16", "int4"]}}]),
    "empty range": document(rows=[{**ROW, "when": {"head_size": {}}}]),
    "missing config": document(rows=[{**ROW, "config": {}}]),
    "missing provenance": document(rows=[{"when": {}, "config": {"num_warps": 4}}]),
    "measured without a device": document(rows=[{**ROW, "provenance": {"kind": "measured", "note": ""}}]),
    "no rows": document(rows=[]),
    "other schema": document(schema=2),
    "prefill without tiles": document(kernel="prefill"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_own_validation_agrees_with_jsonschema(name):
    assert schema.errors(BROKEN[name])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(BROKEN[name], schema.tables())


def test_sound_document():
    assert schema.errors(document()) == []


def test_errors_name_the_place():
    assert schema.errors(BROKEN["unknown config key"])[0].startswith("rows[0].config: unknown key 'BLOK_M'")


@pytest.mark.parametrize("text", ['{"schema": 1, "ar', "", "[]", json.dumps(BROKEN["unknown config key"])])
def test_broken_file_is_named_twice(write, text):
    path = write(text)
    for _ in range(2):
        with pytest.raises(table.TableError, match=str(path)):
            table.lookup("merge", arch.by_name("gfx942"), **KEY)


def test_wrong_place_is_an_error(write):
    write(document(), arch_name="gfx950")
    with pytest.raises(table.TableError, match="is for gfx942/merge"):
        table.lookup("merge", arch.by_name("gfx950"), **KEY)


def test_last_row_must_hold_always(write):
    write(document(rows=[{**ROW, "when": {"head_size": 64}}]))
    with pytest.raises(table.TableError, match="last row must hold always"):
        table.lookup("merge", arch.by_name("gfx942"), **KEY)


@pytest.mark.parametrize(
    "when, holds",
    [
        ({"head_size": 128}, True),
        ({"head_size": [64, 96]}, False),
        ({"head_size": {"min": 128, "max": 128}}, True),
        ({"head_size": {"min": 129}}, False),
        ({"units_per_cu": {"max": 0.5}, "kv_layout": "plain"}, True),
        ({"units_per_cu": {"max": 0.5}, "kv_layout": ["preshuffled"]}, False),
        ({"compute_units": {"max": 100}}, False),
    ],
)
def test_first_row_that_holds(write, when, holds):
    write(document(rows=[{**ROW, "when": when}, ROW]))
    assert table.lookup("merge", arch.by_name("gfx942"), **KEY).where == f"gfx942/merge.json row {0 if holds else 1}"


def test_compute_units_select(write):
    write(document(rows=[{**ROW, "when": {"compute_units": {"max": 100}}}, ROW]))
    assert table.lookup("merge", arch.by_name("MI308X"), **KEY).where.endswith("row 0")
    assert table.lookup("merge", arch.by_name("MI300X"), **KEY).where.endswith("row 1")


def test_key_that_the_caller_lacks(write):
    write(document(rows=[{**ROW, "when": {"group": 8}}, ROW]))
    with pytest.raises(table.TableError, match="depends on 'group'"):
        table.lookup("merge", arch.by_name("gfx942"), head_size=128)


def test_key_that_no_row_may_ask_for():
    with pytest.raises(TypeError, match="'headsize' is not a lookup key"):
        table.lookup("merge", arch.by_name("gfx942"), headsize=128)


def test_unknown_arch_warns_once_and_says_how_to_tune(monkeypatch):
    monkeypatch.setattr(arch, "_warned", set())
    table.forget()
    with pytest.warns(RuntimeWarning, match="no tables for gfx999: .* `tritonattn tune` writes"):
        row = table.lookup("decode", arch.nearest("gfx999"), **KEY)
    assert row.where.startswith("gfx950/")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table.lookup("prefill", arch.nearest("gfx999"), **KEY)


def test_own_tables_of_an_unknown_arch(write):
    write(document(arch="gfx999"), arch_name="gfx999")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert table.lookup("merge", arch.nearest("gfx999"), **KEY).where == "gfx999/merge.json row 0"


def test_two_arches_in_one_process():
    first, second = (table.lookup("decode", arch.by_name(name), **KEY) for name in ("gfx942", "gfx950"))
    assert first.where.startswith("gfx942/") and second.where.startswith("gfx950/")


def test_row_splits_constexprs_from_options():
    row = table.lookup("decode", arch.by_name("gfx942"), **KEY)
    assert set(row.constexprs) >= {"BLOCK_N", "NUM_STAGES"} and "num_warps" in row.options
    assert "form" not in row.options and row.config["form"] in ("tile", "wave")


def test_pinned_candidate_is_what_an_op_finds():
    config = {"BLOCK_N": 32, "num_warps": 2}
    candidate = table.pin(arch.by_name("gfx942"), decode=config)
    with arch.assume(candidate):
        assert dict(table.lookup("decode", arch.detect("cpu"), **KEY).config) == config
        assert table.lookup("merge", arch.detect("cpu"), **KEY).where.startswith("gfx942/")
    assert dict(table.lookup("decode", arch.by_name("gfx942"), **KEY).config) != config


@pytest.fixture
def two_gpus(monkeypatch):
    """An MI300X as cuda:0 and an MI355X as cuda:1, as PyTorch for ROCm would describe them."""
    found = [
        SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=304, total_memory=192e9),
        SimpleNamespace(gcnArchName="gfx950:sramecc+:xnack-", multi_processor_count=256, total_memory=288e9),
    ]
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found[index])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.delenv("TRITONATTN_ARCH", raising=False)
    arch._of_device.cache_clear()
    yield
    arch._of_device.cache_clear()


def test_two_devices_get_their_own_rows(two_gpus):
    problem = AttnProblem(32, 8, 128, 128, torch.bfloat16, torch.bfloat16, "plain", 16, True)
    for _ in range(2):  # caches on the way do not mix them
        for index, name, units in ((0, "gfx942", 304), (1, "gfx950", 256)):
            facts = arch.detect(torch.device("cuda", index))
            assert (facts.name, facts.compute_units) == (name, units)
            assert prefill_row(facts, problem, 1024).where.startswith(f"{name}/prefill.json")
            plan = decode_plan(facts, problem, 1, 1, 65536)
            assert plan.row.where.startswith(f"{name}/decode.json")
            assert plan.num_splits <= plan.row.config["programs_per_cu"] * units / 8
    assert arch.detect("cuda") is arch.detect("cuda:0") is not arch.detect("cuda:1")


def test_a_broken_table_stops_the_op_each_time_and_only_until_mended(write):
    path = write('{"schema": 1, "ar', arch_name="interpreter")
    out, lse = torch.zeros(3, 2, 16), torch.zeros(2, 3)
    for _ in range(2):
        with pytest.raises(table.TableError, match=f"{path}: not readable as JSON"):
            tritonattn.merge_attn_states(out, lse, out, lse)
    path.unlink()
    table.forget()
    assert tritonattn.merge_attn_states(out, lse, out, lse).shape == out.shape
