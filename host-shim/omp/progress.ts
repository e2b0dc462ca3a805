/**
 * Turns a tool's updates into progress: at most ten a second, the newest wins, none after the end.
 * The host's updates carry all text so far; what is told is its last line.
 */

const EVERY_MS = 100;
const LONGEST_LINE = 500;

export class Progress {
	readonly #tell: (partial: unknown) => void;
	#latest: unknown;
	#timer: Timer | undefined;
	#toldAt = -Infinity;
	#ended = false;

	constructor(tell: (partial: unknown) => void) {
		this.#tell = tell;
	}

	update(partial: unknown): void {
		if (this.#ended) return;
		this.#latest = partial;
		if (this.#timer) return;
		const wait = this.#toldAt + EVERY_MS - performance.now();
		if (wait <= 0) return this.#now();
		this.#timer = setTimeout(() => this.#now(), wait);
		this.#timer.unref();
	}

	end(): void {
		this.#ended = true;
		clearTimeout(this.#timer);
		this.#latest = undefined;
	}

	#now(): void {
		this.#timer = undefined;
		this.#toldAt = performance.now();
		try {
			this.#tell(this.#latest);
		} catch {
			// Progress is a courtesy; the call goes on without it.
		}
	}
}

/** The last line of a partial result's text. */
export function lastLine(partial: unknown): string {
	const content = (partial as { content?: unknown } | null | undefined)?.content;
	if (!Array.isArray(content)) return "";
	const text = content.findLast(
		(block): block is { text: string } =>
			typeof block === "object" && block !== null && typeof (block as { text?: unknown }).text === "string",
	)?.text;
	if (!text) return "";
	const end = text.trimEnd();
	return end.slice(end.lastIndexOf("\n") + 1).slice(0, LONGEST_LINE);
}
