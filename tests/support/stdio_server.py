"""A stdio MCP server for the tests of `a2mcp wrap`: the fixtures of the official conformance suite, and
tools that misbehave on request. Standard library only.

Each request runs in a thread of its own. `--note FILE` appends a JSON line for the start of the process,
`initialize`, each call and each cancel: what really happened, whatever the bridge says of it.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
WAV = "UklGRiYAAABXQVZFZm10IBAAAAABAAEAQB8AAAB9AAACABAAZGF0YQIAAAA="
STEP = 0.05

options = argparse.ArgumentParser()
options.add_argument("--note")
options.add_argument("--pages", type=int, default=1, help="pages of tools/list")
options.add_argument("--list", help="answer tools/list like this from the start, see `shed`")
options.add_argument("--list-unless", help="do not answer tools/list as long as this file exists")
options.add_argument("--exit-at-start", type=int, help="exit with this code instead of serving")
options.add_argument("--exit-while", help="as above, as long as this file exists")
options.add_argument("--wait-while", help="serve only once this file is gone")
options.add_argument("--noise", action="store_true", help="write what is no message around each one")
options.add_argument("--grandchild", action="store_true", help="leave processes in and out of the group")
options.add_argument("--roots-at-start", action="store_true", help="ask for roots as soon as it may")
options.add_argument("--deaf", action="store_true", help="ignore SIGTERM and the end of input")
options.add_argument("rest", nargs="*")
options = options.parse_args()

lock = threading.RLock()
waiting = {}
cancelled = set()
more_tools = []
stdout = sys.stdout.buffer


def write(data):
    with lock:
        stdout.write(data)
        stdout.flush()


def send(message):
    line = json.dumps(message).encode() + b"\n"
    if options.noise:
        text = json.dumps(message, ensure_ascii=False).encode()
        with lock:
            stdout.write(b"a log line on stdout\n\n \r\n{broken\n[1]\n")
            # Characters in two halves.
            for byte in text:
                stdout.write(bytes([byte]))
                stdout.flush()
            stdout.write(b"\r\n")
            stdout.flush()
        return
    write(line)


def note(event, **more):
    if options.note:
        with open(options.note, "a") as file:
            file.write(json.dumps({"event": event, "pid": os.getpid(), **more}) + "\n")


def notify(method, params):
    send({"jsonrpc": "2.0", "method": method, "params": params})


def ask(method, params, limit=60):
    """Asks the client; its answer, or the error's message."""
    ask.last += 1
    key = f"ask-{ask.last}"
    answered = threading.Event()
    waiting[key] = [answered, None]
    send({"jsonrpc": "2.0", "id": key, "method": method, "params": params})
    if not answered.wait(limit):
        waiting.pop(key, None)
        notify("notifications/cancelled", {"requestId": key, "reason": "took too long"})
        return None, "nobody answered"
    message = waiting.pop(key)[1]
    return message.get("result"), message.get("error", {}).get("message")


ask.last = 0


def text(value):
    return {"type": "text", "text": value}


def content(*blocks, error=False):
    return {"content": list(blocks), "isError": error}


def schema(**properties):
    return {"type": "object", "properties": properties}


