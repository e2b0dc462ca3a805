"""A client on PyPI `mcp` 1.x in its default mode.

../README.md describes the scenarios and what is printed.
"""

import base64
import json
import os
import re
import sys
import traceback
from contextlib import asynccontextmanager
from datetime import timedelta

import anyio
from mcp import ClientSession, McpError
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client


async def list_(parameters):
    async with connect() as (session, _, _):
        return {"tools": await tool_names(session)}


async def basics(parameters):
    async with connect() as (session, opened, http):
        tools = await tool_names(session)
        results = [await outcome(session, call) for call in parameters.get("calls", [])]
        ping = await pinged(session)
        findings = {
            "serverInfo": dump(opened.serverInfo),
            "protocolVersion": opened.protocolVersion,
            "tools": tools,
            "results": results,
            "ping": ping,
        }
    return findings | {"http": http}


async def parallel(parameters):
    calls = parameters.get("calls", [])
    results = [None] * len(calls)
    async with connect() as (session, _, http):

        async def run(index, call):
            results[index] = await outcome(session, call)

        async with anyio.create_task_group() as tasks:
            for index, call in enumerate(calls):
                tasks.start_soon(run, index, call)
    return {"results": results, "http": http}


async def progress(parameters):
    steps = []

    async def note(done, total, message):
        steps.append({"progress": done, "total": total, "message": message})

    async with connect() as (session, _, http):
        results = [await outcome(session, parameters["call"], progress_callback=note)]
    return {"progress": steps, "results": results, "http": http}


async def cancel(parameters):
    async with connect() as (session, _, http):
        with anyio.CancelScope() as scope:

            async def abort(*_):
                scope.cancel()

            await outcome(session, parameters["call"], progress_callback=abort)
        ping = await pinged(session)
    return {"results": [{"cancelled": scope.cancelled_caught}], "ping": ping, "http": http}


async def silent(parameters):
    async with connect() as (session, _, http):
        limit = timedelta(seconds=parameters["seconds"])
        results = [await outcome(session, parameters["call"], read_timeout_seconds=limit)]
    return {"results": results, "http": http}


async def large(parameters):
    async with connect() as (session, _, http):
        result = await session.call_tool(parameters["call"]["name"], parameters["call"].get("arguments"))
        characters = [len(block.text) for block in result.content]
        ping = await pinged(session)
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
    async with (
        http_client,
        streamable_http_client(os.environ["A2MCP_URL"], http_client=http_client) as (read, write, _),
        ClientSession(read, write) as session,
    ):
        yield session, await session.initialize(), http


async def tool_names(session):
    names, cursor = [], None
    while True:
        page = await session.list_tools(cursor)
        names += [tool.name for tool in page.tools]
        cursor = page.nextCursor
        if cursor is None:
            return names


async def pinged(session):
    try:
        await session.send_ping()
        return True
    except McpError as error:
        return error.error.message


async def outcome(session, call, **options):
    try:
        result = await session.call_tool(call["name"], call.get("arguments"), **options)
    except McpError as error:
        return {"error": {"code": error.error.code, "message": error.error.message}}
    return {"isError": bool(result.isError), "content": [without_data(dump(block)) for block in result.content]}


def dump(model):
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)


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
