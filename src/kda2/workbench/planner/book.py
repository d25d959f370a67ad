"""A plan on disk: plan.json, plan.txt, plan.html and test_blocks.py, all of them or none."""

from __future__ import annotations

import contextlib
from importlib import resources
from pathlib import Path

from kda2.errors import InvalidValue
from kda2.workbench import extras
from kda2.workbench.blockplan import BlockPlan
from kda2.workbench.planner.figures import figures_html
from kda2.workbench.planner.text import grid_words, part_words, problem_words, render_text, title_of, unit_test_words
from kda2.workbench.planner.unit_tests import unit_tests


def render_html(plan: BlockPlan) -> str:
    """The plan as one HTML page without references to anything outside it."""
    jinja2 = extras.load("jinja2", "the plan's page")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = (resources.files("kda2.workbench.planner") / "template.html.j2").read_text(encoding="utf-8")
    page: str = environment.from_string(template).render(
        plan=plan,
        title=title_of(plan),
        problem=problem_words(plan),
        part=part_words(plan),
        figures=figures_html(plan),
        tests={b.letter: unit_test_words(b) for b in plan.blocks},
        grids={b.letter: grid_words(b) for b in plan.blocks},
    )
    return page


def write_book(plan: BlockPlan, folder: Path) -> tuple[Path, ...]:
    """Write the plan's files into `folder`, made if absent; files of the same names are replaced, others stay.

    Nothing is replaced before all are on the disk. Raises `InvalidValue` if `folder` is a file, `OSError` if it cannot
    be written.
    """
    if folder.exists() and not folder.is_dir():
        raise InvalidValue("--out", "a folder", f"the file {folder}")
    texts = {
        "plan.json": f"{plan.line()}\n",
        "plan.txt": render_text(plan),
        "plan.html": render_html(plan),
        "test_blocks.py": unit_tests(plan),
    }
    folder.mkdir(parents=True, exist_ok=True)
    parts = {folder / name: folder / f".{name}.part" for name in texts}
    try:
        for (target, part), text in zip(parts.items(), texts.values(), strict=True):
            if target.is_dir():
                raise InvalidValue("--out", f"a folder without a folder {target.name}", str(folder))
            part.write_text(text, encoding="utf-8")
        for target, part in parts.items():
            part.replace(target)
    finally:
        for part in parts.values():
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
    return tuple(parts)
