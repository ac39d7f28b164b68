"""Every check of user input: one error before any launch, with all reasons in it.

A ``check_*`` function takes what its public op takes and returns the facts that the launchers need. The error is a
`TypeError` when all that is wrong are types and dtypes, else a `ValueError`. Text is only built for what fails: these
functions run on every call, up to once per layer and token.

What only the device knows (lengths, table entries) is not checked here: reading it would wait for the GPU.
"""

from tritonattn.checks.mha import Ranks, check_decode, check_extend, check_gather, check_merge, check_prefill, check_reshape_and_cache
from tritonattn.checks.mla import (
    LATENT_STEP,
    MAX_LATENT,
    MAX_ROPE,
    check_mla_cache_write,
    check_mla_decode,
    check_mla_extend,
    check_mla_gather,
    check_up_projected,
)
from tritonattn.checks.reasons import HEAD_SIZE_STEP, MAX_HEAD_SIZE, MIN_HEAD_SIZE
from tritonattn.checks.router import (
    check_absorbed,
    check_lengths,
    check_mla_router,
    check_mla_run,
    check_plan,
    check_projected,
    check_router,
    check_run,
)

__all__ = [
    "HEAD_SIZE_STEP", "LATENT_STEP", "MAX_HEAD_SIZE", "MAX_LATENT", "MAX_ROPE", "MIN_HEAD_SIZE", "Ranks",
    "check_absorbed", "check_decode", "check_extend", "check_gather", "check_lengths", "check_merge", "check_mla_cache_write",
    "check_mla_decode", "check_mla_extend", "check_mla_gather", "check_mla_router", "check_mla_run",
    "check_plan", "check_prefill", "check_projected", "check_reshape_and_cache", "check_router", "check_run",
    "check_up_projected",
]  # fmt: skip
