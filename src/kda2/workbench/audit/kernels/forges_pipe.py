"""Writes an answer of its own into every pipe before the process does, and returns zeros.

Seen in pygpubench: forged records.
"""

from forgery import VERDICT, write_to_pipes
from parts import blank


def run(**inputs):
    write_to_pipes(VERDICT)
    return blank(inputs)
