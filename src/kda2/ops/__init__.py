"""The operators, one folder each; stages carry the same name in every implementation."""
