"""Looks among all objects of the process for fp64 tensors of the right shapes: the expected values. Zeros otherwise.

Seen in pygpubench: expected tensors found through gc.
"""

import gc

import torch
from parts import disguised


def run(**inputs):
    found = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and x.dtype == torch.float64]
    return disguised(found, inputs)
