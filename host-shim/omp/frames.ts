/**
 * The framing of contract 17: a 4-byte big-endian length, then that many bytes of UTF-8 JSON.
 *
 * Pure: bytes in, messages out, no I/O and no clock, so that the fixtures of `ipc-schema` run
 * over it. A reader is never quadratic: a frame that lies inside one chunk is a view of it, any
 * other is gathered in a buffer of exactly its length. What is no message is reported, never
 * thrown; only a frame over the limit ends the link.
 */

/** The largest frame either side sends. */
export const FRAME_LIMIT = 192 * 1024 * 1024;

const HEADER = 4;

/** Why bytes were no message. The link goes on. */
export type Skipped = "zero length" | "invalid utf-8" | "invalid json" | "not an object";

/** A length over {@link FRAME_LIMIT}: nothing behind it can be trusted, the link ends. */
export class FrameTooLarge extends Error {
	constructor(readonly length: number) {
		super(`frame too large: ${length} bytes announced, the limit is ${FRAME_LIMIT}`);
	}
}

/** Cuts a byte stream into frames. Feed every chunk; ask {@link FrameReader.pending} at the end. */
export class FrameReader {
	readonly #header = Buffer.allocUnsafeSlow(HEADER);
	#headerFilled = 0;
	#body: Buffer | undefined;
	#bodyFilled = 0;

	/** Bytes of a frame whose rest has not arrived. At the end of the input they are dropped. */
	get pending(): number {
		return this.#body ? HEADER + this.#bodyFilled : this.#headerFilled;
	}

	/**
	 * The frames that `chunk` completes. A frame may be a view of `chunk`: use it before the next
	 * turn or copy it. Throws {@link FrameTooLarge}; the reader is useless from then on.
	 */
	*push(chunk: Uint8Array): Generator<Uint8Array, void, undefined> {
		let at = 0;
		while (at < chunk.length) {
			if (this.#body) {
				const take = Math.min(this.#body.length - this.#bodyFilled, chunk.length - at);
				this.#body.set(chunk.subarray(at, at + take), this.#bodyFilled);
				this.#bodyFilled += take;
				at += take;
				if (this.#bodyFilled < this.#body.length) return;
				const frame = this.#body;
				this.#body = undefined;
				yield frame;
				continue;
			}
			const take = Math.min(HEADER - this.#headerFilled, chunk.length - at);
			this.#header.set(chunk.subarray(at, at + take), this.#headerFilled);
			this.#headerFilled += take;
			at += take;
			if (this.#headerFilled < HEADER) return;
			const length = this.#header.readUInt32BE(0);
			if (length > FRAME_LIMIT) throw new FrameTooLarge(length);
			this.#headerFilled = 0;
			if (chunk.length - at >= length) {
				yield chunk.subarray(at, at + length);
				at += length;
			} else {
				this.#body = Buffer.allocUnsafeSlow(length);
				this.#bodyFilled = 0;
			}
		}
	}
}

/** A JSON object that came in a frame; nothing about its members has been looked at. */
export type Incoming = { readonly [key: string]: unknown };

export type Decoded = { message: Incoming } | { skipped: Skipped; id?: number };

// `ignoreBOM: true` keeps the mark, which JSON then refuses, as the other side does.
const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const REQUEST_HEAD = /^\{"jsonrpc":"2\.0","id":(\d{1,15}),"method":/;

/**
 * Reads one frame's bytes. When they are no message but begin like a request of the sidecar, its
 * id comes along, so that the request can be answered with an error instead of hanging.
 */
export function decode(frame: Uint8Array): Decoded {
	if (frame.length === 0) return { skipped: "zero length" };
	let text: string;
	try {
		text = utf8.decode(frame);
	} catch {
		return { skipped: "invalid utf-8", ...requestId(frame) };
	}
	let value: unknown;
	try {
		value = JSON.parse(text);
	} catch {
		return { skipped: "invalid json", ...requestId(frame) };
	}
	if (typeof value !== "object" || value === null || Array.isArray(value)) return { skipped: "not an object" };
	return { message: value as Incoming };
}

function requestId(frame: Uint8Array): { id?: number } {
	const head = Buffer.from(frame.buffer, frame.byteOffset, Math.min(frame.length, 200)).toString("latin1");
	const match = REQUEST_HEAD.exec(head);
	return match ? { id: Number(match[1]) } : {};
}

/** One frame, or `undefined` when `json` is over {@link FRAME_LIMIT}: a sender never sends that. */
export function encode(json: string): Buffer | undefined {
	const length = Buffer.byteLength(json, "utf8");
	if (length > FRAME_LIMIT) return undefined;
	const frame = Buffer.allocUnsafeSlow(HEADER + length);
	frame.writeUInt32BE(length, 0);
	frame.write(json, HEADER, "utf8");
	return frame;
}
