"""Returns o alone, as if nobody asked for the final state.

Against harnesses that compare the first output only.
"""

from honest import run as right


def run(**inputs):
    return {"o": right(**inputs)["o"]}