STRING, NUMBER = {"type": "string"}, {"type": "number"}
JSON_SCHEMA_2020_12 = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": STRING, "city": STRING},
        }
    },
    "properties": {
        "name": STRING,
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": STRING,
        "email": STRING,
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "anyOf": [{"required": ["phone"]}, {"required": ["email"]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}
TITLED = [{"const": f"value{n}", "title": f"{word} Option"} for n, word in enumerate(("First", "Second", "Third"), 1)]
PLAIN = ["option1", "option2", "option3"]
ENUMS = schema(
    untitledSingle={"type": "string", "enum": PLAIN},
    titledSingle={"type": "string", "oneOf": TITLED},
    legacyEnum={"type": "string", "enum": ["opt1", "opt2", "opt3"], "enumNames": ["Option One", "Option Two", "Option Three"]},
    untitledMulti={"type": "array", "minItems": 1, "maxItems": 3, "items": {"type": "string", "enum": PLAIN}},
    titledMulti={"type": "array", "minItems": 1, "maxItems": 3, "items": {"anyOf": TITLED}},
)
DEFAULTS = schema(
    name={"type": "string", "description": "User name", "default": "John Doe"},
    age={"type": "integer", "description": "User age", "default": 30},
    score={"type": "number", "description": "User score", "default": 95.5},
    status={"type": "string", "description": "User status", "enum": ["active", "inactive", "pending"], "default": "active"},
    verified={"type": "boolean", "description": "Verification status", "default": True},
)
TOOLS = {
    "test_simple_text": schema(),
    "test_image_content": schema(),
    "test_audio_content": schema(),
    "test_embedded_resource": schema(),
    "test_multiple_content_types": schema(),
    "test_error_handling": schema(),
    "test_tool_with_progress": schema(),
    "test_tool_with_logging": schema(),
    "test_sampling": schema(prompt=STRING),
    "test_elicitation": schema(message=STRING),
    "test_elicitation_sep1034_defaults": schema(),
    "test_elicitation_sep1330_enums": schema(),
    "json_schema_2020_12_tool": JSON_SCHEMA_2020_12,
    "echo": schema(),
    "hang": schema(),
    "stubborn": schema(until=STRING),
    "poke": schema(),
    "slow": schema(seconds=NUMBER, step=NUMBER),
    "large": schema(bytes=NUMBER),
    "latin": schema(),
    "die": schema(code=NUMBER),
    "grow": schema(),
    "shout": schema(bytes=NUMBER),
    "chatter": schema(lines=NUMBER),
    "roots": schema(),
    "timed": schema(),
    "progress_burst": schema(steps=NUMBER),
    "log_burst": schema(lines=NUMBER),
    "close_input": schema(),
    "level": schema(),
    "touch": schema(uri=STRING),
    "odd": schema(),
    "shed": schema(how=STRING),
    "argv": schema(),
}
wanted_level = []
listing = [options.list] if options.list else []
poked, poke_done = threading.Event(), threading.Event()
subscribed = set()


def definition(name, value):
    return {"name": name, "description": f"fixture {name}", "inputSchema": value}


def list_tools(params):
    while options.list_unless is not None and os.path.exists(options.list_unless):
        time.sleep(0.01)
    match listing[-1:]:
        case ["empty"]:
            return {"tools": []}
        case ["missing"]:
            return {}
        case ["failed"]:
            raise Failure(-32603, "no list today")
    tools = [definition(*tool) for tool in TOOLS.items()] + [definition(name, schema()) for name in more_tools]
    size = -(-len(tools) // options.pages)
    page = int(params.get("cursor", "0"))
    result = {"tools": tools[page * size : (page + 1) * size]}
    if (page + 1) * size < len(tools):
        result["nextCursor"] = str(page + 1)
    return result


def elicit(message, wanted, words):
    answer, error = ask("elicitation/create", {"message": message, "requestedSchema": wanted})
    if error:
        return content(text(error), error=True)
    given = json.dumps(answer.get("content", {}))
    return content(text(f"{words}: action={answer.get('action')}, content={given}"))


def call(request, params, raw):
    name, given = params["name"], params.get("arguments", {})
    token = params.get("_meta", {}).get("progressToken")
    image = {"type": "image", "data": PNG, "mimeType": "image/png"}

    def progress(done, total=None, message=None):
        step = {"progressToken": token, "progress": done, "total": total, "message": message}
        notify("notifications/progress", {key: value for key, value in step.items() if value is not None})

    match name:
        case "test_simple_text":
            return content(text("This is a simple text response for testing."))
        case "test_image_content":
            return content(image)
        case "test_audio_content":
            return content({"type": "audio", "data": WAV, "mimeType": "audio/wav"})
        case "test_embedded_resource":
            resource = {"uri": "test://embedded-resource", "mimeType": "text/plain", "text": "This is an embedded resource content."}
            return content({"type": "resource", "resource": resource})
        case "test_multiple_content_types":
            resource = {"uri": "test://mixed-content-resource", "mimeType": "application/json", "text": '{"test":"data","value":123}'}
            return content(text("Multiple content types test:"), image, {"type": "resource", "resource": resource})
        case "test_error_handling":
            return content(text("This tool intentionally returns an error for testing"), error=True)
        case "test_tool_with_progress":
            for done in (0, 50, 100):
                progress(done, 100, f"step {done} of 100")
                time.sleep(STEP)
            return content(text("progress reported"))
        case "test_tool_with_logging":
            for step in ("started", "processing data", "completed"):
                notify("notifications/message", {"level": "info", "logger": "fixture", "data": f"Tool execution {step}"})
                time.sleep(STEP)
            return content(text("logs written"))
        case "test_sampling":
            prompt = {"role": "user", "content": text(given.get("prompt", ""))}
            answer, error = ask("sampling/createMessage", {"messages": [prompt], "maxTokens": 100})
            if error:
                return content(text(error), error=True)
            return content(text(f"LLM response: {answer['content']['text']}"))
        case "test_elicitation":
            return elicit(given.get("message", ""), {**schema(response=STRING), "required": ["response"]}, "User response")
        case "test_elicitation_sep1034_defaults":
            return elicit("Check the defaults", {**DEFAULTS, "required": []}, "Elicitation completed")
        case "test_elicitation_sep1330_enums":
            return elicit("Choose", {**ENUMS, "required": []}, "Elicitation completed")
        case "json_schema_2020_12_tool":
            return content(text(json.dumps(given)))
        case "echo":
            # What came, as it came.
            return content(text(raw))
        case "hang":
            progress(1)
            while request not in cancelled:
                time.sleep(0.005)
            return None
        case "stubborn":
            # A cancel means nothing to it.
            while request not in cancelled:
                time.sleep(0.005)
            if given.get("until") == "poke":
                poked.wait(60)
                poked.clear()
            notify("notifications/message", {"level": "error", "data": "stubborn"})
            answer, error = ask("elicitation/create", {"message": "secret", "requestedSchema": schema()})
            note("stubborn", answer=answer, error=error)
            send({"jsonrpc": "2.0", "id": request, "result": content(text("done"))})
            poke_done.set()
            return None
        case "poke":
            poke_done.clear()
            poked.set()
            poke_done.wait(60)
            return content(text("poked"))
        case "slow":
            seconds = given.get("seconds", 0)
            until = time.monotonic() + seconds
            step, done = given.get("step", 0), 0
            while time.monotonic() < until:
                if request in cancelled:
                    return None
                if step:
                    done += 1
                    progress(done)
                time.sleep(step or 0.01)
            return content(text(f"slept {seconds} s"))
        case "large":
            # One line, whatever else is to be said meanwhile.
            with lock:
                write(b'{"jsonrpc":"2.0","id":%d,"result":{"content":[{"type":"text","text":"' % request)
                rest = int(given["bytes"])
                while rest:
                    part = min(rest, 1 << 20)
                    write(b"x" * part)
                    rest -= part
                write(b'"}],"isError":false}}\n')
            return None
        case "latin":
            write(b'{"jsonrpc":"2.0","id":%d,"result":{"content":[{"type":"text","text":"caf\xe9"}]}}\n' % request)
            return None
        case "die":
            print("dying as asked", file=sys.stderr, flush=True)
            os._exit(int(given.get("code", 7)))
        case "grow":
            more_tools.append(f"grown_{len(more_tools)}")
            notify("notifications/tools/list_changed", {})
            return content(text(more_tools[-1]))
        case "shout":
            sys.stderr.write("loud " * (int(given["bytes"]) // 5) + "\nthe last line\n")
            sys.stderr.flush()
            return content(text("shouted"))
        case "chatter":
            sys.stderr.write("blah\n" * int(given["lines"]))
            sys.stderr.flush()
            return content(text("chattered"))
        case "roots":
            answer, error = ask("roots/list", {})
            return content(text(error or json.dumps(answer)), error=bool(error))
        case "timed":
            # It waits for `poke`, then withdraws its question and answers in one write.
            send({"jsonrpc": "2.0", "id": "timed", "method": "elicitation/create", "params": {"message": "quick!", "requestedSchema": schema()}})
            poked.wait(60)
            poked.clear()
            gone = {"method": "notifications/cancelled", "params": {"requestId": "timed", "reason": "took too long"}}
            result = {"id": request, "result": content(text("nobody answered"))}
            write(b"".join(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n" for message in (gone, result)))
            poke_done.set()
            return None
        case "progress_burst":
            steps = int(given["steps"])
            for done in range(1, steps + 1):
                progress(done, steps)
            return content(text("burst"))
        case "log_burst":
            # All in one write.
            lines = ({"level": "error", "data": number} for number in range(int(given["lines"])))
            logs = ({"jsonrpc": "2.0", "method": "notifications/message", "params": line} for line in lines)
            write("".join(json.dumps(log) + "\n" for log in logs).encode())
            return content(text("burst"))
        case "level":
            return content(text(json.dumps({"levels": wanted_level, "subscribed": sorted(subscribed)})))
        case "touch":
            notify("notifications/resources/updated", {"uri": given["uri"]})
            return content(text("touched"))
        case "odd":
            # Whatever the caller wants in place of a result; "members" is all of the answer but its id.
            members = given["members"] if "members" in given else {"result": given["result"]}
            send({"jsonrpc": "2.0", "id": request, **members})
            return None
        case "shed":
            # The list it has from now on, or none at all.
            listing[:] = [given["how"]]
            notify("notifications/tools/list_changed", {})
            return content(text("shed"))
        case "argv":
            return content(text(json.dumps({"rest": options.rest, "env": os.environ.get("FIXTURE", ""), "cwd": os.getcwd()})))
        case _ if name in more_tools:
            return content(text(f"{name} is here"))
    raise LookupError(f"Unknown tool: {name}")


def resources(params):
    def one(name, mime):
        return {"uri": f"test://{name}", "name": name, "description": f"fixture {name}", "mimeType": mime}

    return {
        "resources": [
            one("static-text", "text/plain"),
            one("static-binary", "image/png"),
            one("watched-resource", "text/plain"),
        ]
    }


class Failure(Exception):
    def __init__(self, code, message, data=None):
        super().__init__(message)
        self.error = {"code": code, "message": message}
        if data is not None:
            self.error["data"] = data


def read_resource(params):
    uri = params.get("uri", "")
    if uri == "test://static-text":
        body = {"mimeType": "text/plain", "text": "This is the content of the static text resource."}
    elif uri == "test://static-binary":
        body = {"mimeType": "image/png", "blob": PNG}
    elif uri == "test://watched-resource":
        body = {"mimeType": "text/plain", "text": "Watched resource content"}
    elif uri.startswith("test://template/") and uri.endswith("/data"):
        key = uri.split("/")[3]
        body = {"mimeType": "application/json", "text": json.dumps({"id": key, "templateTest": True, "data": f"Data for ID: {key}"})}
    elif uri == "test://slow":
        time.sleep(1)
        body = {"mimeType": "text/plain", "text": "slow"}
    else:
        raise Failure(-32002, "Resource not found", {"uri": uri, "big": 12345678901234567890123})
    return {"contents": [{"uri": uri, **body}]}


def prompts(params):
    def one(name, *arguments):
        needed = [{"name": each, "description": f"argument {each}", "required": True} for each in arguments]
        return {"name": name, "description": f"fixture {name}", "arguments": needed}

    return {
        "prompts": [
            one("test_simple_prompt"),
            one("test_prompt_with_arguments", "arg1", "arg2"),
            one("test_prompt_with_embedded_resource", "resourceUri"),
            one("test_prompt_with_image"),
        ]
    }


def prompt(params):
    given = params.get("arguments", {})

    def user(block):
        return {"role": "user", "content": block}

    match params.get("name"):
        case "test_simple_prompt":
            messages = [user(text("This is a simple prompt for testing."))]
        case "test_prompt_with_arguments":
            messages = [user(text(f"Prompt with arguments: arg1='{given.get('arg1')}', arg2='{given.get('arg2')}'"))]
        case "test_prompt_with_embedded_resource":
            resource = {"uri": given.get("resourceUri"), "mimeType": "text/plain", "text": "Embedded resource content for testing."}
            messages = [user({"type": "resource", "resource": resource}), user(text("Please process the embedded resource above."))]
        case "test_prompt_with_image":
            image = {"type": "image", "data": PNG, "mimeType": "image/png"}
            messages = [user(image), user(text("Please analyze the image above."))]
        case unknown:
            raise Failure(-32602, f"unknown prompt {unknown}")
    return {"messages": messages}


def initialize(params):
    note("initialize", params=params)
    return {
        "protocolVersion": params["protocolVersion"],
        "capabilities": {
            "tools": {"listChanged": True},
            "resources": {"subscribe": True, "listChanged": True},
            "prompts": {"listChanged": True},
            "completions": {},
            "logging": {},
        },
        "serverInfo": {"name": "fixture", "title": "The fixture server", "version": "1.2.3"},
        "instructions": "Be kind to fixtures.",
    }


def subscribe(params):
    subscribed.add(params["uri"])
    return {}


def unsubscribe(params):
    subscribed.discard(params["uri"])
    return {}


def set_level(params):
    wanted_level.append(params["level"])
    return {}


METHODS = {
    "initialize": initialize,
    "ping": lambda params: {},
    "tools/list": list_tools,
    "resources/list": resources,
    "resources/templates/list": lambda params: {
        "resourceTemplates": [
            {"uriTemplate": "test://template/{id}/data", "name": "template", "description": "by id", "mimeType": "application/json"}
        ]
    },
    "resources/read": read_resource,
    "resources/subscribe": subscribe,
    "resources/unsubscribe": unsubscribe,
    "logging/setLevel": set_level,
    "prompts/list": prompts,
    "prompts/get": prompt,
    "completion/complete": lambda params: {"completion": {"values": ["alpha", "beta"], "total": 2, "hasMore": False}},
}


def serve(message, line):
    method, key, params = message["method"], message["id"], message.get("params", {})
    note("request", method=method)
    try:
        if method == "tools/call":
            note("call", tool=params.get("name"), token=params.get("_meta", {}).get("progressToken"))
            result = call(key, params, line)
        elif method in METHODS:
            result = METHODS[method](params)
        else:
            raise Failure(-32601, f"Method not found: {method}")
    except Failure as failure:
        send({"jsonrpc": "2.0", "id": key, "error": failure.error})
        return
    except Exception as error:
        send({"jsonrpc": "2.0", "id": key, "error": {"code": -32602, "message": str(error)}})
        return
    if key in cancelled:
        # As the Python SDK does it; nobody waits for it.
        send({"jsonrpc": "2.0", "id": key, "error": {"code": 0, "message": "Request cancelled"}})
    elif result is not None:
        send({"jsonrpc": "2.0", "id": key, "result": result})


def started():
    """What it asks as soon as it may, which concerns no caller."""
    if options.roots_at_start:
        answer, error = ask("roots/list", {}, limit=5)
        note("roots", answer=answer, error=error)


def main():
    note("start")
    if options.exit_at_start is not None and (options.exit_while is None or os.path.exists(options.exit_while)):
        print("cannot start: \x1b[31mno database\x1b[0m", file=sys.stderr, flush=True)
        sys.exit(options.exit_at_start)
    while options.wait_while is not None and os.path.exists(options.wait_while):
        time.sleep(0.01)
    if options.grandchild:
        inside = subprocess.Popen(["sleep", "987"])
        outside = subprocess.Popen(["sleep", "988"], start_new_session=True)
        # Its parent goes at once: nobody but a reaper knows of it.
        orphan = subprocess.run(["sh", "-c", "sleep 989 >/dev/null 2>&1 & echo $!"], stdout=subprocess.PIPE, start_new_session=True)
        note("grandchildren", pids=[inside.pid, outside.pid, int(orphan.stdout)])
    if options.deaf:
        import signal

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.noise:
        write(b"\xef\xbb\xbf")
    for line in sys.stdin.buffer:
        line = line.decode()
        message = json.loads(line)
        method = message.get("method")
        if method is None:
            if entry := waiting.get(message["id"]):
                entry[1] = message
                entry[0].set()
        elif method == "notifications/cancelled":
            note("cancelled", request=message["params"]["requestId"])
            cancelled.add(message["params"]["requestId"])
        elif method == "notifications/initialized":
            threading.Thread(target=started, daemon=True).start()
        elif method.startswith("notifications/"):
            note(method)
        elif method == "tools/call" and message["params"]["name"] == "close_input":
            # It lives on, and what it has begun goes on.
            options.deaf = True
            with open(os.devnull) as nothing:
                os.dup2(nothing.fileno(), 0)
            send({"jsonrpc": "2.0", "id": message["id"], "result": content(text("closed"))})
            break
        else:
            threading.Thread(target=serve, args=(message, line.rstrip("\n")), daemon=True).start()
    note("end of input")
    while options.deaf:
        time.sleep(1)


main()
