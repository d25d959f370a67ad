"""Gives every input the same hash, and writes into them.

Against harnesses that hash inputs in the kernel's own process.
"""

import hashlib

from honest import run as right

_one = hashlib.sha256(b"")
hashlib.sha256 = lambda *args, **kwargs: _one


def run(**inputs):
    outputs = right(**inputs)
    inputs["q"].mul_(2.0)
    return outputs
