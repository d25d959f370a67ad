"""Asks for 4 PiB, which no machine has.

Seen in the field as autotuning that runs out of memory (vllm).
"""

import torch
from honest import run as right


def run(**inputs):
    torch.empty(1 << 52, dtype=torch.uint8, device=inputs["v"].device)
    return right(**inputs)
