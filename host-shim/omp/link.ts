/**
 * One sidecar process and the frames that pass between it and this one.
 *
 * The only place that touches the child's stdin and stdout. It knows JSON-RPC's envelope and
 * nothing of what the messages mean. Two rules keep the host alive: every promise that Bun's
 * writer hands out is awaited inside a `try` (an EPIPE nobody caught ends omp), and nothing here
 * throws into an event loop. Frames written in one turn leave in one flush; while the pipe is
 * full, results wait and progress is dropped.
 */

import { constants } from "node:os";

import { decode, encode, FrameReader, FrameTooLarge, type Skipped } from "./frames.ts";

/** Progress is dropped while this much waits for the pipe. */
const LOSSY_ABOVE = 1024 * 1024;
/** Frames are gathered into one write up to this size. */
const BATCH = 256 * 1024;
/** How long the pipe of a dead process may stay silent and open before it counts as read. */
const DRAIN_SILENCE_MS = 500;

export type RequestId = string | number;

/** What the other side asked or said. Handlers must not throw; whatever they throw is reported. */
export interface LinkHandlers {
	/** `size` is the frame's length in bytes. */
	request(link: Link, id: RequestId, method: string, params: unknown, size: number): void;
	notification(link: Link, method: string, params: unknown): void;
	/** Bytes or a message that mean nothing; counted by the owner. */
	skipped(link: Link, why: Skipped | "unknown message" | "unexpected answer"): void;
	/** A bug of this side: reported, never thrown. */
	fault(where: string, error: unknown): void;
}

/** How the process ended, told after its stdout was read to the end. */
export interface Ended {
	readonly code: number | null;
	readonly signal: number | null;
	/** Why this side ended the link itself, if it did. */
	readonly reason: string | undefined;
	/** Bytes of a last frame that was cut. */
	readonly cut: number;
}

/** The other side answered with an error, or the link ended before it answered. */
export class RequestFailed extends Error {
	constructor(
		message: string,
		readonly code?: number,
	) {
		super(message);
	}
}

interface Waiting {
	resolve(result: unknown): void;
	reject(error: RequestFailed): void;
}

type Child = Bun.Subprocess<"pipe", "pipe", number | "ignore">;

export class Link {
	readonly pid: number;
	/** Settles once; never rejects. */
	readonly ended: Promise<Ended>;

	readonly #child: Child;
	readonly #handlers: LinkHandlers;
	readonly #reader = new FrameReader();
	readonly #waiting = new Map<RequestId, Waiting>();
	#nextId = 1;
	#queue: Buffer[] = [];
	#queuedBytes = 0;
	#writing = false;
	#closed = false;
	#bytesRead = 0;
	#reason: string | undefined;

	/** Spawns `argv`. Throws when the program cannot be started at all. */
	constructor(argv: string[], stderr: number | "ignore", handlers: LinkHandlers) {
		this.#handlers = handlers;
		this.#child = Bun.spawn(argv, { stdin: "pipe", stdout: "pipe", stderr, env: process.env });
		this.pid = this.#child.pid;
		// The host ends when it wants to; the sidecar follows by itself.
		this.#child.unref();
		this.ended = this.#watch();
	}

	/** Bytes received so far: any byte counts as life. */
	get bytesRead(): number {
		return this.#bytesRead;
	}

	/** Bytes that wait for the pipe. */
	get queuedBytes(): number {
		return this.#queuedBytes;
	}

