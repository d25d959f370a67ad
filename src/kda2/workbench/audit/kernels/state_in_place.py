"""Updates the initial state in place and returns it as the final one, as decoding may and prefill may not.

Seen in serving: checkpoints of a prefix that change once they are used (sglang).
"""

from honest import run as right


def run(**inputs):
    outputs, state = right(**inputs), inputs["initial_state"]
    return outputs if state is None else {**outputs, "final_state": state.copy_(outputs["final_state"])}
