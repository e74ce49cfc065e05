"""How DeepSeek-V3.2 is shared out over ranks and compiled: `parallelize.py` is where to start reading."""
