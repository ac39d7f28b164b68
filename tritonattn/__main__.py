"""``python -m tritonattn``: the same as the ``tritonattn`` command."""
import sys

from tritonattn.cli import main

sys.exit(main())
