"""Normalises q in place before it computes: the answer is right, the caller's q is another.

A slip more than a cheat: users of fused kernels have met it as activations that change under them.
"""

from honest import run as right


def run(**inputs):
    outputs = right(**inputs)
    inputs["q"].mul_(2.0)
    return outputs
