import { expect, test } from "bun:test";

import { asker } from "../asker.ts";
import { Card, CardBudget, CARDS_AT_ONCE, CARDS_PER_SECOND, inShort } from "../cards.ts";

function drawn(count: number, budget: CardBudget, now: number): number {
	return Array.from({ length: count }, () => budget.take(now)).filter(Boolean).length;
}

test("a burst is drawn, a flood is not, quiet earns anew", () => {
	const budget = new CardBudget();
	expect(drawn(1_000, budget, 5_000)).toBe(CARDS_AT_ONCE);
	expect(drawn(1_000, budget, 6_000)).toBe(CARDS_PER_SECOND);
	expect(drawn(1_000, budget, 3_600_000)).toBe(CARDS_AT_ONCE);
});

test("a clock that stands still or goes back earns nothing", () => {
	const budget = new CardBudget();
	drawn(CARDS_AT_ONCE, budget, 5_000);
	expect(budget.take(4_000)).toBe(false);
});

test("a session that cannot draw changes nothing", () => {
	const faults: unknown[] = [];
	const session = {
		agent: {
			emitExternalEvent() {
				throw new Error("no");
			},
		},
	} as never;
	const card = new Card(session, { toolCallId: "1", tool: "read", args: {}, size: 2, asker: "x", isTerminal: false }, error => faults.push(error));
	card.update({});
	card.end({}, false, 2);
	expect(faults).toHaveLength(3);
});

test("what is huge is drawn in short", () => {
	const short = inShort({ content: [{ type: "text", text: "x".repeat(1_000_000) }], list: Array(1_000).fill(1) });
	expect(JSON.stringify(short).length).toBeLessThan(3_000);
	expect(inShort({ a: [1, "two", null, true] })).toEqual({ a: [1, "two", null, true] });
	const circular: Record<string, unknown> = {};
	circular.self = circular;
	expect(JSON.stringify(inShort(circular))).toContain("…");
});

test("a card says who asks, and the result itself does not", () => {
	const events: Record<string, unknown>[] = [];
	const session = { agent: { emitExternalEvent: (event: never) => events.push(event) } } as never;
	const who = asker({ sid: "1a2b3c4d-0000", name: "cli\u001b[31m\u202eent" });
	expect(who).toBe("cli [31m ent (session 1a2b3c4d)");
	const call = { toolCallId: "1", tool: "bash", args: { command: "ls" }, size: 2, asker: who };
	const card = new Card(session, { ...call, isTerminal: false }, () => {});
	const result = { content: [{ type: "image" }, { type: "text", text: "out" }], details: 1 };
	card.update(result);
	card.end(result, false, 2);
	expect(events[0]).toMatchObject({ args: { command: "ls" }, intent: `bash, asked by ${who}` });
	const drawn = { content: [{ type: "image" }, { type: "text", text: `out\n[asked by ${who}]` }], details: 1 };
	expect(events[1]).toMatchObject({ partialResult: drawn });
	expect(events[2]).toMatchObject({ result: drawn });
	expect(result.content[1]).toEqual({ type: "text", text: "out" });
	// The terminal would take an intent for the host's own.
	new Card(session, { ...call, isTerminal: true }, () => {});
	expect(events[3]).not.toHaveProperty("intent");
	expect(events[4]).toMatchObject({ partialResult: { content: [{ type: "text", text: `[asked by ${who}]` }] } });
});

test("a card of a result without text says who asks all the same", () => {
	const events: Record<string, unknown>[] = [];
	const session = { agent: { emitExternalEvent: (event: never) => events.push(event) } } as never;
	const card = new Card(session, { toolCallId: "1", tool: "t", args: {}, size: 2, asker: asker({}), isTerminal: true }, () => {});
	card.end({ content: [] }, false, 2);
	expect(events[2]).toMatchObject({ result: { content: [{ type: "text", text: "[asked by a remote client]" }] } });
	card.end("no object", true, 2);
	expect(events[3]).toMatchObject({ result: "no object" });
});

test("names are cut, a caller that gives none is a remote client", () => {
	expect(asker({ sid: "s", name: "n".repeat(500) })).toBe(`${"n".repeat(40)}… (session s)`);
	expect(asker({ sid: 7, name: ["x"] })).toBe("a remote client");
	expect(asker({ sid: "abc", name: " \n " })).toBe("a remote client (session abc)");
});
