"""The Planner: the specification book of a problem, from counting alone.

from kda2.workbench.planner import Problem, plan, render_text
print(render_text(plan("kda", "sm_90", Problem.parse("T=8192,H=64"))))
"""

from kda2.workbench.planner.book import render_html, write_book
from kda2.workbench.planner.figures import figures
from kda2.workbench.planner.planner import plan
from kda2.workbench.planner.problem import Problem
from kda2.workbench.planner.text import render_text
from kda2.workbench.planner.unit_tests import unit_tests

__all__ = ["Problem", "figures", "plan", "render_html", "render_text", "unit_tests", "write_book"]
