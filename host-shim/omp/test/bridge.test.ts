import { afterEach, expect, test } from "bun:test";
import { chmodSync, existsSync, mkdtempSync, readFileSync, rmSync, statSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

import type { AgentSession, ExtensionContext } from "@oh-my-pi/pi-coding-agent";

import { Bridge, type Switch } from "../bridge.ts";
import type { HostLlmNews, HostLlmState, HostLlmStatus } from "../host-llm.ts";

interface Heard {
	pid: number;
	method: string;
	id?: unknown;
	error?: { message: string };
	params: Record<string, unknown>;
	result?: { tools?: unknown[]; enabled?: boolean };
}

interface Notice {
	text: string;
	level: string;
	context: string;
}

const open: { bridge: Bridge; directory: string; setMain(live: boolean): void }[] = [];
afterEach(async () => {
	for (const { bridge, directory, setMain } of open.splice(0)) {
		writeFileSync(join(directory, "mode"), "");
		setMain(false);
		bridge.sessionStarted({}, contextOf("last", []));
		await bridge.sessionShutDown({});
		rmSync(directory, { recursive: true });
	}
});

function contextOf(name: string, notices: Notice[]): ExtensionContext {
	const notify = (text: string, level = "info") => notices.push({ text, level, context: name });
	return { ui: { notify }, hasUI: true, abort() {} };
}

/** A switch that does what the test says. */
class TestSwitch implements Switch {
	state: HostLlmState = "allow";
	refusal: string | undefined;
	sessions = 0;
	news: HostLlmNews | undefined;

	get status(): HostLlmStatus {
		return { enabled: this.state !== "armed", denied: 0, degraded: this.state === "degraded" };
	}

	switch(enabled: boolean): HostLlmStatus {
		if (!enabled && this.refusal) throw new Error(this.refusal);
		this.state = enabled ? "allow" : "armed";
		this.news?.changed();
		return this.status;
	}

	sessionStarted(): void {
		this.sessions += 1;
	}

	tell(news: HostLlmNews): void {
		this.news = news;
	}
}

/** A process with a bridge in it, whose sidecar is `peer.ts`. */
function setUp(options: { mode?: string; binary?: string | null; main?: boolean } = {}) {
	const directory = mkdtempSync(join(tmpdir(), "a2mcp-shim-"));
	const program = join(directory, "a2mcp");
	writeFileSync(program, `#!/bin/sh\nexec "${process.execPath}" "${join(import.meta.dir, "peer.ts")}" "$@"\n`);
	chmodSync(program, 0o755);
	if (options.binary !== null) {
		writeFileSync(join(directory, "binary.json"), JSON.stringify({ binary: options.binary ?? program }));
	}
	const setMode = (mode: string) => writeFileSync(join(directory, "mode"), mode);
	setMode(options.mode ?? "");

	const tools = new Map([["read", { name: "read", description: "", parameters: {} }]]);
	const session = {
		getAllToolNames: () => [...tools.keys()],
		getAllToolInfos: () => [...tools.values()],
		getToolByName: (name: string) => tools.get(name),
		subscribe: () => () => {},
	} as unknown as AgentSession;
	let main = options.main ?? true;
	let changed = () => {};
	const setMain = (live: boolean) => {
		main = live;
		changed();
	};
	const hostLlm = new TestSwitch();
	const bridge = new Bridge({
		agentDir: directory,
		version: "18.2.3",
		directory,
		liveMain: () => (main ? session : undefined),
		onRegistryChange: callback => {
			changed = callback;
			return () => {};
		},
		hostLlm,
		schemaOf: ({ parameters }) => parameters,
		log() {},
	});

	const notices: Notice[] = [];
	const heard = (method?: string): Heard[] => {
		const file = join(directory, "heard.jsonl");
		if (!existsSync(file)) return [];
		const lines = readFileSync(file, "utf8").split("\n").slice(0, -1);
		return lines.map(line => JSON.parse(line)).filter(message => !method || message.method === method);
	};
	const it = { bridge, hostLlm, directory, tools, notices, heard, setMode, setMain, context: contextOf("first", notices) };
	open.push(it);
	return it;
}

/** Waits for something another process does. */
async function until(what: () => boolean): Promise<void> {
	for (const end = performance.now() + 20_000; performance.now() < end; ) {
		if (what()) return;
		await new Promise(resolve => setTimeout(resolve, 5));
	}
	throw new Error(`never happened: ${what}`);
}

function isAlive(pid: number): boolean {
	try {
		process.kill(pid, 0);
		return true;
	} catch {
		return false;
	}
}

const ANNOUNCED = "a2mcp: this session's tools are served at http://127.0.0.1:4711/ (token abcdef…). /a2mcp shows more.";

test("the sidecar starts before any session and is announced once, at session_start", async () => {
	const { bridge, notices, heard, context, directory } = setUp();
	await until(() => heard("bridge/hello").length === 1);
	expect(notices).toEqual([]);
	const [hello] = heard("bridge/hello");
	expect(hello?.params).toMatchObject({
		protocol: 1,
		features: ["approvals", "hostLlm"],
		capabilities: { tools: { listChanged: true } },
		host: { name: "omp", version: "18.2.3", pid: process.pid, cwd: process.cwd() },
		inFlight: [],
	});
	expect(hello?.params.resume).toBeUndefined();
	bridge.sessionStarted(bridge, context);
	await until(() => notices.length > 0);
	expect(notices).toEqual([{ text: ANNOUNCED, level: "info", context: "first" }]);
	await until(() => heard().some(({ result }) => result?.tools?.length === 1));
	expect(statSync(join(directory, "a2mcp.start.stderr")).mode & 0o777).toBe(0o600);
});

test("thirty session starts, with and without shutdowns, are one sidecar, until Main ends", async () => {
	const { bridge, notices, heard, context, setMain } = setUp();
	const owner = {};
	bridge.sessionStarted(owner, context);
	const silent = contextOf("sub-agent", notices);
	await Promise.all(
		Array.from({ length: 30 }, async (_, i) => {
			const other = {};
			bridge.sessionStarted(other, silent);
			if (i % 2 === 0) await bridge.sessionShutDown(other);
		}),
	);
	await until(() => notices.length > 0);
	expect(notices).toEqual([{ text: ANNOUNCED, level: "info", context: "first" }]);
	expect(heard("started")).toHaveLength(1);
	const pid = heard("started")[0]?.pid as number;
	expect(isAlive(pid)).toBe(true);
	setMain(false);
	await until(() => !isAlive(pid));
	expect(heard("bridge/stop")).toMatchObject([{ params: { graceMs: 1500 } }]);
	expect((await bridge.command([])).text).toContain("the Main session ended");
});

test("the first context's own shutdown ends it, though Main is still registered", async () => {
	const { bridge, heard, context, notices } = setUp();
	bridge.sessionStarted(bridge, context);
	await until(() => notices.length > 0);
	await bridge.sessionShutDown(bridge);
	expect(isAlive(heard("started")[0]?.pid as number)).toBe(false);
});

test("a sidecar that does not stop is killed within the host's two seconds", async () => {
	const { bridge, heard, context, notices } = setUp({ mode: "stubborn" });
	bridge.sessionStarted(bridge, context);
	await until(() => notices.length > 0);
	const began = performance.now();
	await bridge.sessionShutDown(bridge);
	expect(performance.now() - began).toBeLessThan(2_000);
	await until(() => !isAlive(heard("started")[0]?.pid as number));
});

test("no live Main when the start is judged: undone, unannounced; a later Main starts anew", async () => {
	const { bridge, heard, context, notices, setMain } = setUp({ main: false });
	await until(() => heard("bridge/hello").length === 1);
	bridge.sessionStarted(bridge, context);
	await until(() => heard("bridge/stop").length === 1);
	await until(() => !isAlive(heard("started")[0]?.pid as number));
	expect(notices).toEqual([]);
	setMain(true);
	bridge.sessionStarted({}, contextOf("second", notices));
	await until(() => notices.length > 0);
	expect(notices).toEqual([{ text: ANNOUNCED, level: "info", context: "second" }]);
	expect(heard("started")).toHaveLength(2);
	expect(heard("bridge/hello")[1]?.params.resume).toBeUndefined();
});

test("a killed sidecar is replaced, with its port, and told of once", async () => {
	const { bridge, heard, context, notices } = setUp();
	bridge.sessionStarted(bridge, context);
	await until(() => notices.length === 1 && heard().some(({ result }) => result?.tools));
	process.kill(heard("started")[0]?.pid as number, "SIGKILL");
	await until(() => notices.length === 2);
	expect(notices[1]).toEqual({
		text: "a2mcp: the bridge stopped unexpectedly (signal 9) and was restarted; URL and sessions are unchanged",
		level: "warning",
		context: "first",
	});
	const [first, second] = heard("bridge/hello");
	expect(second?.params.resume).toEqual({ port: 4711 });
	expect(second?.params.instance).toBe(first?.params.instance);
	await until(() => heard().filter(({ result }) => result?.tools).length === 2);
	expect(notices).toHaveLength(2);
});

test("an uninstalled bridge is restarted as long as its host runs", async () => {
	const { bridge, heard, context, notices, directory } = setUp();
	bridge.sessionStarted(bridge, context);
	await until(() => notices.length === 1);
	rmSync(join(directory, "binary.json"));
	process.kill(heard("started")[0]?.pid as number, "SIGKILL");
	await until(() => notices.length === 2);
	expect(notices[1]?.text).toContain("was restarted");
	expect(heard("started")).toHaveLength(2);
});

test("a restart that was asked for is silent", async () => {
	const { bridge, heard, context, notices } = setUp();
	bridge.sessionStarted(bridge, context);
	await until(() => notices.length === 1);
	expect(await bridge.command(["restart"])).toEqual({ text: "you said restart", level: "warning" });
	await until(() => heard().filter(({ result }) => result?.tools).length === 2);
	expect(heard("started")).toHaveLength(2);
	expect(notices).toHaveLength(1);
});

test("five failed starts are one notice with the reason; a restart tries again", async () => {
	const { bridge, heard, context, notices, setMode } = setUp({ mode: "exit 1" });
	bridge.sessionStarted(bridge, context);
	await until(() => notices.length > 0);
	expect(heard("started")).toHaveLength(5);
	expect(notices).toEqual([
		{
			text: "a2mcp: the bridge cannot be started: port 80: permission denied. /a2mcp restart tries again.",
			level: "error",
			context: "first",
		},
	]);
	expect(await bridge.command([])).toMatchObject({ level: "error", text: expect.stringContaining("permission denied") });
	expect(await bridge.command(["token"])).toMatchObject({ level: "error" });
	setMode("");
	expect((await bridge.command(["restart"])).text).toBe("a2mcp: running at http://127.0.0.1:4711/ (token abcdef…)");
	expect(notices.at(-1)?.text).toBe(ANNOUNCED);
});

for (const mode of ["refuse", "exit 78"]) {
	test(`a refused config is not retried (${mode})`, async () => {
		const { bridge, heard, context, notices } = setUp({ mode });
		bridge.sessionStarted(bridge, context);
		await until(() => notices.length > 0);
		expect(heard("started")).toHaveLength(1);
		const reason = mode === "refuse" ? "a2mcp.json: token: at least 32 characters" : "exit code 78";
		expect(notices).toHaveLength(1);
		expect(notices[0]?.text).toBe(`a2mcp: the bridge refused to start: ${reason}. /a2mcp restart tries again.`);
	});
}

for (const binary of [null, "/nonexistent/a2mcp", "relative/a2mcp"]) {
	test(`a missing installation is one notice that says what to do (${binary})`, () => {
		const { bridge, context, notices } = setUp({ binary });
		bridge.sessionStarted(bridge, context);
		bridge.sessionStarted({}, contextOf("sub-agent", notices));
		expect(notices).toHaveLength(1);
		expect(notices[0]).toMatchObject({ level: "error", context: "first" });
		expect(notices[0]?.text).toContain("run `a2mcp install omp`");
	});
}

test("a changed tool set is told, and the list asked for again", async () => {
	const { bridge, heard, context, tools } = setUp();
	bridge.sessionStarted(bridge, context);
	await until(() => heard().some(({ result }) => result?.tools?.length === 1));
	tools.set("bash", { name: "bash", description: "", parameters: {} });
	await until(() => heard().some(({ result }) => result?.tools?.length === 2));
	expect(heard("notifications/tools/list_changed")).toHaveLength(1);
});

test("what is typed goes to the sidecar, its answer comes back", async () => {
	const { bridge, context, notices } = setUp();
	bridge.sessionStarted(bridge, context);
	await until(() => notices.length > 0);
	expect(await bridge.command(["rotate", "now"])).toEqual({ text: "you said rotate now", level: "warning" });
});

test("a deny of the config waits for the session and counts once per process", async () => {
	const { bridge, hostLlm, heard, context, notices, setMode } = setUp({ mode: "deny" });
	await until(() => heard("bridge/hello").length === 1);
	const answers = () => heard().filter(({ id, result, error }) => id === "deny" && (result || error));
	expect(answers()).toEqual([]);
	expect(notices).toEqual([]);
	bridge.sessionStarted(bridge, context);
	await until(() => notices.length === 1);
	expect(answers().map(({ result }) => result)).toEqual([{ enabled: false, denied: 0, degraded: false }] as never);
	await until(() => heard("bridge/state").some(({ params }) => params.hostLlm === "armed"));

	// The host was switched since; a bridge that was stopped and comes again does not undo that.
	await bridge.command(["stop-now"]);
	await until(() => notices.length === 2);
	expect((await bridge.command([])).text).toEndWith("\nhost_llm=deny denied=0");
	hostLlm.switch(true);
	expect((await bridge.command([])).text).not.toContain("host_llm");
	await bridge.command(["restart"]);
	await until(() => answers().length === 2);
	expect(answers()[1]?.result?.enabled).toBe(true);
	expect(hostLlm.state).toBe("allow");
	setMode("");
});

test("a refused deny of the config is answered with the reason and the bridge starts", async () => {
	const { bridge, hostLlm, heard, context, notices } = setUp({ mode: "deny" });
	hostLlm.refusal = "no way";
	bridge.sessionStarted(bridge, context);
	await until(() => notices.length === 1);
	expect(heard().find(({ id }) => id === "deny")?.error?.message).toBe("no way");
});

test("every session start reaches the switch, and what it says while no sidecar serves waits", async () => {
	const { bridge, hostLlm, heard, context, notices } = setUp();
	hostLlm.news?.log("takeover armed");
	bridge.sessionStarted(bridge, context);
	bridge.sessionStarted({}, contextOf("sub-agent", []));
	expect(hostLlm.sessions).toBe(2);
	await until(() => heard("bridge/log").length === 1);
	expect(heard("bridge/log")[0]?.params).toEqual({ text: "takeover armed" });
	hostLlm.news?.degraded("another session");
	await until(() => heard("bridge/hostLlmRefused").length === 1);
	expect(heard("bridge/hostLlmRefused")[0]?.params).toEqual({ error: "another session" });
	expect(notices.some(({ text, level }) => level === "warning" && text.includes("another session"))).toBe(true);
});
