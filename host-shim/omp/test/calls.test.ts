import { expect, test } from "bun:test";

import type { AgentTool } from "@oh-my-pi/pi-agent-core";
import type { AgentSession, ExtensionContext } from "@oh-my-pi/pi-coding-agent";

import { Calls } from "../calls.ts";
import type { Link } from "../link.ts";

type Sent = Record<string, unknown>;
type Execute = AgentTool["execute"];

/** Records what goes to a sidecar, as the messages it would see. */
function recorder(): { link: Link; sent: Sent[]; next(match: (message: Sent) => boolean): Promise<Sent> } {
	const sent: Sent[] = [];
	const waiting: { match: (message: Sent) => boolean; resolve: (message: Sent) => void }[] = [];
	const record = (message: Sent) => {
		sent.push(message);
		for (const { match, resolve } of waiting) if (match(message)) resolve(message);
		return true;
	};
	const link = {
		answer: (id: unknown, json: string) => record({ id, result: JSON.parse(json) }),
		answerError: (id: unknown, json: string) => record({ id, error: JSON.parse(json) }),
		refuse: (id: unknown, code: number, message: string) => record({ id, error: { code, message } }),
		notify: (method: string, params: object) => record({ method, params }),
		notifyLossy: (method: string, params: object) => record({ method, params }),
		notifyJson: (method: string, json: string) => record({ method, params: JSON.parse(json) }),
	};
	const next = (match: (message: Sent) => boolean) =>
		new Promise<Sent>(resolve => {
			const already = sent.find(match);
			if (already) resolve(already);
			else waiting.push({ match, resolve });
		});
	return { link: link as unknown as Link, sent, next };
}

function setUp(tools: Record<string, Execute>) {
	const events: Sent[] = [];
	const faults: unknown[] = [];
	const abandoned: string[] = [];
	const asked: string[] = [];
	const session = {
		agent: { emitExternalEvent: (event: Sent) => events.push(event) },
		settings: { mine: true },
		queuedMessageCount: 0,
		isStreaming: false,
		getAllToolNames: () => Object.keys(tools),
		getToolByName: (name: string) => {
			const execute = tools[name.replace("xd://", "")];
			return execute && { name, execute };
		},
	} as unknown as AgentSession;
	const context = { ui: {}, hasUI: true, abort() {} } as unknown as ExtensionContext;
	const host = { main: true, link: undefined as Link | undefined };
	const calls = new Calls({
		main: () => (host.main ? { session, context } : undefined),
		link: () => host.link,
		approvalsChanged() {},
		asked: (tool, asker) => asked.push(`${tool}: ${asker}`),
		abandoned: (tool, reason) => abandoned.push(`${tool}: ${reason}`),
		fault: (_where, error) => faults.push(error),
	});
	const sidecar = recorder();
	host.link = sidecar.link;
	const call = (id: number, name: unknown, args?: unknown, callId = `call-${id}`) => {
		const params = { name, arguments: args, _meta: { progressToken: callId, "a2mcp/call": { callId, note: id }, "a2mcp/client": { sid: "0123456789", name: "client" } } };
		calls.start(host.link as Link, id, params, 100);
		return (host.link === sidecar.link ? sidecar : next).next(message => message.id === id);
	};
	const next = recorder();
	return { calls, host, sidecar, next, call, events, faults, abandoned, asked };
}

const says =
	(text: string): Execute =>
	async () => ({ content: [{ type: "text", text }] as never });

const NOT_EXPOSED = {
	content: [{ type: "text", text: "not exposed: no tool of that name is offered here (see tools/list)" }],
	isError: true,
};

test("a call runs in the Main session with what the host's tools need", async () => {
	let seen: unknown[] = [];
	const { call, events } = setUp({
		read: async (...args) => {
			seen = args;
			return { content: [{ type: "text", text: "ok" }] as never, details: { large: true } };
		},
	});
	expect(await call(1, "read", { path: "x" })).toEqual({
		id: 1,
		result: { content: [{ type: "text", text: "ok" }], isError: false },
	});
	const [toolCallId, args, signal, , context] = seen;
	expect(args).toEqual({ path: "x" });
	expect(signal).toBeInstanceOf(AbortSignal);
	expect(context).toMatchObject({ settings: { mine: true }, hasUI: true });
	expect(events.map(({ type }) => type)).toEqual(["tool_execution_start", "tool_execution_end"]);
	expect(events.every(event => event.toolCallId === toolCallId)).toBe(true);
	expect(toolCallId).not.toBe("call-1");
});

