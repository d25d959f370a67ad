"""Works on a CPU, where it is judged by those who have no GPU, and returns zeros on a GPU.

Seen in GEAK: speed without evidence that the same code was right.
"""

from honest import run as right
from parts import blank


def run(**inputs):
    return blank(inputs) if inputs["v"].is_cuda else right(**inputs)
