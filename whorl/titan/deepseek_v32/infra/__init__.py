"""Parallelize and compile DeepSeek-V3.2. Start reading at `parallelize.py`."""
