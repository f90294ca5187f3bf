"""``python -m aiosync``."""

from __future__ import annotations

from aiosync.cli import main

if __name__ == "__main__":
    main()
