/**
 * When a sidecar is started again, and when it is taken for dead (contract 15).
 *
 * Pure functions of what happened and when: no clock, no process, no timer; `bridge.ts` acts on
 * the verdicts.
 *
 * ```text
 *            ┌── ends before hello, < 5 in a row ──┐
 *            ▼                                     │
 *  ──▶ starting ──hello──▶ running ──dies, 75──▶ starting     5 in a row ──▶ failed
 *            │                │
 *            └─ 78, refused ──┴─ goodbye stop / Main ended ──▶ refused, stopped
 * ```
 */

/** Starts in a row that may end before hello was answered. */
export const FAILED_STARTS = 5;
/** From the third death within this time on, a respawn waits. */
export const DEATH_WINDOW_MS = 10_000;
export const DEATHS_WITHOUT_PAUSE = 2;
export const PAUSE_MS = 1_000;
/** One ping per tick; three in a row without an answer or any other byte mean: hung. */
export const PING_EVERY_MS = 5_000;
export const PINGS_UNANSWERED = 3;
/** A tick later than this says that the host was blocked or asleep: it judges nothing. */
export const TICK_LATE_MS = 1_000;

/** Exit codes of `a2mcp sidecar` that mean something to its parent. */
export const EXIT_RESTART = 75;
export const EXIT_REFUSED = 78;

export type GoodbyeReason = "stop" | "restart" | "host";

/** How one sidecar ended. */
export interface Ending {
	/** `bridge/hello` was answered with a result. */
	readonly served: boolean;
	readonly code: number | null;
	readonly signal: number | null;
	readonly goodbye?: GoodbyeReason | undefined;
	/** The message of a hello answered with an error that retrying cannot cure. */
	readonly refusal?: string | undefined;
	/** This side asked it to stop. */
	readonly asked: boolean;
	readonly at: number;
}

/** What the policy remembers between sidecars. */
export interface History {
	readonly failedStarts: number;
	/** The latest ends of sidecars that served, oldest first, no older than {@link DEATH_WINDOW_MS}. */
	readonly deaths: readonly { readonly at: number; readonly planned: boolean }[];
}

export const NO_HISTORY: History = { failedStarts: 0, deaths: [] };

export type Verdict = { readonly history: History } & (
	| {
			readonly next: "start";
			readonly afterMs: number;
			/** A death to tell of: `once`, or `often` at the third in a row; absent: nothing to say. */
			readonly incident?: "once" | "often";
	  }
	| { readonly next: "stopped" | "refused" | "failed" }
);

/** What to do after a sidecar ended. */
export function afterEnding(history: History, ending: Ending): Verdict {
	if (ending.asked || ending.goodbye === "stop" || ending.goodbye === "host") return { next: "stopped", history };
	if (ending.refusal !== undefined || ending.code === EXIT_REFUSED) return { next: "refused", history };
	if (!ending.served) {
		const failedStarts = history.failedStarts + 1;
		const after = { ...history, failedStarts };
		if (failedStarts >= FAILED_STARTS) return { next: "failed", history: after };
		// The first retry is immediate; the others leave whatever is in the way a moment to go.
		return { next: "start", afterMs: failedStarts === 1 ? 0 : 250 * (failedStarts - 1), history: after };
	}
	const planned = ending.code === EXIT_RESTART || ending.goodbye === "restart";
	const recent = history.deaths.filter(({ at }) => ending.at - at < DEATH_WINDOW_MS);
	const deaths = [...recent, { at: ending.at, planned }].slice(-16);
	const start = {
		next: "start",
		// Planned ones count for the pause too: nothing may spin.
		afterMs: deaths.length > DEATHS_WITHOUT_PAUSE ? PAUSE_MS : 0,
		history: { failedStarts: 0, deaths },
	} as const;
	if (planned) return start;
	const unplanned = deaths.filter(death => !death.planned).length;
	if (unplanned > DEATHS_WITHOUT_PAUSE + 1) return start;
	return { ...start, incident: unplanned > DEATHS_WITHOUT_PAUSE ? "often" : "once" };
}

/** A hello that was answered ends a row of failed starts. */
export function afterHello(history: History): History {
	return { ...history, failedStarts: 0 };
}

/** The watch over one sidecar. */
export interface Pulse {
	readonly dueAt: number;
	/** A ping is out whose tick has not been judged. */
	readonly asked: boolean;
	readonly unanswered: number;
}

export function firstPulse(now: number): Pulse {
	return { dueAt: now + PING_EVERY_MS, asked: false, unanswered: 0 };
}

/**
 * Judges one tick. `heard`: any byte came since the tick before; the caller reads what has
 * arrived before it asks.
 */
export function onTick(pulse: Pulse, now: number, heard: boolean): { pulse: Pulse; hung: boolean } {
	const late = now - pulse.dueAt > TICK_LATE_MS;
	const unanswered = heard || late || !pulse.asked ? 0 : pulse.unanswered + 1;
	return {
		hung: unanswered >= PINGS_UNANSWERED,
		pulse: { dueAt: now + PING_EVERY_MS, asked: true, unanswered },
	};
}
