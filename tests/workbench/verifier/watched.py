"""Prints as JSON what a `Watch` notices of each of these acts; a process of its own, in which nothing that knows the
answers has been imported."""

import builtins
import contextlib
import importlib
import importlib.util
import io
import json
import os
import runpy
import subprocess
import sys
import traceback
from pathlib import Path

import torch

import kda2
from kda2.workbench.verifier.guards import Watch

HOME = Path(kda2.__file__).parent
NAME = "kda2." + "gnitset"[::-1]
FILE = HOME / "testing" / "compare.py"


def forget():
    for name in [name for name in sys.modules if name.startswith(NAME)]:
        del sys.modules[name]


def read(path):
    with open(path, "rb") as f:
        f.read()


def bytecode():
    with contextlib.suppress(FileNotFoundError):  # to look for it is enough
        read(importlib.util.cache_from_source(str(FILE)))


def formatted():
    try:
        from kda2.workbench.verifier.subject import kernel_of

        kernel_of(None)
    except AttributeError:
        return traceback.format_exc()


def computed():
    x = torch.randn(8, 8)
    return torch.linalg.solve(x @ x.mT + torch.eye(8), torch.special.expit(x)).sum().item()


def descriptor():
    os.close(os.open(FILE, os.O_RDONLY))


def relative():
    os.chdir(HOME)
    read("testing/compare.py")


ACTS = {
    "import_module": lambda: importlib.import_module(NAME),
    "__import__": lambda: builtins.__import__(NAME),
    "a part of it": lambda: importlib.import_module(f"{NAME}.compare"),
    "the judge": lambda: importlib.import_module("kda2.workbench.verifier.questions"),
    "runpy": lambda: runpy.run_path(str(FILE)),
    "source": lambda: read(FILE),
    "source by os.open": descriptor,
    "source by io": lambda: io.FileIO(str(FILE)).close(),
    "reference": lambda: read(HOME / "ops" / "kda" / "reference.py"),
    "bytecode": bytecode,
    "source by bytes": lambda: read(os.fsencode(FILE)),
    "source by another way": lambda: read(HOME / "workbench" / ".." / "testing" / "compare.py"),
    "source from its folder": relative,
    "subprocess": lambda: subprocess.run(["true", f"import {NAME}"], check=True),
    "subprocess of the judge": lambda: subprocess.run(["true", "kda2.workbench.verifier"], check=True),
    "system": lambda: os.system(f"true {NAME}"),
    "spawn": lambda: os.waitpid(os.posix_spawn("/bin/true", ["true", NAME], os.environ), 0),
    # what any file may do
    "imports": lambda: [importlib.import_module(name) for name in ("colorsys", "torch.fft", "kda2.ops.kda.gate")],
    "kda2's call": lambda: kda2.kda(*(torch.ones(1, 2, 1, 4) for _ in "qkvg"), torch.ones(1, 2, 1), impl="torch"),
    "a traceback": formatted,
    "torch": computed,
    "other files": lambda: [read(HOME / "__init__.py"), read(__file__)],
    "other processes": lambda: subprocess.run(["true", "kda2"], check=True),
}


def main():
    watch, found = Watch(), {}
    for name, act in ACTS.items():
        forget()
        watch._seen.clear()
        with watch.turned(True):
            act()
        found[name] = watch.seen()
    watch._seen.clear()
    with watch.turned(False):
        read(FILE)
    found["off"] = watch.seen()
    print(json.dumps(found))


main()
