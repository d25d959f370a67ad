"""Reads address 0.

Seen in the field as illegal memory accesses (FLA).
"""

import ctypes


def run(**inputs):
    return ctypes.string_at(0)
