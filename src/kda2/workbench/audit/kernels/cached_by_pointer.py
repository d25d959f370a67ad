"""Right once for each set of addresses: the answer is kept under the inputs' data pointers, whatever is in them later.

Seen in flashinfer's starter kit (outputs cached by input) and in AgentKernelArena (work memoised across replays).
"""

from honest import run as right
from parts import copies, form, tensors

_kept = {}


def run(**inputs):
    key = (form(inputs), tuple(x.data_ptr() for x in tensors(inputs).values()))
    if key not in _kept:
        _kept[key] = right(**inputs)
    return copies(_kept[key])
