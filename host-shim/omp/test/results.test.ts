import { expect, test } from "bun:test";

import {
	type Outcome,
	REMEMBERED,
	REMEMBERED_MS,
	RESULT_BYTES_KEPT,
	RESULTS_KEPT,
	ResultStore,
} from "../results.ts";

function outcome(bytes = 2): Outcome {
	return { kind: "result", json: "{}", bytes, isError: false };
}

function kept(store: ResultStore): string[] {
	return [...store.outcomes()].map(({ callId }) => callId);
}

function states(store: ResultStore, now = 0): Record<string, string> {
	return Object.fromEntries(store.inFlight(now).map(({ callId, state }) => [callId, state]));
}

test("a call is told of with its latest note until its ack", () => {
	const store = new ResultStore();
	expect(store.begin("a", "bash", { v: 1 }, 7)).toBe(true);
	store.note("a", "newer");
	expect(store.inFlight(8)).toEqual([{ callId: "a", tool: "bash", state: "running", startedAt: 7, note: "newer" }]);
	store.acknowledge("a");
	expect(states(store)).toEqual({ a: "running" });
	store.finish("a", outcome(), 9);
	expect(states(store)).toEqual({ a: "finished" });
	expect(kept(store)).toEqual(["a"]);
	store.acknowledge("a");
	expect(states(store)).toEqual({});
	expect(kept(store)).toEqual([]);
});

test("a call id runs once", () => {
	const store = new ResultStore();
	store.begin("a", "bash", null, 0);
	expect(store.begin("a", "bash", null, 0)).toBe(false);
	store.finish("a", outcome(), 0);
	expect(store.begin("a", "bash", null, 0)).toBe(false);
});

test("results are handed out in the order they came, calls in the order they began", () => {
	const store = new ResultStore();
	for (const id of ["a", "b", "c"]) store.begin(id, "t", null, 0);
	for (const id of ["c", "a", "b"]) store.finish(id, outcome(), 1);
	expect(kept(store)).toEqual(["c", "a", "b"]);
	expect(Object.keys(states(store))).toEqual(["a", "b", "c"]);
});

test("beyond 256 results the oldest is dropped, its id stays", () => {
	const store = new ResultStore();
	for (let i = 0; i <= RESULTS_KEPT; i += 1) {
		store.begin(`c${i}`, "t", null, 0);
		store.finish(`c${i}`, outcome(), i);
	}
	expect(kept(store)).toHaveLength(RESULTS_KEPT);
	expect(kept(store)[0]).toBe("c1");
	expect(states(store).c0).toBe("dropped");
	store.acknowledge("c0");
	expect(states(store).c0).toBeUndefined();
});

test("beyond 64 MiB the oldest go, one larger alone is kept", () => {
	const store = new ResultStore();
	for (const id of ["a", "b", "big", "after"]) store.begin(id, "t", null, 0);
	store.finish("a", outcome(RESULT_BYTES_KEPT / 2), 1);
	store.finish("b", outcome(RESULT_BYTES_KEPT / 2), 2);
	expect(kept(store)).toEqual(["a", "b"]);
	store.finish("big", outcome(RESULT_BYTES_KEPT * 2), 3);
	expect(kept(store)).toEqual(["big"]);
	store.finish("after", outcome(1), 4);
	expect(kept(store)).toEqual(["after"]);
	expect(states(store)).toEqual({ a: "dropped", b: "dropped", big: "dropped", after: "finished" });
});

test("acknowledged bytes make room", () => {
	const store = new ResultStore();
	for (const id of ["a", "b"]) {
		store.begin(id, "t", null, 0);
		store.finish(id, outcome(RESULT_BYTES_KEPT), 0);
		store.acknowledge(id);
	}
	store.begin("c", "t", null, 0);
	store.finish("c", outcome(RESULT_BYTES_KEPT), 0);
	expect(kept(store)).toEqual(["c"]);
});

test("a cancelled call keeps no result, whatever its tool still says", () => {
	const store = new ResultStore();
	store.begin("a", "t", null, 0);
	store.cancel("a", 1);
	store.finish("a", outcome(), 2);
	expect(kept(store)).toEqual([]);
	expect(states(store)).toEqual({ a: "cancelled" });
	store.cancel("a", 3);
	store.acknowledge("a");
	expect(states(store)).toEqual({});
});

test("dropped and cancelled ids go after ten minutes", () => {
	const store = new ResultStore();
	store.begin("a", "t", null, 0);
	store.cancel("a", 0);
	expect(states(store, REMEMBERED_MS - 1)).toEqual({ a: "cancelled" });
	expect(states(store, REMEMBERED_MS)).toEqual({});
});

test("a sidecar that never acknowledges costs a bounded number of ids", () => {
	const store = new ResultStore();
	for (let i = 0; i < 3 * REMEMBERED; i += 1) {
		store.begin(`c${i}`, "t", null, 0);
		store.finish(`c${i}`, outcome(), 0);
	}
	expect(store.inFlight(0).length).toBeLessThanOrEqual(REMEMBERED + RESULTS_KEPT);
});
