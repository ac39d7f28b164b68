"""Host time that a backend takes in a step: building metadata, then the calls of its layers until they return."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from functools import wraps
from typing import Any

LAYER_CALLS = ("do_kv_cache_update", "forward", "forward_mqa", "forward_mha")  # what a layer has of them; none calls another


class HostTime:
    """Clocks in the builder and the layers of a backend, from now on. Steps of decodes alone are kept apart from the others.

    Right for one builder, whose layers run between one build and the next, and where the layers run at all: not in the replay of a graph.
    """

    def __init__(self, backend: Any) -> None:
        self._steps: dict[str, list[dict[str, float]]] = defaultdict(list)
        self._step: dict[str, float] = {}
        self._restore: list[Any] = []
        self._watch(backend.get_builder_cls(), "build", self._begin)
        for name in LAYER_CALLS:
            if hasattr(backend.get_impl_cls(), name):
                self._watch(backend.get_impl_cls(), name, self._call)

    def _watch(self, owner: type, name: str, tell: Any) -> None:
        function = getattr(owner, name)

        @wraps(function)
        def timed(*args, **kwargs):
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            tell((time.perf_counter() - begin) * 1e6, result)
            return result

        setattr(owner, name, timed)
        self._restore.append(lambda: setattr(owner, name, function))

    def stop(self) -> None:
        for restore in self._restore:
            restore()

    def _begin(self, us: float, metadata: Any) -> None:
        self._step = {"build": us, "layers": 0.0}
        self._steps["decodes" if metadata.max_query_len == 1 else "mixed"].append(self._step)

    def _call(self, us: float, _: Any) -> None:
        if self._step:
            self._step["layers"] += us

    def report(self) -> dict[str, dict[str, float]]:
        """Per kind of step the number of steps, and medians in microseconds: of a build, of the calls of all layers, and of both together."""
        found = {}
        for kind, steps in self._steps.items():
            medians = {part: round(statistics.median(step[part] for step in steps), 1) for part in ("build", "layers")}
            found[kind] = {"steps": len(steps), **medians, "both": round(statistics.median(sum(step.values()) for step in steps), 1)}
        return found
