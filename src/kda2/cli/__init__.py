"""The `kda2` command. It needs the workbench's packages; without them it says which extra brings them."""

from __future__ import annotations

import signal
import sys

from kda2.errors import KDA2Error
from kda2.workbench import extras


def main() -> None:
    """Entry point. Exit codes: 0 all well; 1 a verdict, check or measurement failed; 2 bad usage or input;
    3 an optional package is missing; 130 stopped by Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what batch systems send is handled as Ctrl-C
    try:
        for package in ("typer", "rich", "pydantic"):
            extras.load(package, "the kda2 command")
        app = extras.load("kda2.cli.app", "the kda2 command").app
    except KDA2Error as e:
        print(f"kda2: {e}", file=sys.stderr)
        sys.exit(3)
    app()
