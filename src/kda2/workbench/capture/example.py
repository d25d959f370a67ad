"""A capture for whoever brings none: the call that the example layer makes."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import torch

from kda2.errors import InvalidValue
from kda2.workbench.capture.call import Capture
from kda2.workbench.capture.recorder import recording
from kda2.workbench.profiler.environment import checkout, file_hash


def from_example(tokens: int, gate: str) -> Capture:
    """Run the example layer over its text and keep the call it makes, with a final state asked for.

    The layer is an example of using kda2, so it lives with the examples and not in the package; an installed kda2
    has no examples and needs a capture file.
    """
    example = _example()
    try:
        layer, x = example.build(tokens=tokens, gate=gate)
    except ValueError as e:
        raise InvalidValue("--tokens", "what the example can give", f"{tokens}: {e}") from e
    with torch.no_grad(), recording() as calls:
        layer(x, impl="torch")
    text = example.TEXT
    origin = {
        "layer": "examples/kda_layer.py, random weights, seed 0",
        "text": text.name,
        "text_sha256": file_hash(text),
    }
    return Capture({**calls[0].kwargs, "output_final_state": True}, origin)


def _example() -> ModuleType:
    root = checkout()
    path = None if root is None else root / "examples" / "kda_layer.py"
    if path is None or not path.exists():
        raise InvalidValue(
            "--inputs", "given, as this kda2 has no examples beside it", "nothing", "pass a capture file"
        )
    spec = importlib.util.spec_from_file_location("kda2_example_layer", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
