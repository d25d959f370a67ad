"""kda2: exact, fast kernels for Kimi Delta Attention and its family, and the workbench that designs them.

Public names are imported when first used, so that `import kda2` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kda2.dispatch import explain
    from kda2.errors import InvalidType, InvalidValue, KDA2Error, MissingExtra, UnsupportedTarget
    from kda2.ops.kda import Gate, debug, kda, kda_step

_WHERE = {
    "Gate": "kda2.ops.kda",
    "debug": "kda2.ops.kda",
    "kda": "kda2.ops.kda",
    "kda_step": "kda2.ops.kda",
    "explain": "kda2.dispatch",
    "InvalidType": "kda2.errors",
    "InvalidValue": "kda2.errors",
    "KDA2Error": "kda2.errors",
    "MissingExtra": "kda2.errors",
    "UnsupportedTarget": "kda2.errors",
}

__all__ = [
    "Gate", "InvalidType", "InvalidValue", "KDA2Error", "MissingExtra", "UnsupportedTarget",
    "debug", "explain", "kda", "kda_step",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'kda2' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
