/**
 * A stand-in for the sidecar, for the tests of `link.ts` and `calls.ts`: does what the first
 * argument says with real pipes.
 */

import { writeSync } from "node:fs";

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

switch (process.argv[2]) {
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
		require("node:fs").closeSync(1);
		setInterval(() => {}, 1_000);
		break;
}
