#!/usr/bin/env python3
"""Lists and calls the tools of an a2mcp bridge. Python 3.8+, standard library only.

    export A2MCP_URL=http://127.0.0.1:8765/mcp
    python3 call.py --token-file ~/.a2mcp-token list
    python3 call.py --token-file ~/.a2mcp-token call read '{"path": "README.md"}'

The token comes from --token-file or the environment variable A2MCP_TOKEN, never from an argument:
other users of a machine can read arguments. The JSON of a call may also be @FILE, or - for stdin.

Exit codes: 0 result, 1 the tool (or the bridge) reports an error, 2 usage, 3 unreachable or the
connection was lost, 4 unauthorized, 5 time-out; 130 interrupted, which cancels the call.
"""
import argparse
import base64
import binascii
import http.client
import json
import mimetypes
import os
import re
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

RESULT, IS_ERROR, USAGE, UNREACHABLE, UNAUTHORIZED, TIMED_OUT = range(6)
PROTOCOL = "2025-11-25"
# Control characters (except tab and line feed) and bidi controls, which could drive a terminal.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f]")
LINE_ENDS = re.compile("[\t\r\n]+")
AGAIN = "run the same command again soon: a call that still runs, or has just ended, is not run twice"
# For so many seconds nobody may listen before a broken stream is given up.
REFUSED = 4.0


class Failure(Exception):
    def __init__(self, code, text, error=None):
        super().__init__(text)
        self.code = code
        self.error = error  # the JSON-RPC error as it came


class Closed(Failure):
    """Nobody listens."""


