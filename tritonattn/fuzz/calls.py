"""From a recipe the call."""

from __future__ import annotations

from tritonattn.fuzz.inputs import Call
from tritonattn.fuzz.mha import Mha
from tritonattn.fuzz.mla import Mla
from tritonattn.fuzz.moves import Moves
from tritonattn.fuzz.recipes import MLA as MLA_OPS
from tritonattn.fuzz.recipes import MOVES, Recipe, settle


def build(recipe: Recipe) -> Call:
    full = settle(recipe)
    family = Moves if full["op"] in MOVES else Mla if full["op"] in MLA_OPS else Mha
    return getattr(family(full), f"build_{full['op']}")()
