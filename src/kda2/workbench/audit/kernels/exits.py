"""Ends the process with code 0 in the middle of a call.

Against harnesses that take a process that ended well for a pass.
"""

import os


def run(**inputs):
    os._exit(0)
