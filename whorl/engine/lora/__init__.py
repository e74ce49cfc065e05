"""LoRA for each request: adapters as PEFT writes them, read and kept in slots."""

from .adapters import Adapter as Adapter
from .adapters import Adapters as Adapters
from .files import AdapterFile as AdapterFile
from .files import read_adapter as read_adapter
from .files import write_adapter as write_adapter
