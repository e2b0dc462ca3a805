/**
 * What a tool gave, as the text of an MCP result. Pure.
 *
 * `details` and every other field that is the host's own are dropped; content kinds MCP does not
 * know pass as they are, the sidecar folds them into text. A result that no frame can carry
 * becomes an error that says so.
 */

import { FRAME_LIMIT } from "./frames.ts";
import type { Outcome } from "./results.ts";

export const NOT_EXPOSED = "not exposed: no tool of that name is offered here (see tools/list)";
export const NO_MAIN = "main session not available";

/** The JSON-RPC code of a call its caller cancelled. */
const CANCELLED = -32800;
/** Room for the envelope around a result. */
const ENVELOPE = 1024;

/** The result of a tool that returned. */
export function returned(result: unknown): Outcome {
	const { content, isError } = (typeof result === "object" && result !== null ? result : {}) as {
		content?: unknown;
		isError?: unknown;
	};
	if (!Array.isArray(content)) return failed("the tool returned no content");
	try {
		return outcome({ content: content.map(block), isError: isError === true });
	} catch (error) {
		return failed(`the tool's result cannot be sent: ${messageOf(error)}`);
	}
}

/** The result of a tool that threw: its message, verbatim. */
export function threw(error: unknown): Outcome {
	return failed(messageOf(error));
}

/** An error in the shape of a tool's result. */
export function failed(text: string): Outcome {
	return outcome({ content: [{ type: "text", text }], isError: true });
}

export function cancelled(): Outcome {
	const json = JSON.stringify({ code: CANCELLED, message: "cancelled" });
	return { kind: "error", json, bytes: json.length, isError: true };
}

export function messageOf(error: unknown): string {
	try {
		return error instanceof Error ? error.message || error.name : String(error);
	} catch {
		return "unknown error";
	}
}

function outcome(result: { content: unknown[]; isError: boolean }): Outcome {
	const json = JSON.stringify(result);
	const bytes = Buffer.byteLength(json, "utf8");
	if (bytes > FRAME_LIMIT - ENVELOPE) return failed(`result of ${bytes} bytes exceeds the frame limit`);
	return { kind: "result", json, bytes, isError: result.isError };
}

function block(value: unknown): unknown {
	if (typeof value !== "object" || value === null) return { type: "text", text: String(value) };
	const { type, text, data, mimeType } = value as Record<string, unknown>;
	if (type === "text") return { type, text: typeof text === "string" ? text : String(text ?? "") };
	if (type === "image") return { type, data, mimeType };
	if (typeof type === "string") return value;
	return { type: "text", text: JSON.stringify(value) };
}
