"""Where tables are printed."""

from __future__ import annotations

from rich.console import Console

WIDE = 200


def console() -> Console:
    """As wide as the terminal; a file or a pipe takes tables whole, where rich would fold them to 80 columns."""
    made = Console()
    return made if made.is_terminal else Console(width=max(WIDE, made.width))
