"""A server of MCP's own SDK with a few tools, at the port that is named: with sessions (version 1) or without (2)."""

import asyncio
import sys

port = int(sys.argv[1])
try:
    from mcp.server.mcpserver import Context, MCPServer

    server, where = MCPServer("tools"), {"port": port}
except ImportError:
    from mcp.server.fastmcp import Context, FastMCP

    server, where = FastMCP("tools", port=port), {}

counts: dict[str, int] = {}


@server.tool()
def weather(city: str) -> str:
    """The weather in a city."""
    return f"It is sunny in {city}."


@server.tool()
async def slow(seconds: float, context: Context) -> str:
    """Waits, and tells of its progress."""
    for step in range(4):
        await context.report_progress(step, 4)
        await asyncio.sleep(seconds / 4)
    return "done"


@server.tool()
def broken() -> str:
    """Fails."""
    raise ValueError("it does not work today")


@server.tool()
def table() -> list[dict[str, int]]:
    """Returns rows."""
    return [{"a": 1}, {"a": 2}]


server.run("streamable-http", **where)
