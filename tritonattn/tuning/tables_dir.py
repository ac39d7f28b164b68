"""Where the tuning tables lie: inside the package in a wheel, beside it in a checkout (editable installs included)."""
from __future__ import annotations

from pathlib import Path

NAME = "autotune_configs"


def tables_dir() -> Path:
    """The folder that holds ``<arch>/<kernel>.json``. FileNotFoundError where an install lost it."""
    package = Path(__file__).resolve().parents[1]
    places = [package / NAME, package.parent / NAME]
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError("no tuning tables: looked for " + " and ".join(map(str, places)))
