"""A FastMCP server on PyPI `mcp` 1.x, over stdio, as people write them."""

import asyncio

from mcp.server.fastmcp import Context, FastMCP

server = FastMCP("fast", instructions="Ask for sums.")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
async def count(steps: int, pause: float, ctx: Context) -> str:
    """Counts, and says how far it is."""
    for step in range(1, steps + 1):
        await ctx.report_progress(step, steps, f"step {step}")
        await asyncio.sleep(pause)
    return f"counted to {steps}"


@server.tool()
def fail(reason: str) -> str:
    """Raises."""
    raise RuntimeError(reason)


@server.resource("note://{name}")
def note(name: str) -> str:
    """A note by its name."""
    return f"note {name}"


@server.prompt()
def greet(name: str) -> str:
    """A greeting."""
    return f"Greet {name}."


server.run()
