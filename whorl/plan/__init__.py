"""Which layouts of a model fit a cluster, and how fast they would train: arithmetic alone, on any machine.

Read on in `command.py`, which is `whorl train --plan`. Neither torch nor TorchTitan is imported anywhere here.
"""
