"""Ask a model over HTTP with OpenAI's client, and print the answer as it streams in.

    python examples/chat_client.py "What is the capital of France?"
    python examples/chat_client.py --url http://127.0.0.1:8000/v1 "What is the capital of France?"

Without --url it starts `whorl serve` with the small default model, and stops it at the end.
"""

import argparse
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import openai

START_TIMEOUT = 180  # seconds


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Start `whorl serve` on a free port; yields its URL and stops it at the end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "whorl", "serve", "--port", str(port)])
    try:
        url = f"http://127.0.0.1:{port}/v1"
        wait_for(url, process)
        yield url
    finally:
        process.terminate()  # running requests finish first
        process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    """Return when the server answers; exit when it has ended or takes too long."""
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    end = time.monotonic() + START_TIMEOUT
    while time.monotonic() < end:
        if process.poll() is not None:
            sys.exit(f"whorl serve ended with exit code {process.returncode}")
        with contextlib.suppress(openai.APIConnectionError):
            client.models.list()
            return
        time.sleep(0.2)
    sys.exit(f"whorl serve did not answer at {url} within {START_TIMEOUT} s")


def ask(url: str, question: str, max_tokens: int) -> None:
    """Send one chat message and print the streamed answer."""
    client = openai.OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n[{chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens of {model}]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question")
    parser.add_argument("--url", help="URL of a running server")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    with contextlib.nullcontext(args.url) if args.url else server() as url:
        ask(url, args.question, args.max_tokens)


if __name__ == "__main__":
    main()
