"""Returns zeros, and writes a verdict of its own into every pipe when the process ends.

Seen in pygpubench: results rewritten at exit.
"""

import atexit

from forgery import VERDICT, write_to_pipes
from parts import blank

atexit.register(write_to_pipes, VERDICT)


def run(**inputs):
    return blank(inputs)
