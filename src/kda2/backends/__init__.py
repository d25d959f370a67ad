"""Compilers and their shims, one folder each. No formulas."""
