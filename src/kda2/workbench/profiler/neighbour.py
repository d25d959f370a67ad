"""A neighbour for timed calls: a kernel that wants the memory, on a stream of its own.

It copies a buffer that no cache holds, by few and small CTAs: it contends for bandwidth and the L2, and leaves the
others room on every multiprocessor.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kda2 import device
from kda2.backends.triton import Launch
from kda2.contract import KernelConfig

# The buffer, in units of the L2 cache.
_CACHES = 4
# Multiprocessors to one CTA of the copy.
_SMS_PER_CTA = 2
_BLOCK = 8192
_CONFIG = KernelConfig(num_warps=8, num_stages=1)
_CALIBRATION_ROUNDS = 20


@triton.jit(do_not_specialize=["rounds"])  # type: ignore[untyped-decorator]
def _copy(p_source, p_target, count, rounds, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """
    Computes: target = source, `rounds` times.
    Reads:    source [count], int32.
    Writes:   target [count], int32.
    Grid:     any number of programs, which share the blocks.
    Assumes:  count is a multiple of BLOCK and below 2^31 - BLOCK * programs.
    Source:   torch.Tensor.copy_
    """
    step = tl.num_programs(0) * BLOCK
    for _ in range(rounds):
        for start in range(tl.program_id(0) * BLOCK, count, step):
            o = start + tl.arange(0, BLOCK)  # [BLOCK]
            tl.store(p_target + o, tl.load(p_source + o))


def copies(source: torch.Tensor, target: torch.Tensor, rounds: int, ctas: int) -> Launch:
    """One launch of `ctas` CTAs that copies `source` to `target` (int32 [n], n a multiple of 8192) `rounds` times."""
    args = {"p_source": source, "p_target": target, "count": source.numel(), "rounds": rounds, "BLOCK": _BLOCK}
    return Launch("neighbour", _copy, ctas, args, _CONFIG)


class Neighbour:
    """A copy loop beside the calls on one GPU. `gbps` is the rate, read and write, at which it copies alone."""

    def __init__(self, where: torch.device) -> None:
        gpu = device.gpu(where.index or 0)
        count = max(1, _CACHES * gpu.l2_bytes // (4 * _BLOCK)) * _BLOCK
        self.where = where
        self._ctas = max(1, gpu.sm_count // _SMS_PER_CTA)
        self._source = torch.zeros(count, dtype=torch.int32, device=where)
        self._target = torch.empty_like(self._source)
        self._stream = torch.cuda.Stream(where)
        self._end = torch.cuda.Event(enable_timing=True)
        self._round_us = self._calibrated()
        self.gbps = 2 * self._source.nbytes / self._round_us / 1e3

    def start(self, us: float) -> None:
        """Go on for `us` microseconds or longer, from as soon as the device can."""
        self._enqueue(math.ceil(us / self._round_us))

    def outlived(self, event: torch.cuda.Event) -> bool:
        """Whether the copy was still under way when a recorded event came; waits for both."""
        event.synchronize()
        self._end.synchronize()
        return bool(event.elapsed_time(self._end) >= 0.0)

    def _enqueue(self, rounds: int) -> None:
        with torch.cuda.device(self.where), torch.cuda.stream(self._stream):
            copies(self._source, self._target, rounds, self._ctas).run()
            self._end.record()

    def _calibrated(self) -> float:
        """Microseconds of one round, alone on the device."""
        torch.cuda.synchronize(self.where)  # the buffers are filled on another stream
        self._enqueue(1)  # compiles
        with torch.cuda.device(self.where), torch.cuda.stream(self._stream):
            begin = torch.cuda.Event(enable_timing=True)
            begin.record()
        self._enqueue(_CALIBRATION_ROUNDS)
        self._end.synchronize()
        return float(begin.elapsed_time(self._end) * 1e3 / _CALIBRATION_ROUNDS)
