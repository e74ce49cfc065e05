"""What people and programs talk to: `chat` in a terminal. Built on `whorl.engine`."""
