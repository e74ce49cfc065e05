"""What programs talk to: OpenAI's HTTP interface. Start reading in openai.py. Built on `whorl.engine`."""
