"""What replicas of the tests in a Ray cluster load: a model that says what it is told, slowly enough to be killed."""

from typing import Any

from serving import told

from whorl.serve.openai import create_app
from whorl.serve.settings import Settings


def make(settings: Settings) -> Any:
    return create_app(told({"hello": "It is a fine day."}, delay=0.02, num_blocks=2048), settings)
