"""``python -m omniattn.cli`` is ``omniattn``."""

from __future__ import annotations

import sys

from omniattn.cli import main

if __name__ == "__main__":
    sys.exit(main())