class SessionLost(Exception):
    pass


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the token to somewhere else."""

    def redirect_request(self, *args, **kwargs):
        return None


class Bridge:
    def __init__(self, url, token, deadline):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Failure(USAGE, "the URL must look like http://HOST:PORT/mcp")
        self.url, self.token, self.deadline = url, token, deadline
        self.session, self.version, self.next_id, self.pending = None, None, 0, None
        handlers = [NoRedirect()]
        if parts.hostname in ("localhost", "::1") or parts.hostname.startswith("127."):
            handlers.append(urllib.request.ProxyHandler({}))  # a proxy cannot reach our loopback
        self.opener = urllib.request.build_opener(*handlers)

    def call(self, method, params):
        """The result of one request (`params` is JSON); begins a new session once if ours is forgotten."""
        for attempt in (1, 2):
            if self.session is None:
                self._initialize()
            try:
                return self._request(method, params)
            except SessionLost:
                self.session = None
                if attempt == 2:
                    raise Failure(UNREACHABLE, "the bridge forgets its sessions at once")

    def cancel(self):
        """Withdraws the call whose waiting was interrupted; whether the bridge took that."""
        if self.pending is None:
            return False
        self.deadline = min(self.deadline, time.monotonic() + 2)
        try:
            params = json.dumps({"requestId": self.pending, "reason": "interrupted"})
            self._post('{"jsonrpc":"2.0","method":"notifications/cancelled","params":%s}' % params).close()
            return True
        except (Failure, SessionLost):
            return False

    def close(self):
        if self.session is not None:
            try:
                self._open("DELETE", None, {}).close()
            except (Failure, SessionLost):
                pass

    def _initialize(self):
        client = {"name": "a2mcp-call.py", "version": "1"}
        params = {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": client}
        result = self._request("initialize", json.dumps(params))
        self.version = result.get("protocolVersion") if isinstance(result, dict) else None
        self._post('{"jsonrpc":"2.0","method":"notifications/initialized"}').close()

    def _request(self, method, params):
        self.next_id += 1
        self.pending = None if method == "initialize" else self.next_id
        # Built as text, so that numbers and escapes in the arguments arrive as they were written.
        message = '{"jsonrpc":"2.0","id":%d,"method":"%s","params":%s}' % (self.next_id, method, params)
        response = self._post(message)
        if method == "initialize":
            self.session = response.headers.get("mcp-session-id")
        answer = self._answer(response, self.next_id)
        if "error" in answer:
            error = answer["error"] if isinstance(answer["error"], dict) else {}
            raise Failure(IS_ERROR, "%s (%s)" % (error.get("message"), error.get("code")), answer["error"])
        return answer.get("result")

    def _post(self, message):
        body = message.encode("utf-8")
        accept = "application/json, text/event-stream"
        return self._open("POST", body, {"Content-Type": "application/json", "Accept": accept})

    def _open(self, verb, body, headers):
        request = urllib.request.Request(self.url, data=body, headers=headers, method=verb)
        # Unredirected headers stay on this request, whatever an opener does next.
        request.add_unredirected_header("Authorization", "Bearer " + self.token)
        if self.session is not None:
            request.add_unredirected_header("Mcp-Session-Id", self.session)
        if self.version is not None:
            request.add_unredirected_header("MCP-Protocol-Version", self.version)
        try:
            return self.opener.open(request, timeout=max(0.1, self.deadline - time.monotonic()))
        except urllib.error.HTTPError as error:
            raise self._refusal(error)
        except OSError as error:  # URLError, resets, refusals, DNS
            reason = getattr(error, "reason", error)
            if isinstance(reason, (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)):
                raise Failure(UNREACHABLE, "the connection was lost (%s); %s" % (reason, AGAIN))
            kind = Closed if isinstance(reason, ConnectionRefusedError) else Failure
            raise kind(UNREACHABLE, "cannot reach the bridge: %s" % reason)
        except Exception as error:  # http.client's: the other side closed, or speaks no HTTP
            raise Failure(UNREACHABLE, "the connection was lost (%s); %s" % (type(error).__name__, AGAIN))

    def _refusal(self, error):
        if error.code == 401:
            return Failure(UNAUTHORIZED, "unauthorized: the token is wrong, or was rotated")
        try:
            said = json.loads(error.read(65536).decode("utf-8", "replace"))["error"]
            text = said["message"]
        except Exception:
            said, text = None, error.reason
        if error.code == 404 and self.session is not None:
            return SessionLost()
        if error.code in (400, 413):
            return Failure(IS_ERROR, "%s (HTTP %d)" % (text, error.code), said)
        return Failure(UNREACHABLE, "HTTP %d: %s" % (error.code, text))

    def _answer(self, response, wanted):
        """The answer to request `wanted`, from one JSON body or from an event stream."""
        last_id, retry = None, 1.0
        while True:
            kind = response.headers.get("content-type", "").split(";")[0].strip().lower()
            try:
                with response:
                    if kind == "application/json":
                        return self._message(response.read())
                    if kind != "text/event-stream":
                        raise Failure(UNREACHABLE, "no MCP endpoint: it answers with %r" % kind)
                    for name, value in events(response):
                        if name == "id":
                            last_id = value
                        elif name == "retry":
                            retry = min(int(value) / 1000.0, 30.0)
                        else:
                            message = self._message(value)
                            if message.get("id") == wanted and "method" not in message:
                                return message
                            note(message)
            except (OSError, EOFError, ValueError) as error:
                if kind == "application/json":
                    raise Failure(UNREACHABLE, "the connection was lost (%s); %s" % (error, AGAIN))
            except Failure:
                raise
            except Exception as error:  # http.client.IncompleteRead and its like
                if kind == "application/json":
                    raise Failure(UNREACHABLE, "the connection was lost (%s); %s" % (error, AGAIN))
            if last_id is None:
                raise Failure(UNREACHABLE, "the stream ended without an answer; " + AGAIN)
            response = self._resume(last_id, retry)

    def _resume(self, last_id, retry):
        failures, refused_since = 0, None
        while True:
            time.sleep(retry if refused_since is None else min(retry, 1.0))
            try:
                return self._open("GET", None, {"Accept": "text/event-stream", "Last-Event-ID": last_id})
            except SessionLost:
                raise Failure(UNREACHABLE, "the session ended during the call; " + AGAIN)
            except Closed as failure:
                refused_since = refused_since or time.monotonic()
                if time.monotonic() - refused_since >= REFUSED:
                    lost = "the connection was lost, and nobody listens at %s any more: the host, it seems, has ended"
                    raise Failure(UNREACHABLE, (lost + " (%s)") % (self.url, failure))
            except Failure as failure:
                failures, refused_since = failures + 1, None
                if failure.code == UNAUTHORIZED:
                    replaced = "unauthorized: the token was replaced after the call had been sent"
                    raise Failure(UNAUTHORIZED, replaced + ", and the call may have been cancelled")
                if failure.code == IS_ERROR:  # it no longer knows the stream
                    raise Failure(UNREACHABLE, "the stream cannot be resumed (%s); %s" % (failure, AGAIN))
                if failure.code != UNREACHABLE or failures == 20:
                    raise

    def _message(self, data):
        try:
            message = json.loads(data)
        except ValueError:
            raise Failure(UNREACHABLE, "no MCP endpoint: the answer is not JSON")
        return message if isinstance(message, dict) else {}


def events(lines):
    """Yields ("id", text), ("retry", digits) and ("data", text) of an event stream."""
    data = []
    for line in lines:
        line = line.decode("utf-8", "replace").rstrip("\n").rstrip("\r")
        if not line:
            if any(data):
                yield "data", "\n".join(data)
            data = []
            continue
        field, _, value = line.partition(":")
        value = value[1:] if value.startswith(" ") else value
        if field == "data":
            data.append(value)
        elif field == "id" and "\0" not in value:
            yield "id", value
        elif field == "retry" and value.isdigit():
            yield "retry", value


def note(message):
    """Shows what the bridge says while a call runs, such as `awaiting approval`."""
    params = message.get("params")
    if message.get("method") == "notifications/message" and isinstance(params, dict):
        data = params.get("data")
        complain(data if isinstance(data, str) else json.dumps(data))


def one_line(text):
    """What somebody else wrote, on one line."""
    return UNSAFE.sub("?", LINE_ENDS.sub(" ", str(text)))


def complain(text):
    print("call.py: " + one_line(text), file=sys.stderr, flush=True)


def show(text):
    if sys.stdout.isatty():
        text = UNSAFE.sub("?", text.replace("\r\n", "\n"))
    print(text)


def show_block(block, number, out):
    kind = block.get("type")
    if kind == "text":
        show(str(block.get("text", "")))
    elif kind in ("image", "audio"):
        save(block.get("data"), block.get("mimeType"), kind, number, out)
    elif kind == "resource" and isinstance(block.get("resource"), dict):
        resource = block["resource"]
        if "text" in resource:
            show(str(resource["text"]))
        else:
            save(resource.get("blob"), resource.get("mimeType"), kind, number, out)
    elif kind == "resource_link":
        show("%s %s" % (one_line(block.get("uri")), one_line(block.get("name", ""))))
    else:
        show(json.dumps(block))


def save(data, mime, kind, number, out):
    try:
        content = base64.b64decode(data or "", validate=True)
    except (binascii.Error, TypeError, ValueError):
        complain("block %d: %s that is not base64" % (number, kind))
        return
    mime = one_line(mime) if isinstance(mime, str) else "application/octet-stream"
    if out is None:
        show("[%s, %s, %d bytes: use --out DIR to save it]" % (kind, mime, len(content)))
        return
    # The name is ours; nothing the other side says becomes part of a path.
    extension = {"image/webp": ".webp", "audio/wav": ".wav"}.get(mime) or mimetypes.guess_extension(mime) or ".bin"
    os.makedirs(out, exist_ok=True)
    taken = 0
    while True:
        suffix = "-%d" % taken if taken else ""
        path = os.path.join(out, "%s-%d%s%s" % (kind, number, suffix, extension))
        try:
            with open(path, "xb") as file:
                file.write(content)
            break
        except FileExistsError:
            taken += 1
    show("[%s, %s, %d bytes: saved as %s]" % (kind, mime, len(content), path))


def run_list(bridge, options):
    result = bridge.call("tools/list", "{}")
    if options.json:
        show(json.dumps(result))
        return RESULT
    for tool in (result or {}).get("tools", []):
        lines = str(tool.get("description") or "").strip().splitlines()
        show(("%-24s %s" % (one_line(tool.get("name")), one_line(lines[0]) if lines else "")).rstrip())
    return RESULT


def run_call(bridge, options):
    params = '{"name":%s,"arguments":%s}' % (json.dumps(options.tool), options.arguments)
    result = bridge.call("tools/call", params)
    result = result if isinstance(result, dict) else {}
    if options.json:
        show(json.dumps(result))
    else:
        blocks = result.get("content")
        if not blocks and result.get("structuredContent") is not None:
            show(json.dumps(result["structuredContent"]))
        for number, block in enumerate(blocks if isinstance(blocks, list) else [], 1):
            if isinstance(block, dict):
                show_block(block, number, options.out)
    return IS_ERROR if result.get("isError") is True else RESULT


def read_token(path):
    if path is None:
        token = os.environ.get("A2MCP_TOKEN", "").strip()
        if not token:
            raise Failure(USAGE, "no token: use --token-file FILE, or set A2MCP_TOKEN")
    else:
        try:
            with open(os.path.expanduser(path), encoding="utf-8") as file:
                text = file.read(1 << 20).strip()
            # The bridge's own config file works as a token file, too.
            token = json.loads(text).get("token", "") if text.startswith("{") else text
        except (OSError, ValueError) as error:
            raise Failure(USAGE, "cannot read the token file: %s" % error)
    if not isinstance(token, str) or not token or not token.isprintable() or " " in token:
        raise Failure(USAGE, "the token file must hold the token and nothing else")
    try:
        token.encode("latin-1")
    except UnicodeError:
        raise Failure(USAGE, "the token holds characters that cannot be sent in a header")
    return token


def read_arguments(text):
    """The arguments as JSON text, checked."""

    def refuse(word):
        raise ValueError("%s is not JSON" % word)

    try:
        if text == "-":
            text = sys.stdin.read()
        elif text.startswith("@"):
            with open(text[1:], encoding="utf-8") as file:
                text = file.read()
        json.loads(text, parse_constant=refuse)
        text.encode("utf-8")
        return text
    except (OSError, ValueError, RecursionError) as error:
        raise Failure(USAGE, "the arguments must be JSON: %s" % error)


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default=os.environ.get("A2MCP_URL"), help="the bridge (default: A2MCP_URL)")
    parser.add_argument("--token-file", metavar="FILE", help="a file with the token (default: A2MCP_TOKEN)")
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="for everything (600)")
    parser.add_argument("--json", action="store_true", help="print the result (or the error) as JSON")
    verbs = parser.add_subparsers(dest="verb", metavar="list|call")
    verbs.add_parser("list", help="list the tools")
    call = verbs.add_parser("call", help="call a tool")
    call.add_argument("tool")
    call.add_argument("arguments", nargs="?", default="{}", metavar="JSON", help="JSON, @FILE or - (stdin)")
    call.add_argument("--out", metavar="DIR", help="save images and other binary blocks there")
    options = parser.parse_args()
    if options.verb is None:
        parser.error("say list or call")
    if not options.url:
        raise Failure(USAGE, "no URL: use --url URL, or set A2MCP_URL")
    if not 0 < options.timeout <= 1e6:
        raise Failure(USAGE, "--timeout must be more than 0 and at most 1000000 seconds")
    return options


def give_up(seconds):
    complain("time-out after %g s; the call may still be running; %s" % (seconds, AGAIN))
    try:
        sys.stdout.flush()
    except Exception:
        pass
    os._exit(TIMED_OUT)


def main():
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace")
    options = bridge = None
    try:
        options = parse_options()
        token = read_token(options.token_file)
        if options.verb == "call":
            options.arguments = read_arguments(options.arguments)
        # One clock over name lookup, slow headers and slow bytes alike.
        watchdog = threading.Timer(options.timeout, give_up, [options.timeout])
        watchdog.daemon = True
        watchdog.start()
        bridge = Bridge(options.url, token, time.monotonic() + options.timeout + 5)
        code = (run_list if options.verb == "list" else run_call)(bridge, options)
        sys.stdout.flush()
        bridge.close()
        return code
    except Failure as failure:
        complain(failure)
        if options is not None and options.json and failure.error is not None:
            show(json.dumps(failure.error))
        return failure.code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return RESULT
    except OSError as error:
        complain(error)
        return IS_ERROR
    except KeyboardInterrupt:
        try:
            is_cancelled = bridge is not None and bridge.cancel()
            complain("interrupted" + ("; the call was cancelled" if is_cancelled else ""))
            if is_cancelled:
                bridge.close()
        except KeyboardInterrupt:  # a second one waits for nothing
            pass
        return 130


if __name__ == "__main__":
    sys.exit(main())
