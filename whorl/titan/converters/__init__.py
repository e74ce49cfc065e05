"""Switches for `--model.converters`: each puts our operators where a model has its own, and nothing else changes.

They run on the model before it is parallelised and serve TorchTitan's llama3, qwen3 and deepseek_v3 as well as ours.
The backend is chosen by device when an operator is called. The names of the Ascend plug-in are taken for ours.
"""
