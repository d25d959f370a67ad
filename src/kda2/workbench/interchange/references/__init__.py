"""Self-contained sources of operators, as exported definitions carry them. They import torch alone and are not used
otherwise."""
