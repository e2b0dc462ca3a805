import { expect, test } from "bun:test";

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
	const card = new Card(session, { toolCallId: "1", tool: "read", args: {}, size: 2 }, error => faults.push(error));
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
