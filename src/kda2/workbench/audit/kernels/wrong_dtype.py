"""Returns o in fp32 whatever v is: more digits than asked for, and twice the memory.

Against harnesses that upcast both sides before they compare.
"""

from honest import run as right


def run(**inputs):
    outputs = right(**inputs)
    double = outputs["o"].dtype.itemsize == 4
    return {**outputs, "o": outputs["o"].double() if double else outputs["o"].float()}
