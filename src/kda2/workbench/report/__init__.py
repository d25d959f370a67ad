"""The report of a run: one HTML file that opens from disk, made from the ledger alone."""

from kda2.workbench.report.render import render, write_report

__all__ = ["render", "write_report"]
