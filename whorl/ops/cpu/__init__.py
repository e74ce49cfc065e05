"""Kernels for CPUs, in C++: the backend `cpp` of the operators.

`library.py` loads the shared library that an installation has built (`build.py`) and describes tensors to it; each
other file has the implementations of the operators of its name.
"""
