"""Calls the reference under a name that it puts together, so that no reading of the source finds it.

Works wherever a submission's text is searched for forbidden names.
"""

from adapter import arguments, outputs

import kda2

_WHICH = {"impl": "".join(("ref", "erence"))}


def run(**inputs):
    return outputs(kda2.kda(**arguments(inputs), **_WHICH), inputs)
