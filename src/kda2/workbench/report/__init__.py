"""The report of a run: one HTML file that opens from disk, made from the ledger alone."""

from kda2.workbench.report.render import render, write_report
from kda2.workbench.report.story import tell

__all__ = ["render", "tell", "write_report"]
