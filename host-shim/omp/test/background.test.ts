import { expect, test } from "bun:test";

import type { AgentToolResult } from "@oh-my-pi/pi-agent-core";
import type { AgentSession } from "@oh-my-pi/pi-coding-agent";

import { foreground } from "../background.ts";

interface Job {
	status: string;
	promise: Promise<void>;
	resultText?: string;
	errorText?: string;
	latestDetails?: object;
}

function setUp() {
	const { promise, resolve } = Promise.withResolvers<void>();
	const job: Job = { status: "running", promise };
	const called: string[] = [];
	const end = (status: string, more: Partial<Job>) => {
		Object.assign(job, { status }, more);
		resolve();
	};
	const session = {
		asyncJobManager: {
			getJob: (id: string) => (id === "bg_1" ? job : undefined),
			acknowledgeDeliveries: (ids: string[]) => called.push(`acknowledge ${ids}`),
			consumeJobResults: (ids: string[]) => called.push(`consume ${ids}`),
			cancel: (id: string) => {
				called.push(`cancel ${id}`);
				end("cancelled", { errorText: "Command aborted" });
			},
		},
	} as unknown as AgentSession;
	return { session, called, end, signal: new AbortController() };
}

const announced = (async: object): AgentToolResult => ({
	content: [{ type: "text", text: "Backgrounded as job bg_1" } as { type: string }],
	details: { async },
});
const BASH = { state: "running", type: "bash", jobId: "bg_1" };

test("a command the host moved to the background ends the call with its output, and nothing else does", async () => {
	const { session, called, end, signal } = setUp();
	const ending = foreground(session, { command: "x", timeout: 2 }, announced(BASH), signal.signal);
	expect(called).toEqual(["acknowledge bg_1"]);
	end("completed", { resultText: "42", latestDetails: { images: [{ type: "image", data: "x" }] } });
	expect(await ending).toEqual({
		content: [
			{ type: "text", text: "42" },
			{ type: "image", data: "x" },
		],
	} as never);
	expect(called).toEqual(["acknowledge bg_1", "consume bg_1"]);
});

test("one that fails is an error with its words", async () => {
	const { session, end, signal } = setUp();
	const ending = foreground(session, {}, announced({ ...BASH, type: "eval" }), signal.signal);
	end("failed", { errorText: "exit 3" });
	expect(await ending).toEqual({ content: [{ type: "text", text: "exit 3" }], isError: true } as never);
});

test("cancelling the call cancels the job, also when it came before", async () => {
	const { session, called, signal } = setUp();
	const ending = foreground(session, {}, announced(BASH), signal.signal);
	signal.abort();
	expect((await ending).isError).toBe(true);
	expect(called).toContain("cancel bg_1");
	const late = setUp();
	late.signal.abort();
	expect((await foreground(late.session, {}, announced(BASH), late.signal.signal)).isError).toBe(true);
});

test("everything else passes as it is", async () => {
	const { session, called, signal } = setUp();
	const others: unknown[] = [
		announced({ ...BASH, type: "task" }),
		announced({ ...BASH, state: "completed" }),
		announced({ ...BASH, jobId: "unknown" }),
		{ content: [], details: null },
		{ content: [], details: { async: null } },
		undefined,
	];
	for (const other of others) {
		expect(await foreground(session, {}, other as AgentToolResult, signal.signal)).toBe(other as AgentToolResult);
	}
	const asked = announced(BASH);
	expect(await foreground(session, { async: true }, asked, signal.signal)).toBe(asked);
	expect(await foreground({} as AgentSession, {}, asked, signal.signal)).toBe(asked);
	expect(called).toEqual([]);
});
