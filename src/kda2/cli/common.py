"""What every command shares: the console, errors as one line, and exit codes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec

import typer
from rich.console import Console

from kda2.errors import InvalidType, InvalidValue, KDA2Error, MissingExtra

FAILED, BAD_USAGE, MISSING, STOPPED = 1, 2, 3, 130
# a pipe has no width; tables need room
out = Console(width=None if sys.stdout.isatty() else 160)
err = Console(stderr=True)

P = ParamSpec("P")


def command(function: Callable[P, None]) -> Callable[P, None]:
    """Turn kda2's own exceptions and those of files (absent, not readable, disk full) into one line on stderr and an
    exit code; a bug keeps its traceback."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            function(*args, **kwargs)
        except MissingExtra as e:
            code = _say(e, MISSING)
        except (InvalidValue, InvalidType) as e:
            code = _say(e, BAD_USAGE)
        except KDA2Error as e:
            code = _say(e, FAILED)
        except BrokenPipeError:  # whoever read the output has left
            raise
        except OSError as e:
            where = f": {e.filename}" if e.filename is not None else ""
            code = _say(f"{e.strerror or e}{where}", FAILED)
        except KeyboardInterrupt:
            err.print("stopped")
            code = STOPPED
        else:
            return
        raise typer.Exit(code)

    return run


def _say(e: KDA2Error | str, code: int) -> int:
    print(f"kda2: {e}", file=sys.stderr)
    return code
