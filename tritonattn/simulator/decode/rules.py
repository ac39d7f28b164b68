"""The registry of decoding rules: a name pattern, and what fills in the record.

A rule is called as rule(inst, line, match, maps). It takes from `line.operands` and `line.modifiers` all that it understands;
what is left over is refused.
"""

import re

from ..core import operations

RULES: list = []


def rule(pattern):
    def register(fn):
        RULES.append((re.compile(pattern), fn))
        return fn

    return register


def handler(inst, name):
    inst.op = operations()[name][0]
