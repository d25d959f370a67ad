"""Tuned configurations with provenance, as data; `kda2.dispatch.lookup` reads them."""
