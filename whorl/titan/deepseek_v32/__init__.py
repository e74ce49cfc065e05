"""DeepSeek-V3.2 for TorchTitan: `model.py` is where to start reading. Importing this package imports no TorchTitan."""
