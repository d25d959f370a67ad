"""Measuring: latency against peers in one interleaved run, cold starts, and what a record must know about its run."""
