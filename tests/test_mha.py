"""The MHA ops against float64: every dtype, layout, feature and awkward size, a little of each in every case."""

import cases
import pytest
import torch

SINKS = torch.tensor([0.5, -1.0, 2.0])
SLOPES = torch.tensor([0.5, 0.25, 0.0625])
RAGGED = [(5, 37), (1, 16), (0, 0), (33, 70), (2, 2)]
FEATURES = {
    "plain": {},
    "full": {"causal": False},
    "window": {"window_size": (9, 0)},
    "two-sided window": {"causal": False, "window_size": (9, 3)},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": SLOPES},
    "sinks": {"sinks": SINKS},
    "scale": {"softmax_scale": 0.3},
    "everything": {"window_size": (20, 0), "softcap": 5.0, "alibi_slopes": SLOPES, "sinks": SINKS, "softmax_scale": 0.2},
}


@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
def test_prefill_features(device, options):
    cases.prefill([(37, 37), (1, 1), (0, 0), (70, 75), (3, 20)], options={"causal": True} | options).check(device)


@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
def test_extend_features(device, options):
    cases.extend(RAGGED, layout="hnd", options=options).check(device)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
def test_decode_features(device, options, num_splits):
    cases.decode([(1, 37), (3, 16), (0, 0), (2, 150), (2, 2)], options=options | {"num_splits": num_splits}).check(device)
