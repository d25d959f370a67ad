"""Right, with memory and a plan kept from call to call: only the outputs are new each time."""

from honest import run as right
from parts import blank, form

_plans, _scratch = {}, {}


def prepare(**inputs):
    _plans[form(inputs)] = {name: x.shape for name, x in blank(inputs).items()}


def run(**inputs):
    key = form(inputs)
    outputs = right(**inputs)
    scratch = _scratch.setdefault(key, {name: x.clone() for name, x in outputs.items()})
    for name, x in outputs.items():
        scratch[name].copy_(x)
    return {name: scratch[name].clone().view(shape) for name, shape in _plans[key].items()}
