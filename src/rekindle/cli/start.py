"""The entry point of the `rekindle` command: loads the command line and runs it."""

from __future__ import annotations

from rekindle.cli.interrupts import QuietImports


def main() -> None:
    with QuietImports():
        from rekindle.cli.main import main as run
    run()


if __name__ == "__main__":
    main()
