"""A client on PyPI `mcp` 2.x in its default mode, which probes `server/discover` first.

../README.md describes the scenarios and what is printed.
"""

import base64
import json
import os
import re
import sys
import traceback
import warnings
from contextlib import asynccontextmanager

import anyio
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.shared.exceptions import MCPDeprecationWarning, MCPError

# The SDK calls ping deprecated, which it is for the newer protocol only.
warnings.simplefilter("ignore", MCPDeprecationWarning)


async def list_(parameters):
    async with connect() as (client, _):
        return {"tools": await tool_names(client)}


async def basics(parameters):
    async with connect() as (client, http):
        tools = await tool_names(client)
        results = [await outcome(client, call) for call in parameters.get("calls", [])]
        ping = await pinged(client)
        findings = {
            "serverInfo": dump(client.server_info),
            "protocolVersion": client.protocol_version,
            "tools": tools,
            "results": results,
            "ping": ping,
        }
    return findings | {"http": http}


async def parallel(parameters):
    calls = parameters.get("calls", [])
    results = [None] * len(calls)
    async with connect() as (client, http):

        async def run(index, call):
            results[index] = await outcome(client, call)

        async with anyio.create_task_group() as tasks:
            for index, call in enumerate(calls):
                tasks.start_soon(run, index, call)
    return {"results": results, "http": http}


async def progress(parameters):
    steps = []

    async def note(done, total, message):
        steps.append({"progress": done, "total": total, "message": message})

    async with connect() as (client, http):
        results = [await outcome(client, parameters["call"], progress_callback=note)]
    return {"progress": steps, "results": results, "http": http}


async def cancel(parameters):
    async with connect() as (client, http):
        with anyio.CancelScope() as scope:

            async def abort(*_):
                scope.cancel()

            await outcome(client, parameters["call"], progress_callback=abort)
        ping = await pinged(client)
    return {"results": [{"cancelled": scope.cancelled_caught}], "ping": ping, "http": http}


async def silent(parameters):
    async with connect() as (client, http):
        limit = parameters["seconds"]
        results = [await outcome(client, parameters["call"], read_timeout_seconds=limit)]
    return {"results": results, "http": http}


async def large(parameters):
    async with connect() as (client, http):
        result = await client.call_tool(parameters["call"]["name"], parameters["call"].get("arguments"))
        characters = [len(block.text) for block in result.content]
        ping = await pinged(client)
    return {"characters": characters, "ping": ping, "http": http}


SCENARIOS = {
    "list": list_,
    "basics": basics,
    "parallel": parallel,
    "progress": progress,
    "cancel": cancel,
    "silent": silent,
    "large": large,
}


@asynccontextmanager
async def connect():
    """Connects in the SDK's default mode, with the HTTP client the SDK would make itself.

    The hook only notes what passed; it changes nothing.
    """
    http = []

    async def note(response):
        found = re.search(rb'"method":"([^"]*)"', await response.request.aread())
        method = found and found[1].decode()
        http.append(" ".join(filter(None, [response.request.method, method, str(response.status_code)])))

    http_client = create_mcp_http_client(headers={"Authorization": f"Bearer {os.environ['A2MCP_TOKEN']}"})
    http_client.event_hooks["response"].append(note)
    async with http_client:
        async with Client(streamable_http_client(os.environ["A2MCP_URL"], http_client=http_client)) as client:
            yield client, http


async def tool_names(client):
    names, cursor = [], None
    while True:
        page = await client.list_tools(cursor=cursor)
        names += [tool.name for tool in page.tools]
        cursor = page.next_cursor
        if cursor is None:
            return names


async def pinged(client):
    try:
        await client.send_ping()
        return True
    except MCPError as error:
        return error.message


async def outcome(client, call, **options):
    try:
        result = await client.call_tool(call["name"], call.get("arguments"), **options)
    except MCPError as error:
        return {"error": {"code": error.code, "message": error.message}}
    return {"isError": bool(result.is_error), "content": [without_data(dump(block)) for block in result.content]}


def dump(model):
    return model and model.model_dump(mode="json", by_alias=True, exclude_none=True)


def without_data(block):
    if "data" in block:
        block["bytes"] = len(base64.b64decode(block.pop("data")))
    return block


def reasons(error):
    """What went wrong, without the tree of groups a task group wraps around it."""
    inner = getattr(error, "exceptions", None)
    if inner is None:
        return ["".join(traceback.format_exception_only(error)).strip()]
    return [reason for each in inner for reason in reasons(each)]


def main():
    try:
        name, parameters = (sys.argv[1:] + ["", ""])[:2]
        if name not in SCENARIOS:
            raise SystemExit(f"usage: client.py {'|'.join(SCENARIOS)} [PARAMETERS|-]")
        for variable in ("A2MCP_URL", "A2MCP_TOKEN"):
            if not os.environ.get(variable):
                raise SystemExit(f"the environment variable {variable} is missing")
        parameters = sys.stdin.read() if parameters == "-" else parameters
        findings = anyio.run(SCENARIOS[name], json.loads(parameters or "{}"))
    except Exception as error:
        raise SystemExit("\n".join(reasons(error))) from None
    print(json.dumps(findings))


main()
