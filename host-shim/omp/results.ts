/**
 * The calls this process remembers: running ones, and finished ones until the sidecar
 * acknowledges them (contract 17), so that a sidecar that died loses no result.
 *
 * Pure: no clock, callers pass `now`. Results are kept as JSON text, so that their size is known
 * and sending one again costs nothing. The oldest result goes first; of a dropped or cancelled call
 * the id and the note stay for ten minutes, so that its caller can be told.
 */

export const RESULTS_KEPT = 256;
export const RESULT_BYTES_KEPT = 64 * 1024 * 1024;
export const REMEMBERED_MS = 10 * 60_000;
/** Notes are up to 8 KiB each; a sidecar that never acknowledges must not grow this for ever. */
export const REMEMBERED = 1_024;

export type CallState = "running" | "finished" | "cancelled" | "dropped";

/** The end of a call: the text of a JSON-RPC `result`, or of an `error`. */
export interface Outcome {
	readonly kind: "result" | "error";
	readonly json: string;
	readonly bytes: number;
	/** An error, or a result that says `isError`. */
	readonly isError: boolean;
}

/** A call as `bridge/hello` tells of it. */
export interface Remembered {
	readonly callId: string;
	readonly tool: string;
	readonly state: CallState;
	readonly startedAt: number;
	readonly note: unknown;
}

interface Entry {
	callId: string;
	tool: string;
	state: CallState;
	startedAt: number;
	note: unknown;
	outcome: Outcome | undefined;
	endedAt: number;
}

export class ResultStore {
	/** In the order the calls began. */
	readonly #entries = new Map<string, Entry>();
	/** Call ids in the order their results came. */
	readonly #finished = new Set<string>();
	/** Dropped and cancelled call ids, oldest end first. */
	readonly #bare = new Set<string>();
	#bytes = 0;

	/** False when a call of that id is known already: it must not run again. */
	begin(callId: string, tool: string, note: unknown, now: number): boolean {
		this.#expire(now);
		if (this.#entries.has(callId)) return false;
		this.#entries.set(callId, {
			callId,
			tool,
			state: "running",
			startedAt: now,
			note,
			outcome: undefined,
			endedAt: 0,
		});
		return true;
	}

	/** Keeps the end of a running call and drops what no longer fits, oldest first. */
	finish(callId: string, outcome: Outcome, now: number): void {
		const entry = this.#entries.get(callId);
		if (entry?.state !== "running") return;
		entry.state = "finished";
		entry.outcome = outcome;
		entry.endedAt = now;
		this.#finished.add(callId);
		this.#bytes += outcome.bytes;
		for (const oldest of this.#finished) {
			const fits = this.#finished.size <= RESULTS_KEPT && this.#bytes <= RESULT_BYTES_KEPT;
			if (fits || this.#finished.size === 1) break;
			this.#drop(oldest, now);
		}
		this.#expire(now);
	}

	/** A running call was cancelled: whatever its tool still answers is nobody's. */
	cancel(callId: string, now: number): void {
		const entry = this.#entries.get(callId);
		if (entry?.state !== "running") return;
		entry.state = "cancelled";
		entry.endedAt = now;
		this.#bare.add(callId);
		this.#expire(now);
	}

	/** The sidecar's newer memory of a call. */
	note(callId: string, note: unknown): void {
		const entry = this.#entries.get(callId);
		if (entry) entry.note = note;
	}

	/** The response reached the caller: forget. A running call is no business of an ack. */
	acknowledge(callId: string): void {
		const entry = this.#entries.get(callId);
		if (!entry || entry.state === "running") return;
		if (this.#finished.delete(callId)) this.#bytes -= entry.outcome?.bytes ?? 0;
		this.#bare.delete(callId);
		this.#entries.delete(callId);
	}

	/** Every call a new sidecar must hear of, oldest first. */
	inFlight(now: number): Remembered[] {
		this.#expire(now);
		return [...this.#entries.values()].map(({ callId, tool, state, startedAt, note }) => ({
			callId,
			tool,
			state,
			startedAt,
			note,
		}));
	}

	/** The results that wait for an ack, oldest first. */
	*outcomes(): Generator<{ callId: string; outcome: Outcome }> {
		for (const callId of this.#finished) {
			const outcome = this.#entries.get(callId)?.outcome;
			if (outcome) yield { callId, outcome };
		}
	}

	#drop(callId: string, now: number): void {
		const entry = this.#entries.get(callId);
		this.#finished.delete(callId);
		if (!entry) return;
		this.#bytes -= entry.outcome?.bytes ?? 0;
		entry.outcome = undefined;
		entry.state = "dropped";
		entry.endedAt = now;
		this.#bare.add(callId);
	}

	#expire(now: number): void {
		for (const callId of this.#bare) {
			const entry = this.#entries.get(callId);
			const young = entry !== undefined && now - entry.endedAt < REMEMBERED_MS;
			if (young && this.#bare.size <= REMEMBERED) return;
			this.#bare.delete(callId);
			this.#entries.delete(callId);
		}
	}
}
