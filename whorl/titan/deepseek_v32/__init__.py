"""DeepSeek-V3.2 for TorchTitan. Start reading at `model.py`. Importing this package does not import TorchTitan."""
