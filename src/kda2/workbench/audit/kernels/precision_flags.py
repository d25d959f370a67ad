"""Turns on reduced precision for the whole process, the reference beside it included.

Against harnesses that compare with a reference in the same process.
"""

import torch
from honest import run as right


def run(**inputs):
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    torch.set_float32_matmul_precision("medium")
    return right(**inputs)
