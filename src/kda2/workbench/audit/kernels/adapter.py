"""Between the inputs of `run` and the arguments of kda2's calls, for files that let kda2 do their work."""

import torch

import kda2

_OPTIONS = ("scale", "qk_l2norm", "beta_sigmoid", "allow_neg_eigval", "state_layout", "initial_state", "cu_seqlens")


def arguments(inputs):
    gate = kda2.Gate(inputs["gate"], inputs["A_log"], inputs["dt_bias"], inputs["lower_bound"])
    rest = {name: inputs[name] for name in (*"qkvg", "beta", *_OPTIONS)}
    return {**rest, "gate": gate, "output_final_state": True}


def outputs(answer, inputs):
    o, state = answer
    given = inputs["initial_state"]
    where = inputs["v"].device
    dtype = torch.float32 if given is None else given.dtype
    return {"o": o.to(inputs["v"].dtype).to(where), "final_state": state.to(dtype).to(where)}


def call_of(inputs):
    """The checked call that implementations take."""
    from kda2.ops.kda.check import check_call, check_options

    a = arguments(inputs)
    names = ("gate", "scale", "qk_l2norm", "beta_sigmoid", "allow_neg_eigval", "state_layout")
    options = check_options(a["q"], *(a[name] for name in names))
    rest = {"initial_state": a["initial_state"], "output_final_state": True, "cu_seqlens": a["cu_seqlens"]}
    return check_call(*(a[name] for name in (*"qkvg", "beta")), options, **rest, deterministic=False)
