import { afterEach, expect, test } from "bun:test";
import { join } from "node:path";

import { Link, type LinkHandlers, RequestFailed } from "../link.ts";

interface Seen {
	requests: { id: unknown; method: string }[];
	notifications: string[];
	skipped: string[];
	faults: unknown[];
	/** Resolves at the first notification. */
	ready: Promise<void>;
}

const links: Link[] = [];
afterEach(async () => {
	for (const link of links.splice(0)) {
		link.kill("test over");
		await link.ended;
	}
});

function start(mode: string): { link: Link; seen: Seen } {
	const { promise: ready, resolve } = Promise.withResolvers<void>();
	const seen: Seen = { requests: [], notifications: [], skipped: [], faults: [], ready };
	const handlers: LinkHandlers = {
		request: (_link, id, method) => {
			seen.requests.push({ id, method });
		},
		notification: (_link, method) => {
			seen.notifications.push(method);
			resolve();
		},
		skipped: (_link, why) => {
			seen.skipped.push(why);
		},
		fault: (_where, error) => {
			seen.faults.push(error);
		},
	};
	const link = new Link([process.execPath, join(import.meta.dir, "peer.ts"), mode], "ignore", handlers);
	links.push(link);
	return { link, seen };
}

test("requests find their answers, many at once", async () => {
	const { link } = start("echo");
	const answers = await Promise.all(Array.from({ length: 1_000 }, (_, n) => link.request("echo", { n })));
	expect(answers).toEqual(Array.from({ length: 1_000 }, (_, n) => ({ n })));
});

test("an error answer carries code and message", async () => {
	const { link } = start("echo");
	const error = await link.request("fail", {}).catch((error: unknown) => error);
	expect(error).toBeInstanceOf(RequestFailed);
	expect(error).toMatchObject({ code: -32001, message: "as you wish" });
});

test("30 MB cross the pipe while small requests follow", async () => {
	const { link } = start("echo");
	const large = link.request("size", { text: "x".repeat(30_000_000) });
	expect(await link.request("echo", { small: true })).toEqual({ small: true });
	expect(((await large) as { size: number }).size).toBeGreaterThan(30_000_000);
});

test("a result over the frame limit is not sent, and the link goes on", async () => {
	const { link } = start("echo");
	expect(link.answer(1, `"${"x".repeat(192 * 1024 * 1024)}"`)).toBe(false);
	expect(await link.request("echo", {})).toEqual({});
});

test("a closed stdin ends the peer", async () => {
	const { link } = start("echo");
	await link.request("echo", {});
	link.end();
	expect(await link.ended).toMatchObject({ code: 0, signal: null });
});

test("a death while requests wait fails them and throws nothing", async () => {
	const { link } = start("echo");
	await link.request("echo", {});
	const waiting = Array.from({ length: 50 }, () => link.request("die", { filler: "x".repeat(100_000) }));
	const results = await Promise.allSettled(waiting);
	expect(results.every(({ status }) => status === "rejected")).toBe(true);
	expect(await link.ended).toMatchObject({ code: null, signal: 9 });
	// And whoever still writes afterwards meets silence.
	link.notify("late", {});
	expect(await link.request("late", {}).catch((error: Error) => error.message)).toBe("the bridge is not running");
});

test("a death in the middle of a write that waits for the pipe is survived", async () => {
	const { link, seen } = start("deaf");
	await seen.ready;
	const waiting = link.request("big", { text: "x".repeat(8_000_000) });
	for (let i = 0; i < 100; i += 1) link.notify("more", { text: "y".repeat(10_000) });
	await new Promise(resolve => setImmediate(resolve));
	link.kill("test");
	expect(await waiting.catch((error: unknown) => error)).toBeInstanceOf(RequestFailed);
	expect(await link.ended).toMatchObject({ signal: 9, reason: "test" });
	expect(seen.faults).toEqual([]);
});

test("progress is dropped while the pipe is full", async () => {
	const { link, seen } = start("deaf");
	await seen.ready;
	const text = "p".repeat(100_000);
	for (let i = 0; i < 1_000; i += 1) link.notifyLossy("notifications/progress", { text });
	// 100 MB would be queued otherwise; what may wait is about one MiB.
	expect(link.queuedBytes).toBeLessThan(2 * 1024 * 1024);
});

test("what a dead sidecar wrote is read to the end, its cut last frame is dropped", async () => {
	const { link, seen } = start("last-words");
	expect(await link.ended).toMatchObject({ signal: 9, cut: 30 });
	expect(seen.requests.map(({ id }) => id)).toEqual(Array.from({ length: 200 }, (_, i) => i));
});

test("hostile frames are skipped and counted, the link goes on", async () => {
	const { link, seen } = start("hostile");
	expect(await link.request("echo", { still: "here" })).toEqual({ still: "here" });
	expect(seen.skipped).toEqual([
		"zero length",
		"invalid json",
		"invalid json",
		"not an object",
		"unknown message",
		"unexpected answer",
	]);
	expect(seen.faults).toEqual([]);
});

test("a frame over the limit ends the link with that reason", async () => {
	const { link } = start("huge");
	expect((await link.ended).reason).toStartWith("frame too large");
});

test("a peer that closed its output is ended", async () => {
	const { link } = start("mute");
	expect(await link.ended).toMatchObject({ signal: 9, reason: "it closed its output" });
});

test("a program that is not there throws at once", () => {
	const handlers = { request() {}, notification() {}, skipped() {}, fault() {} };
	expect(() => new Link(["/nonexistent/a2mcp"], "ignore", handlers)).toThrow();
});
