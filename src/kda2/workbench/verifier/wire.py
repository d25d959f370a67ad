"""How tensors cross between a judge and the process that runs a kernel: two unnamed files, one for each way.

The judge's contents are its own, written by torch so that views, strides and what lies between them arrive as they
were. What comes back is a stranger's: it is read as safetensors, which hold numbers and no code.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from kda2.workbench import extras

# Memory that is a file, where the system has it: tensors need not touch a disk.
_MEMORY = Path("/dev/shm")


# Bytes that an answer may take: so many times those of the call, or so many at least.
_ROOM, _LEAST_ROOM = 16, 2**28


class Unreadable(ValueError):
    """What came back is no safetensors file."""


class Wire:
    """One end of the pair of files."""

    __slots__ = ("_answers", "_inputs", "_most")

    def __init__(self, inputs: BinaryIO, answers: BinaryIO) -> None:
        self._inputs, self._answers, self._most = inputs, answers, _LEAST_ROOM

    @classmethod
    def made(cls) -> Wire:
        """The judge's end."""
        folder = str(_MEMORY) if os.access(_MEMORY, os.W_OK) else None
        return cls(*(tempfile.TemporaryFile(dir=folder) for _ in range(2)))

    @classmethod
    def handed(cls, descriptors: str) -> Wire:
        """The other end, by what `descriptors` gave."""
        inputs, answers = map(int, descriptors.split(","))
        return cls(os.fdopen(inputs, "r+b"), os.fdopen(answers, "r+b"))

    @property
    def descriptors(self) -> tuple[int, int]:
        """Of both files, to be inherited by the process at the other end."""
        return self._inputs.fileno(), self._answers.fileno()

    def put(self, inputs: Mapping[str, Any]) -> None:
        """Write a call: tensors on the CPU, and plain values."""
        self._inputs.seek(0)
        self._inputs.truncate()
        torch.save(dict(inputs), self._inputs)
        self._inputs.flush()
        self._most = max(_LEAST_ROOM, _ROOM * self._inputs.tell())

    def get(self, where: torch.device) -> dict[str, Any]:
        """The call that `put` wrote, its tensors on `where`."""
        # anew each time: one that stays open has the last call in its buffer
        with os.fdopen(os.dup(self._inputs.fileno()), "rb") as file:
            file.seek(0)
            found: dict[str, Any] = torch.load(file, map_location=where, weights_only=True)
        return found

    def give(self, outputs: Mapping[str, Tensor]) -> None:
        """Write an answer."""
        save = extras.load("safetensors.torch", "a judged kernel's answer").save
        packed = save({name: x.detach().cpu().contiguous().clone() for name, x in outputs.items()})
        self._answers.seek(0)
        self._answers.truncate()
        self._answers.write(packed)
        self._answers.flush()

    def take(self) -> dict[str, Tensor]:
        """The answer that `give` wrote; what is read is gone. Raises `Unreadable`."""
        size = os.fstat(self._answers.fileno()).st_size
        if size > self._most:  # it would have to fit into the judge's memory
            raise Unreadable(f"its answer takes {size / 2**30:.1f} GiB, more than any to these inputs")
        self._answers.seek(0)
        packed = self._answers.read()
        self._answers.seek(0)
        self._answers.truncate()
        files = extras.load("safetensors", "a judged kernel's answer")
        try:
            found: dict[str, Tensor] = extras.load("safetensors.torch", "a judged kernel's answer").load(packed)
        except (files.SafetensorError, ValueError, KeyError, TypeError) as e:
            raise Unreadable(f"its answer is no safetensors file: {e}") from e
        return found

    def close(self) -> None:
        self._inputs.close()
        self._answers.close()
