"""Lets `python -m rekindle` do the same as the command `rekindle`."""

from __future__ import annotations

from rekindle.cli.start import main

if __name__ == "__main__":
    main()
