"""What the audit puts before the verifier, beside the mutants of `kda2.testing`: files that cheat, and faithful files
that look as if they did.

A file's docstring is its entry: the first paragraph says what it does, the second where such a thing was seen, or
what it works against.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FOLDER = Path(__file__).parent / "kernels"
Needs = Literal["cpu", "cuda"]
# What a kernel can be refused by, and what each looks at.
GATES = {
    "policy": "the source: it asks the oracle or the judge by name",
    "imports": "what it reads while it runs: modules and files that know the answer",
    "outputs": "the form of what it returns: type, dtype, shape, completeness",
    "numerics": "o or the final state is off",
    "inputs": "it writes into its inputs",
    "aliasing": "outputs lie in the memory of inputs, or of earlier outputs",
    "repeat": "it is asked again with other contents in the same tensors",
    "timed outputs": "what calls gave that were being timed",
    "tamper": "functions and settings that a verdict or a clock rests on",
    "floor": "a time below what the datasheet allows",
    "wall": "times that the judge's own clock contradicts",
    "process": "the process ended: crash, hang, flood, exit",
    "protocol": "answers that are no answers",
}


@dataclass(frozen=True)
class Cheat:
    """A file that `gate` must refuse, on a CPU or on a GPU (`needs`). `says`: what it does; `seen`: where such
    a thing was seen, or what it works against."""

    name: str
    file: Path
    says: str
    gate: str
    needs: Needs
    seen: str


@dataclass(frozen=True)
class Faithful:
    """A file that must pass; `says` what might be held against it."""

    name: str
    file: Path
    says: str
    needs: Needs


# By gate: the files that a CPU shows, and those that need a GPU.
_CHEATS: dict[str, dict[Needs, tuple[str, ...]]] = {
    "policy": {"cpu": ("imports_oracle", "calls_reference")},
    "imports": {
        "cpu": (
            "imports_oracle_by_name", "hides_import", "calls_reference_by_kwargs", "reads_oracle_source",
            "asks_in_subprocess",
        ),
    },
    "outputs": {
        "cpu": ("lazy_subclass", "lazy_object", "lazy_mapping", "wrong_dtype", "wrong_shape", "missing_state"),
    },
    "numerics": {
        "cpu": (
            "seeds_guess", "late_thread", "nan_wildcard", "gc_search", "frames_search", "modules_search",
            "files_search", "rewrites_at_exit",
        ),
        "cuda": ("other_stream", "right_on_cpu_only"),
    },
    "inputs": {"cpu": ("writes_inputs", "writes_gap", "inputs_made_easy")},
    "aliasing": {"cpu": ("answers_in_inputs", "views_of_inputs", "state_in_place", "aliases_previous")},
    "repeat": {
        "cpu": (
            "cached_by_pointer", "cached_by_fingerprint", "cached_by_shape", "first_call_only", "every_other_call",
            "work_in_prepare", "poisoned_only",
        ),
        "cuda": ("graph_replay",),
    },
    "timed outputs": {"cuda": ("cached_by_sums", "fast_when_timed", "forgets_when_long")},
    "tamper": {
        "cpu": (
            "patches_event_timer", "patches_event_code", "patches_clock_module", "patches_synchronize",
            "patches_comparison", "patches_hash", "patches_fingerprint", "patches_code", "patches_allocator",
            "hooks_profile", "default_dtype", "precision_flags",
            "leaves_mode_on", "patches_and_restores",
        ),
    },
    "process": {
        "cpu": ("exits", "exits_politely", "interrupts", "hangs", "floods", "crashes", "out_of_memory", "closes_pipes"),
    },
    "protocol": {"cpu": ("forges_pipe",)},
}  # fmt: skip
_FAITHFUL: dict[str, Needs] = {
    "honest": "cpu",
    "honest_workspace": "cpu",
    "honest_streams": "cuda",
    "honest_graph": "cuda",
}


def _entry(name: str) -> tuple[Path, str, str]:
    """A file, and the two paragraphs of its docstring, each as one line; the second may be missing."""
    file = FOLDER / f"{name}.py"
    told = ast.get_docstring(ast.parse(file.read_text())) or ""
    says, seen, *_ = [" ".join(part.split()) for part in (told + "\n\n").split("\n\n")]
    return file, says, seen


def _cheats() -> Iterator[Cheat]:
    for gate, by_needs in _CHEATS.items():
        for needs, names in by_needs.items():
            for name in names:
                file, says, seen = _entry(name)
                yield Cheat(name, file, says, gate, needs, seen)


def _faithful() -> Iterator[Faithful]:
    for name, needs in _FAITHFUL.items():
        file, says, _ = _entry(name)
        yield Faithful(name, file, says, needs)


CHEATS = tuple(_cheats())
FAITHFUL = tuple(_faithful())
