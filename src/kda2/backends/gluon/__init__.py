"""Gluon, Triton's low-level dialect: a ring of shared-memory slots between warp roles, and what differs by version."""

from kda2.backends.gluon.ring import acquire, commit, next_slot, release, signals, wait
from kda2.backends.gluon.versions import barrier

__all__ = ["acquire", "barrier", "commit", "next_slot", "release", "signals", "wait"]
