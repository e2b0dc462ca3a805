/**
 * A stand-in for the sidecar, for the tests of `link.ts` and `calls.ts`: does what the first
 * argument says with real pipes.
 */

import { appendFileSync, closeSync, existsSync, readFileSync, writeSync } from "node:fs";
import { join } from "node:path";

import { encode, FrameReader } from "../frames.ts";

const send = (message: object) => {
	const frame = encode(JSON.stringify(message)) as Buffer;
	for (let at = 0; at < frame.length; ) at += writeSync(1, frame, at);
};
const request = (id: number, method: string) => ({ jsonrpc: "2.0", id, method, params: {} });

async function echo(): Promise<void> {
	const reader = new FrameReader();
	for await (const chunk of Bun.stdin.stream()) {
		for (const frame of reader.push(chunk)) {
			const { id, method, params } = JSON.parse(Buffer.from(frame).toString());
			if (method === "fail") send({ jsonrpc: "2.0", id, error: { code: -32001, message: "as you wish" } });
			else if (method === "die") process.kill(process.pid, "SIGKILL");
			else if (method === "size") send({ jsonrpc: "2.0", id, result: { size: frame.length } });
			else if (id !== undefined && method !== undefined) send({ jsonrpc: "2.0", id, result: params });
		}
	}
}

/**
 * `sidecar --agent-dir DIR`: a well-behaved one, unless the file `mode` in DIR says otherwise. What it
 * hears stands in `heard.jsonl`, with its own pid.
 */
async function sidecar(agentDir: string): Promise<void> {
	const file = join(agentDir, "mode");
	const mode = existsSync(file) ? readFileSync(file, "utf8") : "";
	const heard = (message: object) =>
		appendFileSync(join(agentDir, "heard.jsonl"), `${JSON.stringify({ pid: process.pid, ...message })}\n`);
	heard({ method: "started" });
	if (mode === "exit 1") {
		process.stderr.write("first line\nport 80: permission denied\n");
		process.exit(1);
	}
	if (mode === "exit 78") process.exit(78);
	const reader = new FrameReader();
	let hello: { id: unknown } | undefined;
	for await (const chunk of Bun.stdin.stream()) {
		for (const frame of reader.push(chunk)) {
			const message = JSON.parse(Buffer.from(frame).toString());
			heard(message);
			const { id, method } = message;
			const answer = (result: object) => send({ jsonrpc: "2.0", id, result });
			if (method === "bridge/hello" && mode === "deny") {
				hello = message;
				send({ jsonrpc: "2.0", id: "deny", method: "bridge/hostLlm", params: { enabled: false } });
				continue;
			}
			if (id === "deny" && hello) {
				const url = "http://127.0.0.1:4711/";
				const result = { protocol: 1, version: "0", pid: process.pid, url, port: 4711, tokenPrefix: "abcdefgh", features: [] };
				send({ jsonrpc: "2.0", id: hello.id, result });
				continue;
			}
			if (method === "bridge/hello" && mode === "refuse") {
				send({ jsonrpc: "2.0", id, error: { code: -32001, message: "a2mcp.json: token: at least 32 characters" } });
				process.exit(78);
			} else if (method === "bridge/hello") {
				const url = "http://127.0.0.1:4711/";
				answer({ protocol: 1, version: "0", pid: process.pid, url, port: 4711, tokenPrefix: "abcdefgh", features: [] });
				send(request(1, "tools/list"));
			} else if (method === "notifications/tools/list_changed") send(request(2, "tools/list"));
			else if (method === "bridge/command") {
				const { argv } = message.params;
				answer({ text: `you said ${argv.join(" ")}`, level: "warning" });
				if (argv[0] === "restart") process.exit(75);
				if (argv[0] === "stop-now") {
					send({ jsonrpc: "2.0", method: "bridge/goodbye", params: { reason: "stop" } });
					process.exit(0);
				}
			} else if (method === "bridge/stop" && mode !== "stubborn") {
				answer({});
				send({ jsonrpc: "2.0", method: "bridge/goodbye", params: { reason: "stop" } });
				process.exit(0);
			}
		}
	}
	if (mode === "stubborn") setInterval(() => {}, 1_000);
}

switch (process.argv[2]) {
	case "sidecar":
		await sidecar(process.argv[4] as string);
		break;
	case "echo":
		await echo();
		break;
	case "deaf":
		// Never reads: whoever writes meets a full pipe.
		send({ jsonrpc: "2.0", method: "ready" });
		setInterval(() => {}, 1_000);
		break;
	case "last-words": {
		// Frames written right before a violent end, the last one cut.
		const burst = Array.from({ length: 200 }, (_, i) => encode(JSON.stringify(request(i, "tools/call"))) as Buffer);
		const cut = (encode(JSON.stringify(request(200, "tools/call"))) as Buffer).subarray(0, 30);
		const all = Buffer.concat([...burst, cut]);
		for (let at = 0; at < all.length; ) at += writeSync(1, all, at);
		process.kill(process.pid, "SIGKILL");
		break;
	}
	case "hostile":
		writeSync(1, Buffer.from([0, 0, 0, 0]));
		writeSync(1, encode("{broken") as Buffer);
		writeSync(1, encode('{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{') as Buffer);
		writeSync(1, encode("[1]") as Buffer);
		writeSync(1, encode('{"jsonrpc":"1.0","id":1,"method":"x"}') as Buffer);
		writeSync(1, encode('{"jsonrpc":"2.0","id":"nobody asked","result":{}}') as Buffer);
		await echo();
		break;
	case "huge":
		writeSync(1, Buffer.from([255, 255, 255, 255]));
		await echo();
		break;
	case "mute":
		// Closes its output and lives on.
		closeSync(1);
		setInterval(() => {}, 1_000);
		break;
}
