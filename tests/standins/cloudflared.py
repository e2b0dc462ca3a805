"""A stand-in for cloudflared, for tests on loopback: what a supervisor of `cloudflared tunnel --url` can
see of the real program, as it was observed (tests/it/cloudflared.rs holds the observations, one test
per row). The product knows nothing of it.

It plays the quick service and the edge itself. "Public" is a loopback port that really forwards HTTP to
the origin; under STANDIN_DIR it leaves `names/<host name>` holding that port while the name is served,
one line of JSON per start in `starts`, and it reads `scenario.json` there, again and again, so that a
test can change the weather while it runs. Keys (all optional):

  version        what it says it is; flags newer than that are unknown to it
  service        ok | 429 | html | html200 | errors | reset | refused | nxdomain | silent | nameless
  serviceDelay   seconds until the quick service answers; serviceTimeout (15) is the real patience
  metricsDelay   seconds between the name and the metrics port;  metricsTaken: the port is in use
  connectDelay   seconds until the edge answers
  edge           up | refuses | hangs | closes | unauthorized | error   (before the first success)
                 up | dropped | deleted | silent                        (after it)
  edgePatience   seconds that an edge which hangs is waited for (10)
  edgeLingers    the edge does not close after an unregister
  udpBlocked     QUIC cannot get out;  fallbackAfter: seconds of it until `auto` changes to http2 (12.4)
  retryPause     seconds between attempts (2)
  exitAfter      seconds until it dies with exitCode (1)
  noise          lines of log per second
  sseGetHeld     Cloudflare's side: an event stream to a GET comes when it has ended
  inFlight       Cloudflare's side: beyond so many requests 429 (200)
  maxUpload      Cloudflare's side: bytes (100 MB);  firstByte: seconds until 524 (100)
"""

import json
import os
import random
import select
import signal
import socket
import sys
import threading
import time
import uuid

DIR = os.environ["STANDIN_DIR"]
STARTED = time.monotonic()
# Flags it knows, with the version that brought them; True: needs no value.
FLAGS = {
    "config": ("2018.1.0", False), "no-autoupdate": ("2018.1.0", True), "metrics": ("2018.1.0", False),
    "url": ("2018.1.0", False), "loglevel": ("2018.1.0", False), "protocol": ("2020.1.0", False),
    "retries": ("2018.1.0", False), "grace-period": ("2018.1.0", False), "pidfile": ("2018.1.0", False),
    "quick-service": ("2021.7.0", False), "max-edge-addr-retries": ("2022.12.0", False),
    "management-diagnostics": ("2024.2.0", True), "output": ("2025.6.1", False),
    "no-prechecks": ("2026.5.0", True), "http-host-header": ("2018.1.0", False), "edge": ("2018.1.0", False),
    "hello-world": ("2018.1.0", True), "name": ("2020.1.0", False), "post-quantum": ("2022.9.0", True),
}
BOOLEANS = {"1": True, "t": True, "true": True, "0": False, "f": False, "false": False}


def scenario():
    for _ in range(50):
        try:
            with open(os.path.join(DIR, "scenario.json")) as file:
                return json.load(file)
        except FileNotFoundError:
            return {}
        except ValueError:  # just being written
            time.sleep(0.002)
    return {}


