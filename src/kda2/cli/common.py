"""What every command shares: the console, errors as one line, and exit codes."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, ParamSpec

import typer
from rich.console import Console

from kda2.errors import InvalidType, InvalidValue, KDA2Error, MissingExtra
from kda2.testing import FAMILIES

FAILED, BAD_USAGE, MISSING, STOPPED = 1, 2, 3, 130
# a pipe has no width; tables need room
out = Console(width=None if sys.stdout.isatty() else 160)
err = Console(stderr=True)

P = ParamSpec("P")
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def check_op(op: str) -> None:
    """The workbench designs kernels for one operator so far."""
    if op != "kda":
        raise InvalidValue("op", "'kda'", repr(op))


def families_of(pattern: str) -> tuple[str, ...]:
    """The probe families whose names a regular expression finds."""
    return chosen_of(pattern, tuple(FAMILIES))


def chosen_of(pattern: str, probes: Sequence[str]) -> tuple[str, ...]:
    """Those of `probes` that a regular expression finds."""
    try:
        chosen = tuple(name for name in probes if re.search(pattern, name))
    except re.error as e:
        raise InvalidValue("--families", "a regular expression", repr(pattern), str(e)) from e
    if not chosen:
        raise InvalidValue("--families", f"an expression that finds one of {', '.join(probes)}", repr(pattern))
    return chosen


def seconds(text: str) -> float:
    """Seconds of a time such as 90s, 10m or 1.5h."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smh]?)", text.strip(), re.ASCII)
    if found is None or not float(found[1]):
        raise InvalidValue("--budget", "a time such as 90s, 10m or 1h", repr(text))
    return float(found[1]) * _UNITS[found[2] or "s"]


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
