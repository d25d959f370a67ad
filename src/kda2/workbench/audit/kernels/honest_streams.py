"""Right, on a stream of its own that waits for the caller's, and that the caller's waits for."""

import torch
from honest import run as right

_side = torch.cuda.Stream()


def run(**inputs):
    current = torch.cuda.current_stream()
    _side.wait_stream(current)
    with torch.cuda.stream(_side):
        outputs = right(**inputs)
    current.wait_stream(_side)
    for x in outputs.values():
        x.record_stream(current)
    return outputs
