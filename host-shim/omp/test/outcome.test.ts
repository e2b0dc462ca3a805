import { expect, test } from "bun:test";

import { FRAME_LIMIT } from "../frames.ts";
import { printable } from "../notices.ts";
import { cancelled, returned, threw } from "../outcome.ts";
import { lastLine } from "../progress.ts";

test("a result keeps what MCP knows and drops what is the host's", () => {
	const result = {
		content: [
			{ type: "text", text: "a\ud800", signature: "x" },
			{ type: "image", data: "AA==", mimeType: "image/png", detail: "high" },
			{ type: "chart", points: [1] },
		],
		details: { huge: true },
	};
	expect(JSON.parse(returned(result).json)).toEqual({
		content: [
			{ type: "text", text: "a\ud800" },
			{ type: "image", data: "AA==", mimeType: "image/png" },
			{ type: "chart", points: [1] },
		],
		isError: false,
	});
	expect(returned(result).json).toContain('"a\\ud800"');
});

test("isError passes, anything odd is an error that says so", () => {
	expect(JSON.parse(returned({ content: [], isError: true }).json)).toEqual({ content: [], isError: true });
	for (const odd of [undefined, null, 3, "text", {}, { content: "x" }]) {
		expect(JSON.parse(returned(odd).json).isError).toBe(true);
	}
	const circular: Record<string, unknown> = { type: "chart" };
	circular.self = circular;
	expect(JSON.parse(returned({ content: [circular] }).json).content[0].text).toStartWith("the tool's result cannot be sent");
});

test("what a tool throws comes verbatim", () => {
	expect(JSON.parse(threw(new Error("Path '/x' not found\n2nd line")).json)).toEqual({
		content: [{ type: "text", text: "Path '/x' not found\n2nd line" }],
		isError: true,
	});
	expect(JSON.parse(threw("just text").json).content[0].text).toBe("just text");
});

test("a result no frame can carry says how large it was", () => {
	const { json, bytes } = returned({ content: [{ type: "text", text: "x".repeat(FRAME_LIMIT) }] });
	expect(JSON.parse(json).content[0].text).toMatch(/^result of \d+ bytes exceeds the frame limit$/);
	expect(bytes).toBeLessThan(200);
});

test("a cancelled call ends with MCP's code for it", () => {
	expect(JSON.parse(cancelled().json)).toEqual({ code: -32800, message: "cancelled" });
});

test("progress tells the last line of all text so far", () => {
	const partial = (...texts: string[]) => ({ content: texts.map(text => ({ type: "text", text })) });
	expect(lastLine(partial("one\ntwo\n"))).toBe("two");
	expect(lastLine(partial("first", "second"))).toBe("second");
	expect(lastLine({ content: [{ type: "image", data: "" }] })).toBe("");
	expect(lastLine(undefined)).toBe("");
});

test("no control character and no bidi override reaches a notice", () => {
	expect(printable("a\u001b[31mb\u202ec\u0085d\ne\tf\u007f")).toBe("a [31mb c d\ne f ");
});
