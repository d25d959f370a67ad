"""Closes every file of the process but the standard ones, and returns zeros.

A process that can say nothing must not count as one that found nothing.
"""

import os

from parts import blank


def run(**inputs):
    os.closerange(3, 256)
    return blank(inputs)
