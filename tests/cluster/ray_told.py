"""What replicas of the tests in a Ray cluster load: a model that says what it is told, slowly enough to be killed."""

import os
from typing import Any

from serving import told

from whorl.serve.openai import create_app
from whorl.serve.settings import ServerSettings

BROKEN = "WHORL_TEST_BROKEN"  # names a file: while it is there, nothing can be loaded


def make(settings: ServerSettings) -> Any:
    if os.path.exists(os.environ.get(BROKEN, "")):
        raise ValueError("the weights are broken")
    return create_app(told({"hello": "It is a fine day."}, delay=0.02, num_blocks=2048), settings)
