"""Calls the library with its reference implementation, which is what answers are held to.

Works wherever the reference is one option of a call that kernels may make.
"""

from adapter import arguments, outputs

import kda2


def run(**inputs):
    return outputs(kda2.kda(**arguments(inputs), impl="reference"), inputs)
