"""The workbench: benchmarks, verification and the audit trail of kernel candidates. The library never imports it."""
