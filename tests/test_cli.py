"""The command line: what it lists, what it loads, what it answers."""
from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tritonattn.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]


def command(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "tritonattn", *words], cwd=ROOT, capture_output=True, text=True)


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    listed = " ".join(capsys.readouterr().out.split())
    for name, (_, summary) in COMMANDS.items():
        assert f"{name} {summary}" in listed


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there_and_has_help(name, capsys):
    module = importlib.import_module(COMMANDS[name][0])
    module.add_arguments(argparse.ArgumentParser())
    assert callable(module.run)
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert "usage: tritonattn" in capsys.readouterr().out


def test_help_loads_no_command():
    modules = [module for module, _ in COMMANDS.values()]
    code = f"""
import sys
from tritonattn.cli import main
try: main(["--help"])
except SystemExit: pass
print(*[name for name in {modules!r} if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.strip() == ""


@pytest.mark.parametrize("words", [[], ["nothing"], ["info", "--nothing"]])
def test_a_wrong_command_line_is_refused(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_an_expected_error_is_one_line(monkeypatch, capsys):
    def fail(args):
        raise ValueError("max_tokens must be >= 1, got 0")

    monkeypatch.setattr("tritonattn.info.run", fail)
    assert main(["info"]) == 2
    assert capsys.readouterr().err == "tritonattn info: max_tokens must be >= 1, got 0\n"
    with pytest.raises(ValueError, match="got 0"):
        main(["--traceback", "info"])


def test_info_as_a_module_and_as_json():
    shown = command("info")
    assert shown.returncode == 0, shown.stderr
    for word in ("tritonattn", "torch", "triton", "device", "tables folders"):
        assert word in shown.stdout
    facts = json.loads(command("info", "--json").stdout)
    assert facts["device"]
    assert isinstance(facts["tables"], dict)
