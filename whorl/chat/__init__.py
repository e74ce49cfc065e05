"""Chat and completion in a terminal: `whorl chat` and `whorl generate`. Built on `whorl.engine`."""
