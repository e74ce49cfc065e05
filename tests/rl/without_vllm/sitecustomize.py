"""Python imports this at its start, in each of Monarch's processes: TorchTitan's package of RL without its __init__.

That imports vLLM. The modules below it that do not are TorchTitan's own.
"""

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

NAME = "torchtitan.experiments.rl"


class Finder:
    """Finds the package as an empty one in its own folder."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != NAME or path is None:
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [f"{folder}/rl" for folder in path]
        return spec


sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
