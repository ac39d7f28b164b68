"""``tritonattn fuzz``: random calls of every public op for a bounded time, sound ones held against float64, unsound ones to their refusal.

    tritonattn fuzz --minutes 10 --seed 1
    tritonattn fuzz --op decode_attention --op Router
    tritonattn fuzz --replay '{"op": "decode_attention", "lens": [[1, 17]]}'

Runs where the kernels run: on the GPU, in Triton's interpreter (TRITON_INTERPRET=1), on a simulated GPU (TRITONATTN_SIM=gfx942). What fails
is shrunk to the few choices that matter and printed as a command that does it again; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shlex
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

EXAMPLES = 12  # drawn at a time
WRONG = 4  # calls to be refused for each sound one, which takes longer
SHRINK_SECONDS = 60.0  # for a failure; and for all of them beyond the time given
GIVE_UP = 3  # failures of one kind of call


@dataclass
class Failure:
    recipe: dict[str, Any]
    problem: str

    @property
    def command(self) -> str:
        return f"tritonattn fuzz --replay {shlex.quote(json.dumps(self.recipe))}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=5.0, help="default 5")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--op", action="append", default=[], help="only this op; repeatable")
    parser.add_argument("--only", choices=("sound", "wrong"), help="only sound calls, or only those to be refused")
    parser.add_argument("--longest", type=int, default=0, metavar="N", help="most keys of a sequence (default: 90, on a GPU 3000)")
    parser.add_argument("--replay", metavar="JSON", help="run this one call, as printed for a failure")


def run(args: argparse.Namespace) -> int:
    try:
        import hypothesis  # noqa: F401
    except ImportError:
        raise ImportError("fuzz needs hypothesis: pip install hypothesis") from None
    from tritonattn.fuzz.recipes import OPS
    from tritonattn.where import working_device

    device = working_device()
    if args.replay:
        problem = try_recipe(parse_recipe(args.replay), device)
        print(problem or "right")
        return 1 if problem else 0
    reasons = []
    if unknown := [op for op in args.op if op not in OPS]:
        reasons.append(f"--op must be one of {', '.join(OPS)}, got {', '.join(unknown)}")
    if not 0 < args.minutes < float("inf"):
        reasons.append(f"--minutes must be above 0 and finite, got {args.minutes}")
    if args.longest < 0:
        reasons.append(f"--longest must be at least 0, got {args.longest}")
    if reasons:
        raise ValueError("; ".join(reasons))
    path = os.path.join(tempfile.gettempdir(), f"tritonattn-fuzz-{os.getpid()}.json")
    print(f"should this process die, the call that did it is in {path}", flush=True)
    counts, failures = explore(
        args.op or list(OPS), device, args.minutes * 60, args.seed, args.longest or (3000 if device.type == "cuda" else 90), path, args.only
    )
    os.unlink(path)
    for (op, kind), count in sorted(counts.items()):
        print(f"{op}: {count} {kind} calls")
    for failure in failures:
        print(f"FAILED {failure.problem}\n  {failure.command}")
    print(f"{sum(counts.values())} calls, {len(failures)} failures")
    return 1 if failures else 0


def parse_recipe(text: str) -> dict[str, Any]:
    """A recipe as `Failure.command` prints it. ValueError for anything else."""
    from tritonattn.fuzz.calls import build
    from tritonattn.fuzz.recipes import DEFAULTS, OPS

    try:
        recipe = json.loads(text)
    except ValueError:
        recipe = None
    if not isinstance(recipe, dict) or recipe.get("op") not in OPS:
        raise ValueError(f"--replay must be a JSON object whose \"op\" is one of {', '.join(OPS)}, got {text!r:.200}")
    unknown = sorted(set(recipe) - set(DEFAULTS) - {"op"})
    if unknown:
        raise ValueError(f"--replay must hold no other choices than {', '.join(DEFAULTS)}; got {', '.join(unknown)}")
    try:
        build(recipe)
    except Exception as error:
        raise ValueError(f"--replay describes no call ({type(error).__name__}: {error}), got {text!r:.200}") from None
    return recipe


def try_recipe(recipe: dict[str, Any], device: Any) -> str:
    """Runs one call; what is wrong, or nothing."""
    from tritonattn.fuzz.calls import build
    from tritonattn.fuzz.wrong import judge, make_wrong

    call, name, how = build(recipe), "", ""
    if recipe.get("wrong") is not None:
        try:
            name, how = make_wrong(call, recipe["wrong"])
        except LookupError:  # this call has no such argument, or not in that state
            return ""
    try:
        result = call.run(device)
    except Exception as error:
        if name:
            return "; ".join(judge(call, name, how, error))
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{recipe['op']} raised {type(error).__name__}: {str(error)[:600]} ({os.path.basename(where.filename)}:{where.lineno})"
    problems = judge(call, name, how, None) if name else call.verify(result)
    return f"{recipe['op']}: {'; '.join(problems)}" if problems else ""


def named(recipe: dict[str, Any]) -> dict[str, Any]:
    """With the wrong argument told by its name, so that it stays when the recipe changes."""
    from tritonattn.fuzz.calls import build
    from tritonattn.fuzz.wrong import make_wrong

    return recipe | {"wrong": make_wrong(build(recipe), recipe["wrong"])} if recipe.get("wrong") is not None else recipe


def explore(
    ops: list[str], device: Any, seconds: float, seed: int, longest: int, path: str, only: str | None = None
) -> tuple[Counter[tuple[str, str]], list[Failure]]:
    """A call of every op in turn until the time is over: how many calls of each, and what failed, each kind of failure once.

    The time is looked at before every call; what failed is shrunk for at most a minute beyond it, all failures together.
    """
    from tritonattn.tuning.arch import detect

    until, counts, failures = time.monotonic() + seconds, Counter[tuple[str, str]](), dict[str, Failure]()
    lanes = [(op, kind) for op in ops for kind in ([only] if only else ["sound", *["wrong"] * WRONG])]
    random.Random(seed).shuffle(lanes)  # on a slow machine the time may not do for all: another seed begins elsewhere
    hopeless: Counter[tuple[str, str]] = Counter()
    fp8 = tuple(detect(device).fp8_types)

    def fails(recipe: dict[str, Any]) -> str:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(recipe, file)
        counts[recipe["op"], "sound" if recipe.get("wrong") is None else "wrong"] += 1
        return try_recipe(recipe, device)

    streams = [(lane, recipes_of(*lane, f"{seed} {number}", longest, fp8)) for number, lane in enumerate(lanes)]
    for lane, stream in itertools.cycle(streams):
        if time.monotonic() >= until or all(hopeless[lane] >= GIVE_UP for lane in lanes):
            break
        if hopeless[lane] >= GIVE_UP:
            continue
        recipe = next(stream)
        problem = fails(recipe)
        if problem:
            hopeless[lane] += 1
            failure = shrink(Failure(named(recipe), problem), fails, min(time.monotonic(), until) + SHRINK_SECONDS)
            failures.setdefault(f"{lane[0]} {re.sub(r'[0-9.e+-]+', '#', failure.problem)[:120]}", failure)
    return counts, list(failures.values())


def recipes_of(op: str, kind: str, seed: str, longest: int, fp8: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Without end; of those that are drawn together the plainest come first."""
    rng = random.Random(seed)
    while True:
        yield from draw(op, kind, rng.getrandbits(32), longest, fp8)