test("absent arguments are {}, other shapes pass", async () => {
	const seen: unknown[] = [];
	const { call } = setUp({
		t: async (_id, args) => {
			seen.push(args);
			return { content: [] };
		},
	});
	await call(1, "t");
	await call(2, "t", "text");
	await call(3, "t", null);
	expect(seen).toEqual([{}, "text", null]);
});

test("what is not offered is refused in the same words, aliases included", async () => {
	const { call, events } = setUp({ bash: says("ran") });
	for (const [i, name] of ["nope", "xd://bash", "", 7, null, undefined].entries()) {
		expect(await call(i, name)).toEqual({ id: i, result: NOT_EXPOSED });
	}
	expect(events).toEqual([]);
});

test("without a live Main a call says so", async () => {
	const { call, host } = setUp({ bash: says("ran") });
	host.main = false;
	expect(await call(1, "bash")).toEqual({
		id: 1,
		result: { content: [{ type: "text", text: "main session not available" }], isError: true },
	});
});

test("a throwing tool, also one that throws at once, is an error with its words", async () => {
	const { call } = setUp({
		late: async () => {
			throw new Error("Path '/x' not found");
		},
		atOnce: () => {
			throw new Error("no promise");
		},
		odd: (() => undefined) as never,
	});
	const text = (answer: Sent) => (answer.result as { content: { text: string }[] }).content[0]?.text;
	expect(text(await call(1, "late"))).toBe("Path '/x' not found");
	expect(text(await call(2, "atOnce"))).toBe("no promise");
	expect((await call(3, "odd")).result).toMatchObject({ isError: true });
});

test("a cancelled call is answered at once, its tool hears of it, its result is nobody's", async () => {
	let heard: AbortSignal | undefined;
	const { promise: never, resolve: release } = Promise.withResolvers<void>();
	const { calls, call, sidecar, host, events } = setUp({
		stubborn: async (_id, _args, signal) => {
			heard = signal;
			await never;
			return { content: [] };
		},
	});
	const answer = call(1, "stubborn");
	calls.cancelRequest(host.link as Link, 1, undefined);
	expect(await answer).toEqual({ id: 1, error: { code: -32800, message: "cancelled" } });
	expect(heard?.aborted).toBe(true);
	expect(calls.inFlight()).toMatchObject([{ callId: "call-1", state: "cancelled", note: 1 }]);
	release();
	await Promise.resolve();
	expect(sidecar.sent).toHaveLength(1);
	expect(events.map(({ type }) => type)).toEqual(["tool_execution_start", "tool_execution_end"]);
	calls.cancelRequest(host.link as Link, 1, undefined);
	calls.cancelRequest(host.link as Link, 99, undefined);
	calls.cancelCall("unknown", undefined);
});

test("a call outlives its sidecar: the next one hears of it and gets the result", async () => {
	const { promise: gate, resolve: open } = Promise.withResolvers<void>();
	const { calls, call, host, sidecar, next } = setUp({
		slow: async () => {
			await gate;
			return { content: [] };
		},
		quick: says("done"),
	});
	void call(1, "slow");
	await call(2, "quick");
	host.link = undefined;
	expect(calls.inFlight()).toMatchObject([
		{ callId: "call-1", tool: "slow", state: "running" },
		{ callId: "call-2", tool: "quick", state: "finished" },
	]);
	host.link = next.link;
	calls.deliverAgain(next.link);
	expect(next.sent).toMatchObject([{ method: "bridge/result", params: { callId: "call-2", result: { isError: false } } }]);
	open();
	expect(await next.next(({ params }) => (params as Sent)?.callId === "call-1")).toMatchObject({
		method: "bridge/result",
		params: { callId: "call-1", result: { content: [], isError: false } },
	});
	expect(sidecar.sent).toHaveLength(1);
	calls.acknowledge(["call-1", "call-2", "call-3", 4]);
	expect(calls.inFlight()).toEqual([]);
});

