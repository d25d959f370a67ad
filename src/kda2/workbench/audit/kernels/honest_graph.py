"""Right, replayed from a CUDA graph for each form of call: inputs are copied in, outputs out."""

import torch
from honest import run as right
from parts import copies, form, tensors

_graphs = {}


def _captured(inputs):
    own = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    right(**own)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = right(**own)
    return graph, own, outputs


def run(**inputs):
    if inputs["cu_seqlens"] is not None or not inputs["v"].numel():
        return right(**inputs)
    key = form(inputs)
    if key not in _graphs:
        _graphs[key] = _captured(inputs)
    graph, own, outputs = _graphs[key]
    for name, x in tensors(inputs).items():
        own[name].copy_(x)
    graph.replay()
    return copies(outputs)
