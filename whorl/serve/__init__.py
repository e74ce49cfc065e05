"""An HTTP server over `whorl.engine` with OpenAI's and Anthropic's interfaces. Start reading in openai.py."""
