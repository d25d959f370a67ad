"""Names that Triton's versions spell differently."""

import triton.experimental.gluon.language as gl

# renamed in Triton 3.7
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
