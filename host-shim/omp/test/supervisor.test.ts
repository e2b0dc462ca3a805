import { expect, test } from "bun:test";

import {
	afterEnding,
	afterHello,
	type Ending,
	firstPulse,
	type History,
	NO_HISTORY,
	onTick,
	PING_EVERY_MS,
	type Pulse,
} from "../supervisor.ts";

function ending(about: Partial<Ending>): Ending {
	return { served: true, code: null, signal: 9, asked: false, at: 0, ...about };
}

/** Lets sidecars end one after the other and tells what was done about each. */
function run(endings: Partial<Ending>[]): string[] {
	let history: History = NO_HISTORY;
	return endings.map(about => {
		const verdict = afterEnding(history, ending(about));
		history = verdict.history;
		if (verdict.next !== "start") return verdict.next;
		return [`start +${verdict.afterMs}`, ...(verdict.incident ? [verdict.incident] : [])].join(" ");
	});
}

test("a death is followed by a start at once, and is told", () => {
	expect(run([{ at: 0 }])).toEqual(["start +0 once"]);
});

test("from the third death within ten seconds on a start waits a second, and is told once more", () => {
	expect(run([{ at: 0 }, { at: 4_000 }, { at: 8_000 }, { at: 9_500 }, { at: 11_000 }])).toEqual([
		"start +0 once",
		"start +0 once",
		"start +1000 often",
		"start +1000",
		"start +1000",
	]);
});

test("deaths far apart are each the first", () => {
	expect(run([{ at: 0 }, { at: 11_000 }, { at: 22_000 }, { at: 33_000 }])).toEqual(Array(4).fill("start +0 once"));
});

test("a planned restart is silent, by exit code or goodbye", () => {
	expect(run([{ code: 75, signal: null }])).toEqual(["start +0"]);
	expect(run([{ goodbye: "restart", code: 0, signal: null }])).toEqual(["start +0"]);
});

test("planned restarts in a row do not spin, and hide no death", () => {
	const planned = (at: number) => ({ at, code: 75, signal: null });
	expect(run([planned(0), planned(10), planned(20), { at: 30 }])).toEqual([
		"start +0",
		"start +0",
		"start +1000",
		"start +1000 once",
	]);
});

test("five failed starts in a row are a failure; an answered hello begins a new row", () => {
	const failed = { served: false, code: 1, signal: null };
	const row = run(Array(5).fill(failed));
	expect(row.slice(0, 4).every(step => step.startsWith("start "))).toBe(true);
	expect(row[4]).toBe("failed");

	let history: History = NO_HISTORY;
	for (let i = 0; i < 4; i += 1) history = afterEnding(history, ending(failed)).history;
	history = afterHello(history);
	expect(afterEnding(history, ending(failed)).next).toBe("start");
});

test("a failed start after a death counts as a failed start", () => {
	expect(run([{ at: 0 }, { served: false, at: 1 }])).toEqual(["start +0 once", "start +0"]);
});

test("exit 78 and a refused hello are not retried", () => {
	expect(run([{ served: false, code: 78, signal: null }])).toEqual(["refused"]);
	expect(run([{ served: true, code: 78, signal: null }])).toEqual(["refused"]);
	expect(run([{ served: false, refusal: "token too short" }])).toEqual(["refused"]);
});

test("a goodbye stop is not retried, nor is an end this side asked for", () => {
	expect(run([{ goodbye: "stop", code: 0, signal: null }])).toEqual(["stopped"]);
	expect(run([{ goodbye: "host", code: 0, signal: null }])).toEqual(["stopped"]);
	expect(run([{ asked: true, signal: 9 }])).toEqual(["stopped"]);
	expect(run([{ asked: true, served: false, code: 1 }])).toEqual(["stopped"]);
});

/** Ticks at the given times; each says whether a byte was heard. Gives the tick that kills, or 0. */
function hungAt(ticks: [at: number, heard: boolean][]): number {
	let pulse: Pulse = firstPulse(0);
	for (const [i, [at, heard]] of ticks.entries()) {
		const verdict = onTick(pulse, at, heard);
		if (verdict.hung) return i + 1;
		pulse = verdict.pulse;
	}
	return 0;
}

const T = PING_EVERY_MS;

test("three unanswered pings and no byte mean hung", () => {
	expect(hungAt([[T, true], [2 * T, false], [3 * T, false], [4 * T, false]])).toBe(4);
	expect(hungAt([[T, false], [2 * T, false], [3 * T, false]])).toBe(0);
});

test("any byte is life", () => {
	expect(hungAt([[T, true], [2 * T, false], [3 * T, false], [4 * T, true], [5 * T, false], [6 * T, false]])).toBe(0);
});

test("a tick that is late judges nothing and begins anew", () => {
	const slept = 3 * T + 3_600_000;
	expect(
		hungAt([[T, true], [2 * T, false], [3 * T, false], [slept, false], [slept + T, false], [slept + 2 * T, false]]),
	).toBe(0);
	expect(hungAt([[T, true], [2 * T, false], [3 * T, false], [4 * T + 900, false]])).toBe(4);
});
