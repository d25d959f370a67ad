"""Optional packages, imported when first needed; a missing one is an error that names the extra."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kda2.errors import MissingExtra


def load(module: str, purpose: str) -> Any:
    """Import `module`, or raise `MissingExtra` saying what needs it and how to get it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as e:
        package = module.partition(".")[0]
        if e.name is None or e.name.partition(".")[0] != package:
            raise
        raise MissingExtra(package, "workbench", purpose) from e