	/** Asks the other side; rejects with {@link RequestFailed}. */
	request(method: string, params: object): Promise<unknown> {
		const id = `s${this.#nextId++}`;
		const answer = new Promise<unknown>((resolve, reject) => {
			if (this.#closed) reject(new RequestFailed("the bridge is not running"));
			else this.#waiting.set(id, { resolve, reject });
		});
		// Whoever does not look at the answer must not end the host by it.
		answer.catch(() => {});
		this.#send(JSON.stringify({ jsonrpc: "2.0", id, method, params }));
		return answer;
	}

	notify(method: string, params: object): void {
		this.#send(JSON.stringify({ jsonrpc: "2.0", method, params }));
	}

	/** A notification whose `params` are JSON text already. False: it is over the frame limit. */
	notifyJson(method: string, params: string): boolean {
		return this.#send(`{"jsonrpc":"2.0","method":${JSON.stringify(method)},"params":${params}}`);
	}

	/** A notification that may be lost while the pipe is full. */
	notifyLossy(method: string, params: object): void {
		if (this.#queuedBytes < LOSSY_ABOVE) this.notify(method, params);
	}

	/** Answers a request with a result, given as JSON text. False: it is over the frame limit. */
	answer(id: RequestId, result: string): boolean {
		return this.#send(`{"jsonrpc":"2.0","id":${JSON.stringify(id)},"result":${result}}`);
	}

	/** Answers a request with an error object, given as JSON text. */
	answerError(id: RequestId, error: string): boolean {
		return this.#send(`{"jsonrpc":"2.0","id":${JSON.stringify(id)},"error":${error}}`);
	}

	refuse(id: RequestId, code: number, message: string): void {
		this.answerError(id, JSON.stringify({ code, message }));
	}

	/** Closes the sidecar's stdin: it takes that for the end of the host. */
	end(): void {
		this.#closed = true;
		settle(() => this.#child.stdin.end());
	}

	kill(reason: string): void {
		this.#reason ??= reason;
		settle(() => this.#child.kill("SIGKILL"));
	}

	#send(json: string): boolean {
		if (this.#closed) return true;
		const frame = encode(json);
		if (!frame) return false;
		this.#queue.push(frame);
		this.#queuedBytes += frame.length;
		if (!this.#writing) {
			this.#writing = true;
			queueMicrotask(() => void this.#write());
		}
		return true;
	}

	/** The one writer: takes what is queued, writes, waits until the pipe took it, again. */
	async #write(): Promise<void> {
		const stdin = this.#child.stdin;
		try {
			while (this.#queue.length > 0 && !this.#closed) {
				const batch = this.#takeBatch();
				await stdin.write(batch);
				await stdin.flush();
				this.#queuedBytes -= batch.length;
			}
		} catch {
			// The process is gone or going; `ended` tells.
			this.#close();
		} finally {
			this.#writing = false;
		}
	}

	#takeBatch(): Buffer {
		const first = this.#queue[0] as Buffer;
		let count = 1;
		let size = first.length;
		while (count < this.#queue.length) {
			const next = this.#queue[count] as Buffer;
			if (size + next.length > BATCH) break;
			size += next.length;
			count += 1;
		}
		const frames = this.#queue.splice(0, count);
		return count === 1 ? first : Buffer.concat(frames, size);
	}

	async #watch(): Promise<Ended> {
		const read = this.#read();
		// A process that closed its stdout but lives is of no use.
		void read.then(() => {
			setTimeout(() => this.kill("it closed its output"), 1_000).unref();
		});
		await this.#child.exited.catch(() => {});
		this.#closed = true;
		await this.#drained(read);
		this.#close();
		const name = this.#child.signalCode;
		return {
			code: this.#child.exitCode,
			signal: name ? (constants.signals[name as NodeJS.Signals] ?? 0) : null,
			reason: this.#reason,
			cut: this.#reader.pending,
		};
	}

	/** Reads to the end. A stray process that holds the pipe open must not hold up the next start. */
	async #drained(read: Promise<void>): Promise<void> {
		const done = read.then(() => true as const);
		for (let seen = -1; seen !== this.#bytesRead; ) {
			seen = this.#bytesRead;
			const silence = new Promise<false>(resolve => setTimeout(resolve, DRAIN_SILENCE_MS, false));
			if (await Promise.race([done, silence])) return;
		}
	}

	async #read(): Promise<void> {
		try {
			for await (const chunk of this.#child.stdout) {
				this.#bytesRead += chunk.length;
				for (const frame of this.#reader.push(chunk)) this.#receive(frame);
			}
		} catch (error) {
			this.kill(error instanceof FrameTooLarge ? error.message : `its output could not be read: ${error}`);
		}
	}

	#receive(frame: Uint8Array): void {
		try {
			const decoded = decode(frame);
			if ("skipped" in decoded) {
				if (decoded.id !== undefined) this.refuse(decoded.id, -32700, "parse error");
				this.#handlers.skipped(this, decoded.skipped);
				return;
			}
			const { jsonrpc, id, method, params, result, error } = decoded.message;
			const hasId = typeof id === "string" || typeof id === "number";
			if (jsonrpc !== "2.0") this.#handlers.skipped(this, "unknown message");
			else if (typeof method === "string") {
				if (hasId) this.#handlers.request(this, id, method, params, frame.length);
				else this.#handlers.notification(this, method, params);
			} else if (hasId) this.#settle(id, result, error);
			else this.#handlers.skipped(this, "unknown message");
		} catch (error) {
			this.#handlers.fault("frame", error);
		}
	}

	#settle(id: RequestId, result: unknown, error: unknown): void {
		const waiting = this.#waiting.get(id);
		if (!waiting) return this.#handlers.skipped(this, "unexpected answer");
		this.#waiting.delete(id);
		if (error === undefined) return waiting.resolve(result);
		const { code, message } = (error ?? {}) as { code?: unknown; message?: unknown };
		waiting.reject(
			new RequestFailed(
				typeof message === "string" ? message : "error without a message",
				typeof code === "number" ? code : undefined,
			),
		);
	}

	#close(): void {
		this.#closed = true;
		this.#queue = [];
		this.#queuedBytes = 0;
		const waiting = [...this.#waiting.values()];
		this.#waiting.clear();
		for (const { reject } of waiting) reject(new RequestFailed("the bridge ended before it answered"));
	}
}

/** Runs what may throw or hand out a promise that rejects, and lets neither out. */
function settle(action: () => unknown): void {
	try {
		void Promise.resolve(action()).catch(() => {});
	} catch {
		// Gone already: that is what was wanted.
	}
}
