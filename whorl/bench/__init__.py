"""The benchmarks behind `whorl bench`. `command.py` has the commands; `whorl.timing` measures single calls."""
