"""Chat and completion in a terminal, over `whorl.engine`: `whorl chat` and `whorl generate`."""
