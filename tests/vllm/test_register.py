"""Registration, resolution, selection and refusals."""

import importlib.metadata
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import tritonattn.integrations.vllm as plugin

MHA, MLA = AttentionBackendEnum.TRITON_ATTN, AttentionBackendEnum.TRITON_MLA


def test_resolution():
    plugin.register()
    plugin.register()
    assert MHA.get_path() == plugin.MHA and MLA.get_path() == plugin.MLA
    for slot in (MHA, MLA):
        backend = slot.get_class()
        assert backend.__module__.startswith("tritonattn.") and backend.get_name() == slot.name
        assert f"{backend.__module__}.{backend.__qualname__}" == slot.get_path()
        assert pickle.loads(pickle.dumps(slot)) is slot
        assert backend.get_impl_cls().__module__.startswith("tritonattn.") and backend.get_builder_cls().__module__.startswith("tritonattn.")
    assert MLAPrefillBackendEnum.CUSTOM.get_class().__module__ == "tritonattn.integrations.vllm.mla_prefill"


@pytest.mark.parametrize("there", [True, False, None], ids=["installed", "unavailable", "unimportable"])
def test_prefill_backend_where_no_flash_attn_is(monkeypatch, there):
    stock = type("FlashAttnPrefillBackend", (), {"is_available": classmethod(lambda _: there)})
    module = None if there is None else SimpleNamespace(FlashAttnPrefillBackend=stock)
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.mla.prefill.flash_attn", module)
    chosen = MLAPrefillBackendEnum.FLASH_ATTN.get_class()
    assert chosen is stock if there else chosen is MLAPrefillBackendEnum.CUSTOM.get_class()


def test_entry_point_and_what_importing_it_touches():
    (point,) = [p for p in importlib.metadata.entry_points(group="vllm.general_plugins") if p.name == "tritonattn"]
    assert point.value == "tritonattn.integrations.vllm:register"
    code = "import sys, tritonattn.integrations.vllm; print([m for m in ('torch', 'triton', 'vllm') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_untested_version(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.34.0")
    with pytest.raises(RuntimeError, match=r"tested with vLLM 0\.33\.0, not with 0\.34\.0"):
        plugin.register()
    monkeypatch.setenv(plugin.ALLOW_UNTESTED, "1")
    plugin.register()
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.33.0+rocm720")
    monkeypatch.delenv(plugin.ALLOW_UNTESTED)
    plugin.register()


def reasons(slot=MHA, **changes):
    mla = slot is MLA
    facts = {
        "head_size": 576 if mla else 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, "use_mla": mla, "has_sink": False,
        "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False, "device_capability": DeviceCapability(9, 4),
        "attn_type": AttentionType.DECODER,
    }  # fmt: skip
    return slot.get_class().validate_configuration(**(facts | changes))


@pytest.mark.parametrize("facts", [
    {}, {"dtype": torch.float32}, {"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8_e4m3"}, {"head_size": 32}, {"head_size": 512},
    {"block_size": 544}, {"has_sink": True}, {"has_sliding_window": True}, {"use_non_causal": True}, {"use_batch_invariant": True},
    {"use_kv_connector": True}, {"use_mm_prefix": True}, {"use_rswa": True}, {"attn_type": AttentionType.ENCODER},
    {"attn_type": AttentionType.ENCODER_ONLY}, {"attn_type": AttentionType.ENCODER_DECODER}, {"kv_cache_dtype": "int8_per_token_head"},
], ids=str)  # fmt: skip
def test_mha_takes(facts):
    assert reasons(**facts) == []


@pytest.mark.parametrize("facts, reason", [
    ({"kv_cache_dtype": "fp8_e5m2"}, "e4m3"), ({"use_dcp": True}, "DCP"), ({"use_pcp": True}, "PCP"), ({"block_size": 24}, "block_size"),
    ({"head_size": 16}, "head_size"), ({"use_per_head_quant_scales": True}, "per-head"), ({"use_adaptive_verification": True}, "mismatch"),
], ids=str)  # fmt: skip
def test_mha_refuses(facts, reason):
    assert any(reason in text for text in reasons(**facts))


@pytest.mark.parametrize("facts", [{}, {"kv_cache_dtype": "fp8"}, {"use_dcp": True}, {"use_batch_invariant": True}, {"use_non_causal": True}], ids=str)
def test_mla_takes(facts):
    assert reasons(MLA, **facts) == []


@pytest.mark.parametrize("facts, reason", [
    ({"has_sliding_window": True}, "sliding"), ({"use_pcp": True}, "PCP"), ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype"),
    ({"use_adaptive_verification": True}, "mismatch"), ({"dtype": torch.float32}, "dtype"),
], ids=str)  # fmt: skip
def test_mla_refuses(facts, reason):
    assert any(reason in text for text in reasons(MLA, **facts))


def test_layouts(monkeypatch):
    backend = MHA.get_class()
    monkeypatch.setenv("TRITONATTN_VLLM_KV_LAYOUT", "packed")
    assert backend.supported_kv_cache_layouts() is None
    monkeypatch.setenv("TRITONATTN_VLLM_KV_LAYOUT", "preshuffled")
    assert {layout.name for layout in backend.supported_kv_cache_layouts()} == {"LBHNC", "BLHNC", "LHBNC", "BHLNC"}
    monkeypatch.setenv("TRITONATTN_VLLM_KV_LAYOUT", "shuffled")
    with pytest.raises(ValueError, match="packed, preshuffled"):
        backend.supported_kv_cache_layouts()


@pytest.mark.parametrize("arch, layout", [("gfx942", "preshuffled"), ("gfx950", "preshuffled"), ("sm_90", "packed")])
def test_default_layout_follows_the_device(monkeypatch, arch, layout):
    from tritonattn.integrations.vllm.layout import chosen

    monkeypatch.delenv("TRITONATTN_VLLM_KV_LAYOUT", raising=False)
    monkeypatch.setenv("TRITONATTN_ARCH", arch)
    assert chosen() == layout


def test_info_says_what_vllm_uses(monkeypatch):
    from tritonattn.integrations.vllm import selfcheck

    notes = []
    assert selfcheck.describe(notes, load=False)["vllm attention"][0].startswith(f"TRITON_ATTN: {plugin.MHA}") and not notes
    assert selfcheck.describe(notes, load=True)["vllm attention"] == [f"TRITON_ATTN: {plugin.MHA}, seen", f"TRITON_MLA: {plugin.MLA}, seen"]
    monkeypatch.setenv("VLLM_PLUGINS", "others")
    assert "VLLM_PLUGINS=others" in selfcheck.describe(notes, load=False)["vllm attention"][0] and "its own" in notes[0]
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setattr(plugin, "TESTED", ("0.1",))
    assert "not with 0.33.0" in selfcheck.describe(notes, load=False)["vllm attention"][1]
