"""Uses what lies between strided rows, and behind the end of v, as its scratch memory: no element of an input changes.

Seen as silent corruption of neighbouring tensors (FLA).
"""

import torch
from honest import run as right


def run(**inputs):
    outputs = right(**inputs)
    v = inputs["v"]
    whole = torch.empty(0, dtype=v.dtype, device=v.device).set_(v.untyped_storage())
    last = v.storage_offset() + sum((n - 1) * s for n, s in zip(v.shape, v.stride(), strict=True)) + 1
    if v.numel():
        whole[last:].fill_(1.0)
        whole[: v.storage_offset()].fill_(1.0)
    return outputs