class Run:
    """One start of the program."""

    def __init__(self):
        self.flags = {}
        self.json_log = False
        self.name = ""
        self.connector = str(uuid.uuid4())
        self.ready = False
        self.was_ready = False
        self.stopping = None
        self.protocol = "http2"
        self.rules = None
        self.lock = threading.Lock()
        self.in_flight = 0
        self.total = 0
        self.pool = []
        self.cut = []

    # -- what it says ------------------------------------------------------------------------------

    def log(self, level, message, **fields):
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        if self.json_log:
            names = {"INF": "info", "ERR": "error", "WRN": "warn"}
            line = compact({"level": names[level], **fields, "time": now, "message": message})
        else:
            pairs = "".join(f" {key}={json.dumps(value) if ' ' in str(value) else value}" for key, value in fields.items())
            line = f"{now} {level} {message}{pairs}"
        self.plain(line)

    def plain(self, line):
        data = (line + "\n").encode()
        try:
            while data:
                data = data[os.write(2, data):]
        except BrokenPipeError:  # as a Go program does
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGPIPE)

    def fatal(self, line):
        self.plain(line)
        leave(1)

    def usage(self, why):
        sys.stdout.write(f"Incorrect Usage. {why}\n\nNAME:\n   cloudflared tunnel - Use Cloudflare Tunnel to expose private services\n")
        sys.stdout.flush()
        leave(0)

    # -- flags, environment, config file -----------------------------------------------------------

    def arguments(self, argv):
        version = scenario().get("version", "2026.8.2")
        if argv in (["--version"], ["-v"], ["version"]):
            print(f"cloudflared version {version} (built 2026-08-20-1012 UTC)", flush=True)
            leave(0)
        if not argv or argv[0] != "tunnel":
            print("NAME:\n   cloudflared - Cloudflare's command-line tool and agent", flush=True)
            leave(0)
        rest = argv[1:]
        while rest:
            flag = rest.pop(0).lstrip("-")
            name, _, value = flag.partition("=")
            since, boolean = FLAGS.get(name, (None, False))
            if since is None or numbers(since) > numbers(version):
                self.usage(f"flag provided but not defined: -{name}")
            if boolean:
                self.flags[name] = BOOLEANS.get(value.lower(), None) if value else True
            elif not value and rest:
                self.flags[name] = rest.pop(0)
            else:
                self.flags[name] = value
        for name, value in os.environ.items():
            if name in ("NO_AUTOUPDATE", "NO_TLS_VERIFY") and value.lower() not in BOOLEANS:
                self.usage(f"could not parse {value!r} as bool value for flag {name}")
            if name.startswith("TUNNEL_"):
                self.flags.setdefault(name[len("TUNNEL_"):].lower().replace("_", "-"), value)
        self.json_log = self.flags.get("output") == "json"
        if seconds(self.flags.get("grace-period", "30s")) > 180:
            self.fatal("grace-period must be equal or less than 3m0s")
        self.config()
        if "name" in self.flags:
            self.fatal("Cannot determine default origin certificate path. No file cert.pem in [~/.cloudflared]")

    def config(self):
        path = self.flags.get("config")
        home = os.environ.get("HOME", "/nonexistent")
        places = [path] if path else [
            os.path.join(folder, name)
            for folder in (f"{home}/.cloudflared", f"{home}/.cloudflare-warp", f"{home}/cloudflare-warp")
            for name in ("config.yml", "config.yaml")
        ]
        for place in places:
            try:
                with open(place) as file:
                    text = file.read()
                break
            except OSError as error:
                if path:
                    self.fatal(f"Cannot open config file {path}: {error.strerror}")
        else:
            return
        if not text.strip():
            self.log("ERR", f"Configuration file {place} was empty")
            return
        if text.count("[") != text.count("]") or text.count("{") != text.count("}"):
            self.fatal(f"error parsing YAML in config file at {place}: yaml: line 1: did not find expected ',' or ']'")
        for line in text.splitlines():
            key, colon, value = line.partition(":")
            if colon and key in FLAGS:
                self.flags.setdefault(key, value.strip())
        if "ingress:" in text:
            self.rules = 418 if "http_status:418" in text else 404
            if "http_status" not in text:
                self.rules = 0

    # -- the quick service --------------------------------------------------------------------------

    def quick(self):
        weather = scenario()
        service = weather.get("service", "ok")
        self.log("INF", "Thank you for trying Cloudflare Tunnel. Doing so, without a Cloudflare account, is a quick way to experiment and try it out.")
        self.log("INF", "Requesting new quick Tunnel on trycloudflare.com...")
        post = 'failed to request quick Tunnel: Post "https://api.trycloudflare.com/tunnel": '
        pause(weather.get("serviceDelay", 0))
        if service == "429":
            return self.unparsed("error code: 1015", "429 Too Many Requests", "e")
        if service == "html":
            return self.unparsed("<!DOCTYPE html><html><title>500</title></html>", "500 Internal Server Error", "<")
        if service == "html200":
            return self.unparsed("<html>Sign in to this network</html>", "200 OK", "<")
        if service == "errors":
            self.fatal("failed to parse quick Tunnel ID: invalid UUID length: 0")
        if service == "reset":
            self.fatal(post + "EOF")
        if service == "refused":
            self.fatal(post + "dial tcp 104.16.230.132:443: connect: connection refused")
        if service == "nxdomain":
            self.fatal(post + "dial tcp: lookup api.trycloudflare.com on 127.0.0.53:53: no such host")
        if service == "silent":
            pause(weather.get("serviceTimeout", 15))
            self.fatal(post + "net/http: timeout awaiting response headers")
        if service != "nameless":
            words = ("inlet", "jade", "pearl", "river", "calm", "north", "ember", "quiet", "stone", "lark")
            self.name = "-".join(random.sample(words, 4)) + f"-{random.randrange(10**6)}.trycloudflare.com"
        width = 68
        url = f"https://{self.name}" if self.name else ""
        self.log("INF", "+" + "-" * (width + 16) + "+")
        self.log("INF", "|  " + "Your quick Tunnel has been created! Visit it at (it may take some time to be reachable):".ljust(width + 14) + "|")
        self.log("INF", "|  " + url.ljust(width + 14) + "|")
        self.log("INF", "+" + "-" * (width + 16) + "+")

    def unparsed(self, body, status, char):
        problem = f"invalid character '{char}' looking for beginning of value"
        self.log("ERR", f"Error unmarshaling QuickTunnel response: {body}", error=problem, status_code=status)
        self.fatal(f"failed to unmarshal quick Tunnel: {problem}")

    # -- the metrics port ---------------------------------------------------------------------------

    def metrics(self):
        weather = scenario()
        self.log("INF", f"Version {weather.get('version', '2026.8.2')}")
        self.log("INF", "Settings: map[" + " ".join(f"{key}:{value}" for key, value in sorted(self.flags.items())) + "]")
        if self.rules == 0:
            self.fatal("The last ingress rule must match all URLs (i.e. it should not have a hostname or path filter)")
        pause(weather.get("metricsDelay", 0))
        host, _, port = self.flags.get("metrics", "127.0.0.1:0").rpartition(":")
        try:
            if weather.get("metricsTaken"):
                raise OSError
            listener = socket.create_server((host, int(port)))
        except OSError:
            self.fatal(f"Error opening metrics server listener: listen tcp {host}:{port}: bind: address already in use")
        self.log("INF", f"Starting metrics server on 127.0.0.1:{listener.getsockname()[1]}/metrics")
        serve(listener, self.metrics_request)

    def metrics_request(self, client):
        head, _ = read_head(client)
        path = head.split(b" ")[1].decode() if head else ""
        status, kind = 200, "text/plain; charset=utf-8"
        if path == "/ready":
            up = self.ready and not self.stopping
            status, kind = (200 if up else 503), "application/json"
            body = compact({"status": status, "readyConnections": int(up), "connectorId": self.connector})
        elif path == "/quicktunnel":
            body = compact({"hostname": self.name})
        elif path == "/healthcheck":
            body = "OK\n"
        elif path == "/metrics":
            body = (f"cloudflared_tunnel_ha_connections 1\ncloudflared_tunnel_total_requests {self.total}\n"
                    f'cloudflared_tunnel_user_hostnames_counts{{userHostname="https://{self.name}"}} 1\n')
        else:
            status, body = 404, "404 page not found\n"
        reason = {200: "OK", 404: "Not Found", 503: "Service Unavailable"}[status]
        client.sendall(f"HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                       f"Connection: close\r\n\r\n{body}".encode())

    # -- the edge -----------------------------------------------------------------------------------

    def connect(self):
        """Runs until it is told to stop; what the real program does about each kind of edge."""
        chosen = self.flags.get("protocol", "quic")
        self.protocol = "quic" if chosen in ("auto", "quic") else "http2"
        began, next_try = time.monotonic(), time.monotonic()
        while not self.stopping:
            weather = scenario()
            edge, now = weather.get("edge", "up"), time.monotonic()
            if "exitAfter" in weather and now - STARTED >= weather["exitAfter"]:
                self.fatal_with("the stand-in was told to die", weather.get("exitCode", 1))
            if self.ready and edge in ("dropped", "deleted", "refuses"):
                self.unregister()
                self.log("ERR", "Connection terminated", error="connection with edge closed", connIndex=0)
                next_try = now + weather.get("retryPause", 2)
            elif not self.ready and now >= next_try:
                next_try = now + weather.get("retryPause", 2)
                if weather.get("udpBlocked") and self.protocol == "quic":
                    self.log("ERR", "Failed to dial a quic connection", error="failed to dial to edge with quic: timeout: no recent network activity", connIndex=0, event=0, ip="198.41.200.33")
                    next_try = min(next_try, began + weather.get("fallbackAfter", 12.4))
                    if chosen == "auto" and now - began >= weather.get("fallbackAfter", 12.4):
                        self.log("INF", "Switching to fallback protocol http2", connIndex=0, event=0, ip="198.41.200.33")
                        self.protocol = "http2"
                        next_try = now
                    else:
                        self.log("INF", "Retrying connection in up to 2s", connIndex=0, event=0, ip="198.41.200.33")
                elif now - began < weather.get("connectDelay", 0):
                    next_try = now + 0.01
                else:
                    self.attempt(edge, weather)
            if weather.get("noise"):
                self.log("INF", "noise " + "x" * 400)
                time.sleep(1 / weather["noise"])
            time.sleep(0.01)

    def attempt(self, edge, weather):
        refused = "Register tunnel error from server side"
        if edge in ("up", "silent"):
            self.register()
        elif edge == "unauthorized":
            self.log("ERR", refused, error="Unauthorized: Invalid tunnel secret", connIndex=0, event=0, ip="198.41.192.7")
        elif edge == "deleted":
            self.log("ERR", refused, error="Unauthorized: Tunnel not found", connIndex=0, event=0, ip="198.41.192.7")
        elif edge == "error" and not self.was_ready:
            self.log("ERR", refused, error="Internal error: try again", connIndex=0, event=0, ip="198.41.192.7")
            self.fatal("initial tunnel connection failed: Internal error: try again")
        elif edge in ("hangs", "closes") and not self.was_ready:
            end = time.monotonic() + weather.get("edgePatience", 10)
            while time.monotonic() < end and not self.stopping:
                time.sleep(0.01)
            if self.stopping:
                return
            self.log("ERR", "Serve tunnel error", error="connection with edge closed", connIndex=0, event=0, ip="198.41.192.7")
            self.fatal("connection with edge closed")
        else:
            self.log("ERR", "Unable to establish connection with Cloudflare edge", error="DialContext error: dial tcp 198.41.192.7:7844: connect: connection refused", connIndex=0, event=0, ip="198.41.192.7")
        if not self.ready:
            self.log("INF", "Retrying connection in up to 2s", connIndex=0, event=0, ip="198.41.192.7")

    def register(self):
        if not hasattr(self, "public"):
            self.public = socket.create_server(("127.0.0.1", 0), backlog=512)
            serve(self.public, self.public_request)
        os.makedirs(os.path.join(DIR, "names"), exist_ok=True)
        if self.name:
            path = os.path.join(DIR, "names", self.name)
            with open(path + ".tmp", "w") as file:
                file.write(str(self.public.getsockname()[1]))
            os.rename(path + ".tmp", path)
        self.ready = self.was_ready = True
        self.log("INF", "Registered tunnel connection", connIndex=0, connection=str(uuid.uuid4()), event=0, ip="198.41.192.7", location="ams01", protocol=self.protocol)

    def unregister(self):
        self.ready = False
        try:
            os.remove(os.path.join(DIR, "names", self.name))
        except OSError:
            pass
        with self.lock:
            for sock in self.cut:
                close(sock)

    # -- requests -----------------------------------------------------------------------------------

    def public_request(self, client):
        """One connection of the public side, request after request."""
        rest = b""
        while True:
            head, rest = read_head(client, rest)
            if not head:
                return
            weather = scenario()
            if weather.get("edge") == "silent":
                time.sleep(weather.get("firstByte", 100))
                return
            if not self.ready or self.stopping:
                client.sendall(b"HTTP/1.1 530 <none>\r\nContent-Length: 16\r\nConnection: close\r\n\r\nerror code: 1033")
                return
            with self.lock:
                full = self.in_flight >= weather.get("inFlight", 200)
                if not full:
                    self.in_flight += 1
                    self.total += 1
                    self.cut.append(client)
            if full:
                refuse(client, head, rest, 429, "Too Many Requests")
                return
            try:
                rest = self.forward(client, head, rest, weather)
            finally:
                with self.lock:
                    self.in_flight -= 1
                    self.cut.remove(client)
            if rest is None:
                return

    def forward(self, client, head, rest, weather):
        """Sends one request to the origin and its reply back; what follows in `client`, or None to close."""
        lines = head.split(b"\r\n")
        method, target, _ = lines[0].split(b" ", 2)
        fields = [tuple(part.strip() for part in line.split(b":", 1)) for line in lines[1:] if b":" in line]
        get = lambda name: next((value for key, value in fields if key.lower() == name), None)
        length = int(get(b"content-length") or 0)
        if length > weather.get("maxUpload", 100_000_000):
            refuse(client, head, rest, 413, "Payload Too Large")
            return None
        if self.rules:
            refuse(client, head, rest, self.rules, "by the rules of a config file")
            return None
        public = self.flags.get("http-host-header") or self.name
        sent = [(b"Host", public.encode())] + [
            (key, value) for key, value in fields if key.lower() not in (b"host", b"connection", b"proxy-connection", b"keep-alive")
        ]
        if not get(b"user-agent"):
            sent.append((b"User-Agent", b""))
        if not get(b"accept-encoding"):
            sent.append((b"Accept-Encoding", b"gzip, br"))
        sent += [(b"Cf-Warp-Tag-Id", self.connector.encode()), (b"Cf-Connecting-Ip", b"203.0.113.9"),
                 (b"Cf-Ray", b"8f0000000000abcd-AMS"), (b"Cf-Visitor", b'{"scheme":"https"}'), (b"Cdn-Loop", b"cloudflare; loops=1"),
                 (b"X-Forwarded-For", b"203.0.113.9"), (b"X-Forwarded-Proto", b"https"), (b"Connection", b"keep-alive")]
        request = b"%s %s HTTP/1.1\r\n" % (method, target) + b"".join(b"%s: %s\r\n" % field for field in sent) + b"\r\n"
        chunked = (get(b"transfer-encoding") or b"").lower() == b"chunked"
        origin = None
        try:
            origin = self.origin()
            origin.sendall(request)
            upload = threading.Thread(target=copy_body, args=(client, origin, rest, length, chunked), daemon=True)
            has_body = chunked or length > len(rest)
            if has_body:
                upload.start()
            elif length:
                origin.sendall(rest[:length])
            answer, begun = self.first_bytes(client, origin, has_body, weather)
        except OSError:
            answer, begun = None, b""
        if answer is None:
            close(origin)
            if begun is None:  # the caller went away
                return None
            code = (524, "<none>") if begun == b"late" else (502, "Bad Gateway")
            refuse(client, head, rest, *code)
            return None
        return self.reply(client, origin, method, answer, begun, weather, rest[length:] if not has_body else b"")

    def first_bytes(self, client, origin, has_body, weather):
        """Waits for the origin's head; gives up when the caller leaves or Cloudflare's patience ends."""
        data, limit = b"", time.monotonic() + weather.get("firstByte", 100)
        while b"\r\n\r\n" not in data:
            watched = [origin] if has_body else [origin, client]
            readable, _, _ = select.select(watched, [], [], max(0, limit - time.monotonic()))
            if not readable:
                return None, b"late"
            if client in readable and gone(client):
                return None, None
            if origin in readable:
                piece = origin.recv(65536)
                if not piece:
                    return None, b""
                data += piece
            elif client in readable:
                time.sleep(0.005)  # the next request is there already
        head, _, rest = data.partition(b"\r\n\r\n")
        if head.split(b" ")[1].startswith(b"1") and not head.split(b" ")[1] == b"101":
            return self.first_bytes_after(client, origin, has_body, weather, rest)
        return head, rest

    def first_bytes_after(self, client, origin, has_body, weather, rest):
        """1xx replies are dropped."""
        while b"\r\n\r\n" not in rest:
            piece = origin.recv(65536)
            if not piece:
                return None, b""
            rest += piece
        head, _, rest = rest.partition(b"\r\n\r\n")
        return head, rest

    def reply(self, client, origin, method, head, data, weather, following):
        lines = head.split(b"\r\n")
        fields = [tuple(part.strip() for part in line.split(b":", 1)) for line in lines[1:]]
        get = lambda name: next((value for key, value in fields if key.lower() == name), None)
        kept = [(key, value) for key, value in fields
                if not key.lower().startswith((b"cf-int-", b"cf-cloudflared-", b"cf-proxy-")) and key.lower() not in (b"connection", b"keep-alive")]
        kept.append((b"Server", b"cloudflare"))
        status = int(lines[0].split(b" ")[1])
        kind = (get(b"content-type") or b"").lower()
        length = get(b"content-length")
        chunked = (get(b"transfer-encoding") or b"").lower() == b"chunked"
        out = lines[0] + b"\r\n" + b"".join(b"%s: %s\r\n" % field for field in kept) + b"\r\n"
        if status == 101:
            client.sendall(out + data)
            both_ways(client, origin)
            return None
        flushes = length is None or chunked or kind.startswith((b"text/event-stream", b"application/grpc", b"application/x-ndjson"))
        held = kind.startswith(b"text/event-stream") and method == b"GET" and weather.get("sseGetHeld", False)
        writer = Writer(client, immediate=flushes and not held, whole=held)
        writer.write(out, flush=not held)
        bare = method == b"HEAD" or status in (204, 304)
        try:
            complete = bare or relay_body(client, origin, data, length, chunked, writer)
            writer.flush()
        except OSError:
            complete = False
        if complete and (bare or chunked or length is not None) and (get(b"connection") or b"").lower() != b"close":
            with self.lock:
                self.pool.append(origin)
        else:
            close(origin)
        return following if complete else None

    def origin(self):
        while True:
            with self.lock:
                idle = self.pool.pop() if self.pool else None
            if idle is None:
                break
            if not select.select([idle], [], [], 0)[0]:
                return idle
            close(idle)
        host, _, port = self.flags["url"].split("//", 1)[1].split("/")[0].partition(":")
        origin = socket.create_connection((host, int(port or 80)), 30)
        origin.settimeout(None)
        origin.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return origin

    # -- the end ------------------------------------------------------------------------------------

    def on_signal(self, number, _):
        if self.stopping:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.stopping = time.monotonic()

    def finish(self):
        """After SIGTERM: what is in flight may end, for as long as the grace period lasts."""
        self.log("INF", "Initiating graceful shutdown due to signal terminated ...")
        grace = seconds(self.flags.get("grace-period", "30s"))
        connecting = not self.ready and not self.was_ready
        backing_off = not self.ready and self.was_ready
        lingers = backing_off or scenario().get("edgeLingers", False)
        least = 0 if connecting else (grace if lingers else min(grace, 0.5))
        while time.monotonic() - self.stopping < grace:
            with self.lock:
                busy = self.in_flight
            if not busy and time.monotonic() - self.stopping >= least:
                break
            time.sleep(0.01)
        with self.lock:
            waiting = list(self.cut)
        for client in waiting:
            try:
                client.sendall(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            except OSError:
                pass
        self.unregister()
        leave(0)

    def fatal_with(self, line, code):
        self.unregister()
        self.plain(line)
        leave(code)


class Writer:
    """The way to the caller: at once, in 4 KiB pieces, or when it is complete."""

    def __init__(self, client, immediate, whole):
        self.client, self.immediate, self.whole, self.held = client, immediate, whole, b""

    def write(self, data, flush=False):
        self.held += data
        if flush or self.immediate or (len(self.held) >= 4096 and not self.whole):
            self.flush()

    def flush(self):
        if self.held:
            self.client.sendall(self.held)
            self.held = b""


def relay_body(client, origin, data, length, chunked, writer):
    """Copies a reply's body; whether it was complete. A caller that leaves ends the origin's request."""
    left = int(length) if length is not None and not chunked else None
    tail = b""
    while True:
        if data:
            writer.write(data)
            tail = (tail + data)[-7:]
            if left is not None:
                left -= len(data)
        if left is not None and left <= 0:
            return True
        if chunked and (tail.endswith(b"\r\n0\r\n\r\n") or tail == b"0\r\n\r\n"):
            return True
        readable, _, _ = select.select([origin, client], [], [])
        if client in readable and gone(client):
            return False
        if origin not in readable:
            time.sleep(0.005)
            data = b""
            continue
        data = origin.recv(65536)
        if not data:
            return left is None and not chunked


def copy_body(client, origin, rest, length, chunked):
    try:
        sent, tail = 0, b""
        while True:
            if rest:
                origin.sendall(rest)
                sent += len(rest)
                tail = (tail + rest)[-7:]
            if (not chunked and sent >= length) or (chunked and (tail.endswith(b"\r\n0\r\n\r\n") or tail == b"0\r\n\r\n")):
                return
            rest = client.recv(65536)
            if not rest:
                close(origin)
                return
    except OSError:
        close(origin)


def both_ways(one, other):
    while True:
        for sock in select.select([one, other], [], [])[0]:
            data = sock.recv(65536)
            if not data:
                close(one)
                close(other)
                return
            (other if sock is one else one).sendall(data)


def refuse(client, head, rest, status, reason):
    try:
        client.sendall(f"HTTP/1.1 {status} {reason}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        client.shutdown(socket.SHUT_WR)
        client.settimeout(2)
        while client.recv(65536):
            pass
    except OSError:
        pass


def read_head(client, data=b""):
    while b"\r\n\r\n" not in data:
        try:
            piece = client.recv(65536)
        except OSError:
            piece = b""
        if not piece or len(data) > 1 << 20:
            return b"", b""
        data += piece
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def gone(client):
    try:
        return client.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True


def close(sock):
    if sock is not None:
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        sock.close()


def serve(listener, handle):
    def one(client):
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            handle(client)
        except OSError:
            pass
        finally:
            close(client)

    def accept():
        while True:
            client, _ = listener.accept()
            threading.Thread(target=one, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def compact(value):
    return json.dumps(value, separators=(",", ":"))


def pause(length):
    end = time.monotonic() + length
    while time.monotonic() < end:
        time.sleep(0.01)


def numbers(version):
    return [int(part) for part in version.split(".")]


def seconds(text):
    units = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}
    number = text.rstrip("msh")
    return float(number) * units[text[len(number):] or "s"]


def leave(code):
    sys.stdout.flush()
    os._exit(code)


def main():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    run = Run()
    if sys.argv[1:2] == ["tunnel"]:
        with open(os.path.join(DIR, "starts"), "a") as file:
            file.write(json.dumps({"pid": os.getpid(), "argv": sys.argv[1:], "env": dict(os.environ)}) + "\n")
    run.arguments(sys.argv[1:])
    run.quick()
    run.metrics()
    signal.signal(signal.SIGTERM, run.on_signal)
    signal.signal(signal.SIGINT, run.on_signal)
    run.connect()
    run.finish()


main()
