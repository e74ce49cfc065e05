"""Training with TorchTitan. Importing this imports none of it; a TorchTitan 0.2 that is already there learns our names.

`--experimental.custom_import whorl.titan` is that import: TorchTitan makes it before it looks a model up. For 0.3 see
`whorl.titan.v030`.
"""

import importlib.util
import sys

if "torchtitan" in sys.modules and importlib.util.find_spec("torchtitan.protocols.train_spec") is not None:
    from whorl.titan import register

    register.register()
