"""Converters for `--model.converters`: each replaces one operation of a model by our operators.

They run on the model before it is parallelised and work for TorchTitan's llama3, qwen3 and deepseek_v3 as well as for
our models. The backend is chosen by device when an operator is called. The converter names of the Ascend plug-in
(`npu_...`) are aliases of ours.
"""
