"""Gluon, Triton's low-level dialect: a ring of shared-memory slots between warp roles, and what differs by version."""

from kda2.backends.gluon.ring import commit, next_slot, release, signals, wait, wait_turn
from kda2.backends.gluon.versions import barrier

__all__ = ["barrier", "commit", "next_slot", "release", "signals", "wait", "wait_turn"]