def draw(op: str, kind: str, seed: int, longest: int, fp8: tuple[str, ...]) -> list[dict[str, Any]]:
    """A few recipes of `recipes_of`."""
    import hypothesis
    from hypothesis import strategies as st

    from tritonattn.fuzz.recipes import recipes

    found = []
    strategy = recipes(op, fp8, longest)
    if kind == "wrong":
        strategy = st.tuples(strategy, st.integers(0, 999)).map(lambda pair: pair[0] | {"wrong": pair[1]})

    @hypothesis.settings(
        max_examples=EXAMPLES, database=None, deadline=None, phases=(hypothesis.Phase.generate,), suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.seed(seed)
    @hypothesis.given(strategy)
    def one(recipe):
        found.append(recipe)

    one()
    return found


def shrink(failure: Failure, fails: Callable[[dict[str, Any]], str], until: float) -> Failure:
    """Leaves out choices and sequences, and makes lengths smaller, as long as it still fails and there is time."""
    smaller = True
    while smaller:
        smaller = False
        for recipe in _simpler(failure.recipe):
            if time.monotonic() >= until:
                return failure
            problem = fails(recipe)
            if problem:
                failure, smaller = Failure(recipe, problem), True
                break
    return failure


def _simpler(recipe: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Recipes with one thing less, the boldest first."""
    for name in recipe:
        if name not in ("op", "wrong", "lens"):
            yield {key: value for key, value in recipe.items() if key != name}
    lens = recipe.get("lens", [])
    for i in range(len(lens)):
        yield recipe | {"lens": lens[:i] + lens[i + 1 :]}
    for i, pair in enumerate(lens):
        for at, length in enumerate(pair):
            for less in dict.fromkeys((0, 1, length // 2, length - 1)):
                if 0 <= less < length:
                    yield recipe | {"lens": [*lens[:i], [less if j == at else n for j, n in enumerate(pair)], *lens[i + 1 :]]}
