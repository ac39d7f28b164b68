"""The ``tritonattn`` command: names the subcommands and loads only the one that runs.

A subcommand is a module with ``add_arguments(parser)`` and ``run(args) -> int | None`` (the exit code).
"""
from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

from tritonattn import environment

COMMANDS = {
    "info": ("tritonattn.info", "device, arch, versions and the tables found"),
    "demo": ("tritonattn.demo", "serve a real model through prefill, extend and decode, and check every token"),
    "explain": ("tritonattn.explain", "which path, table row and split each request of a batch takes, and why"),
    "check": ("tritonattn.tuning.check", "compile every table row without a GPU and judge the code"),
    "warmup": ("tritonattn.warmup", "compile ahead for a model, so that serving never does"),
    "model": ("tritonattn.tuning.validate", "hold the cost model against a GPU, or against figures measured on one"),
    "tune": ("tritonattn.tuning.search", "sweep configurations for a model or shape and write tables"),
    "bench": ("tritonattn.bench", "time the kernels side by side with others, each with its error"),
    "soak": ("tritonattn.soak", "serve random requests for minutes, and look for wrong rows, leaks and late compiles"),
    "fuzz": ("tritonattn.fuzz", "random calls of every op, sound and unsound, against float64 and the named refusal"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``argv`` (default: the process's own arguments) and returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    name = next((word for word in argv if not word.startswith("-")), None)
    try:
        if name in COMMANDS:
            environment.check()
        args = _parser(name).parse_args(argv, argparse.Namespace(argv=argv))
        return args.run(args) or 0
    except BrokenPipeError:
        return 1
    except KeyboardInterrupt:
        return 130
    except (ValueError, TypeError, OSError, ImportError) as error:
        if "--traceback" in argv:
            raise
        print(f"tritonattn {name}: {error}", file=sys.stderr)
        return 2


def version() -> str:
    try:
        return importlib.metadata.version("tritonattn")
    except importlib.metadata.PackageNotFoundError:
        return "a checkout, not installed"


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser of every command; only the chosen one's module is imported, to add its arguments."""
    parser = argparse.ArgumentParser(prog="tritonattn", description="Attention kernels for LLM serving, in Triton.")
    parser.add_argument("--version", action="version", version=f"tritonattn {version()}")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == chosen:
            implementation = importlib.import_module(module)
            implementation.add_arguments(command)
            command.set_defaults(run=implementation.run)
    return parser
