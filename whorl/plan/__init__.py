"""List the parallel layouts of a model that fit a cluster and estimate how fast they train.

A layout is one choice of the degrees PP, TP, CP, DP and EP, with the optimizer on the device or swapped to the host.
The plan is arithmetic and runs on any machine: nothing here imports torch or TorchTitan. Start reading at `command.py`,
which is `whorl train --plan`.
"""
