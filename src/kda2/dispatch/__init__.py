"""Choosing an implementation: capability match, reasons for each refusal, and the tables of tuned configurations."""

from kda2.dispatch.select import Explanation, capability, choose, explain, explain_choice, register, registered
from kda2.dispatch.table import lookup

__all__ = ["Explanation", "capability", "choose", "explain", "explain_choice", "lookup", "register", "registered"]