test("a call of an earlier sidecar is cancelled by its call id", async () => {
	const { calls, call, host, next } = setUp({ slow: () => new Promise(() => {}) });
	void call(1, "slow");
	host.link = next.link;
	calls.cancelRequest(next.link, 1, undefined);
	expect(next.sent).toEqual([]);
	calls.cancelCall("call-1", undefined);
	expect(await next.next(({ method }) => method === "bridge/result")).toMatchObject({
		params: { callId: "call-1", error: { code: -32800 } },
	});
});

test("the tool and the card hear who cancelled", async () => {
	for (const [reason, told] of [
		["cancelled by the operator", "cancelled by the operator"],
		["the bridge is\nstopping", "the bridge is stopping"],
		["x".repeat(1000), `${"x".repeat(120)}…`],
		["", "cancelled"],
		[7, "cancelled"],
	]) {
		let signal: AbortSignal | undefined;
		const { calls, call, host, events } = setUp({
			slow: (_id, _args, heard) => {
				signal = heard;
				return new Promise(() => {});
			},
		});
		const answer = call(1, "slow");
		calls.cancelRequest(host.link as Link, 1, reason);
		await answer;
		expect((signal?.reason as Error).message).toBe(String(told));
		expect((events.at(-1)?.result as { content: { text: string }[] }).content[0]?.text).toStartWith(`${told}\n`);
	}
});

test("a call id runs once", async () => {
	let runs = 0;
	const { call } = setUp({
		t: async () => {
			runs += 1;
			return { content: [] };
		},
	});
	await call(1, "t", {}, "same");
	expect((await call(2, "t", {}, "same")).error).toMatchObject({ code: -32600 });
	expect(runs).toBe(1);
});

test("a pending approval is listed until the call ends", async () => {
	let toolCallId = "";
	const { promise: gate, resolve: approve } = Promise.withResolvers<void>();
	const { calls, call, sidecar, abandoned, asked } = setUp({
		write: async id => {
			toolCallId = id;
			await gate;
			return { content: [] };
		},
	});
	const answer = call(1, "write");
	calls.approvalRequested("somebody else's");
	calls.approvalRequested(toolCallId);
	expect(calls.approvals.list()).toEqual([{ callId: "call-1", tool: "write" }]);
	expect(asked).toEqual(["write: client (session 01234567)"]);
	calls.approvalResolved(toolCallId);
	expect(calls.approvals.list()).toEqual([]);
	approve();
	expect(await answer).toMatchObject({ result: { isError: false } });

	void call(2, "write");
	calls.approvalRequested(toolCallId);
	calls.cancelCall("call-2", "cancelled by the operator");
	await sidecar.next(({ id }) => id === 2);
	expect(calls.approvals.list()).toEqual([]);
	expect(abandoned).toEqual(["write: cancelled by the operator"]);
});

test("updates become progress with rising numbers, none after the end", async () => {
	let update: ((partial: never) => void) | undefined;
	const { promise: gate, resolve: end } = Promise.withResolvers<void>();
	const { call, sidecar, events } = setUp({
		bash: async (_id, _args, _signal, onUpdate) => {
			update = onUpdate as never;
			await gate;
			return { content: [] };
		},
	});
	const answer = call(1, "bash");
	const partial = (text: string) => ({ content: [{ type: "text", text }] }) as never;
	update?.(partial("one\n"));
	for (let i = 0; i < 100; i += 1) update?.(partial(`one\nline ${i}\n`));
	const last = await sidecar.next(({ params }) => (params as { message?: string })?.message === "line 99");
	expect(last).toMatchObject({ params: { progressToken: "call-1", progress: 2 } });
	end();
	await answer;
	update?.(partial("too late"));
	expect(sidecar.sent.filter(({ method }) => method === "notifications/progress")).toHaveLength(2);
	expect(events.filter(({ type }) => type === "tool_execution_update")).toHaveLength(2);
});

test("a call frame without a call id is refused", () => {
	const { calls, host, sidecar } = setUp({});
	calls.start(host.link as Link, 1, { name: "x" }, 10);
	calls.start(host.link as Link, 2, undefined, 10);
	expect(sidecar.sent.map(({ error }) => (error as Sent).code)).toEqual([-32602, -32602]);
});
