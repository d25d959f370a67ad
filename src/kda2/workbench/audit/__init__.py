"""The audit: wrong kernels and dishonest ones, each of which the verifier must refuse by the gate that is named for it.

`catalogue` lists them; the files of `kernels/` are what is judged, and are never imported as part of the package.
"""
