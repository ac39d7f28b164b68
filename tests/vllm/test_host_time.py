"""Host time of metadata and layers, on stand-ins whose time is known and on a layer under vLLM's interface."""

import time
from types import SimpleNamespace

import pytest
from harness import Layer

from tritonattn.integrations.vllm import bench
from tritonattn.integrations.vllm.host_time import HostTime


class Builder:
    def build(self, longest):
        time.sleep(0.002)
        return SimpleNamespace(max_query_len=longest)


class Impl:
    def do_kv_cache_update(self):
        time.sleep(0.001)

    def forward(self):
        time.sleep(0.003)


def test_each_step_is_a_build_and_its_layers():
    build, forward = Builder.build, Impl.forward
    clock = HostTime(SimpleNamespace(get_builder_cls=lambda: Builder, get_impl_cls=lambda: Impl))
    Impl().forward()  # of no step
    for longest in (1, 7, 1, 1):
        Builder().build(longest)
        for _ in range(2):
            Impl().do_kv_cache_update()
            Impl().forward()
    found = clock.report()
    clock.stop()
    assert Builder.build is build and Impl.forward is forward
    assert {kind: times["steps"] for kind, times in found.items()} == {"decodes": 3, "mixed": 1}
    for times in found.values():
        assert times["build"] >= 2000 and times["layers"] >= 8000 and times["both"] >= 10_000


def test_steps_of_a_layer_are_counted():
    layer = Layer()
    clock = HostTime(layer.backend)
    try:
        layer.step([(1, 20), (1, 9)])
        layer.step([(1, 20), (9, 30), (5, 5)])
    finally:
        clock.stop()
    found = clock.report()
    assert set(found) == {"decodes", "mixed"} and all(0 < times["build"] < times["layers"] for times in found.values())


def test_graphs_leave_nothing_to_time(capsys):
    with pytest.raises(SystemExit):
        bench.main(["llama", "--host"])
    assert "--host needs --eager" in capsys.readouterr().err
