"""Prints without end.

A kernel with a debugging print in its loop does it too.
"""


def run(**inputs):
    while True:
        print("x" * 65536)
