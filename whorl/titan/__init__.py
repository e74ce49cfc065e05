"""Train with TorchTitan.

Importing this package does not import TorchTitan. If TorchTitan 0.2 is already imported, our models and converters are
registered with it: `--experimental.custom_import whorl.titan` makes TorchTitan import this package before it looks up
the model of a job. For TorchTitan 0.3 see `whorl.titan.v030`.
"""

import importlib.util
import sys

if "torchtitan" in sys.modules and importlib.util.find_spec("torchtitan.protocols.train_spec") is not None:
    from whorl.titan import register

    register.register()
