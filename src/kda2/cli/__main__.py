"""`python -m kda2.cli`, for where the entry point is not installed."""

from kda2.cli import main

main()
