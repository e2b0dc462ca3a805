import { expect, test } from "bun:test";
import { readFileSync } from "node:fs";
import { join } from "node:path";

import { decode, encode, FRAME_LIMIT, FrameReader, FrameTooLarge } from "../frames.ts";

const FIXTURES = join(import.meta.dir, "../../../ipc-schema/fixtures");

type Piece = string | { repeat: string; times: number };
type Expected =
	| { frame: string | Piece[] }
	| { skipped: string }
	| { end: "frame too large" }
	| { incomplete: true };

const cases: { name: string; bytes: string | Piece[]; expect: Expected[] }[] = JSON.parse(
	readFileSync(join(FIXTURES, "frames.json"), "utf8"),
);

function bytesOf(bytes: string | Piece[]): Buffer {
	if (typeof bytes === "string") return Buffer.from(bytes, "base64");
	return Buffer.concat(
		bytes.map(piece =>
			typeof piece === "string"
				? Buffer.from(piece, "base64")
				: Buffer.alloc(Buffer.from(piece.repeat, "base64").length * piece.times, piece.repeat, "base64"),
		),
	);
}

function textOf(text: string | Piece[]): string {
	if (typeof text === "string") return text;
	return text.map(piece => (typeof piece === "string" ? piece : piece.repeat.repeat(piece.times))).join("");
}

/** What a reader reports of `bytes` in chunks of `size`, in the words of the fixtures. */
function read(bytes: Buffer, size: number): Expected[] {
	const reader = new FrameReader();
	const seen: Expected[] = [];
	try {
		for (let at = 0; at < bytes.length; at += size) {
			for (const frame of reader.push(bytes.subarray(at, at + size))) {
				const decoded = decode(frame);
				if ("skipped" in decoded) seen.push({ skipped: decoded.skipped });
				else seen.push({ frame: Buffer.from(frame).toString("utf8") });
			}
		}
	} catch (error) {
		if (!(error instanceof FrameTooLarge)) throw error;
		return [...seen, { end: "frame too large" }];
	}
	if (reader.pending > 0) seen.push({ incomplete: true });
	return seen;
}

for (const { name, bytes, expect: expected } of cases) {
	test(`fixture: ${name}`, () => {
		const input = bytesOf(bytes);
		const wanted = expected.map(entry => ("frame" in entry ? { frame: textOf(entry.frame) } : entry));
		for (const size of [input.length || 1, 1, 3, 4, 5, 65_536]) {
			if (input.length / size > 200_000) continue;
			expect(read(input, size)).toEqual(wanted);
		}
	});
}

test("every cut of a stream into two chunks gives the same frames", () => {
	const frames = ['{"a":1}', "{}", '{"b":"é\\ud800"}', "[]"].map(text => encode(text) as Buffer);
	const input = Buffer.concat(frames);
	const whole = read(input, input.length);
	for (let cut = 0; cut <= input.length; cut += 1) {
		const reader = new FrameReader();
		const got = [input.subarray(0, cut), input.subarray(cut)].flatMap(chunk =>
			[...reader.push(chunk)].map(frame => {
				const decoded = decode(frame);
				return "skipped" in decoded ? decoded : { frame: Buffer.from(frame).toString() };
			}),
		);
		expect(got as unknown).toEqual(whole);
		expect(reader.pending).toBe(0);
	}
});

test("messages a sidecar sends come through the frames as they are", () => {
	const messages: { direction: string; valid: boolean; message: unknown }[] = JSON.parse(
		readFileSync(join(FIXTURES, "messages.json"), "utf8"),
	);
	for (const { message } of messages.filter(({ direction, valid }) => valid && direction === "sidecar")) {
		const frame = encode(JSON.stringify(message)) as Buffer;
		const [body] = [...new FrameReader().push(frame)];
		expect(decode(body as Uint8Array)).toEqual({ message: message as { [key: string]: unknown } });
	}
});

test("a broken request of the sidecar gives its id, so that it can be answered", () => {
	const id = (text: string) => decode(Buffer.from(text, "latin1"));
	const head = '{"jsonrpc":"2.0","id":42,"method":"tools/call"';
	expect(id(`${head},"params":{`)).toEqual({ skipped: "invalid json", id: 42 });
	expect(id(`${head},"params":"\xff"}`)).toEqual({ skipped: "invalid utf-8", id: 42 });
	expect(id('{"id":42,"jsonrpc":"2.0","method":')).toEqual({ skipped: "invalid json" });
	expect(id('{"jsonrpc":"2.0","id":"x","method":')).toEqual({ skipped: "invalid json" });
});

test("a frame over the limit is never written", () => {
	expect(encode("x".repeat(FRAME_LIMIT + 1))).toBeUndefined();
	expect(encode("é".repeat(FRAME_LIMIT / 2))?.length).toBe(FRAME_LIMIT + 4);
});

test("a large frame in small chunks is gathered in linear time", () => {
	const frame = encode(`{"t":"${"a".repeat(64 * 1024 * 1024)}"}`) as Buffer;
	const began = performance.now();
	expect(read(frame, 65_536)).toHaveLength(1);
	expect(performance.now() - began).toBeLessThan(5_000);
});
