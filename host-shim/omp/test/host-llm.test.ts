import { afterEach, expect, mock, test } from "bun:test";

import type { Model } from "@oh-my-pi/pi-ai";
import type { AgentSession } from "@oh-my-pi/pi-coding-agent";

const apis = new Map<string, (model: Model) => { events: { error: { errorMessage: string } }[] }>();
mock.module("@oh-my-pi/pi-ai", () => ({
	createAssistantMessageEventStream: () => {
		const events: unknown[] = [];
		return { events, push: (event: unknown) => events.push(event) };
	},
	registerCustomApi: (api: string, stream: never) => apis.set(api, stream),
	unregisterCustomApis: () => apis.clear(),
}));
const { HostLlm } = await import("../host-llm.ts");
const { Tripwire } = await import("../tripwire.ts");
const { planFor } = await import("../deny-plan.ts");

const realFetch = globalThis.fetch;
afterEach(() => {
	globalThis.fetch = realFetch;
});

const REAL: Model[] = [
	{ provider: "anthropic", id: "claude", api: "anthropic-messages", baseUrl: "https://api.anthropic.com" },
	{ provider: "loop", id: "m", api: "openai-completions", baseUrl: "http://loop.example/v1", resolveHeaders() {} },
];

/** A session whose registry does what omp's does, in small. */
function sessionOf(rows: Model[] = REAL, model: Model | undefined = rows[1]) {
	let taken = new Map<string, Model[]>();
	const overrides = new Map<string, unknown>([["retry.enabled", true]]);
	const configured = new Map<string, unknown>([
		["retry.enabled", false],
		["compaction.enabled", true],
		["features.unexpectedStopDetection", "smart"],
	]);
	const keeper = { closed: 0, close: () => void (keeper.closed += 1) };
	const session = {
		agent: {
			state: { model },
			setModel: (row: Model) => void (session.agent.state.model = row),
			providerSessionState: new Map([["anthropic-cache-refresh", keeper]]),
		},
		modelRegistry: {
			getAll: () => rows.flatMap(row => taken.get(row.provider)?.find(own => own.id === row.id) ?? row),
			find: (provider: string, id: string) =>
				session.modelRegistry.getAll().find(row => row.provider === provider && row.id === id),
			registerProvider: (name: string, { models }: { models: Model[] }) =>
				void taken.set(name, models.map(own => ({ ...own, provider: name }))),
			unregisterProvider: (name: string) => void taken.delete(name),
			getApiKey: async () => "a real key",
			resolver: () => "a real resolver",
		},
		settings: {
			get: (path: string) => (overrides.has(path) ? overrides.get(path) : configured.get(path)),
			override: (path: string, value: unknown) => void overrides.set(path, value),
			clearOverride: (path: string) => void overrides.delete(path),
		},
	};
	const forget = () => {
		taken = new Map();
	};
	return { session: session as unknown as AgentSession & typeof session, rows, overrides, keeper, forget };
}

function switchOf(session: () => AgentSession | undefined, sessions: () => AgentSession[] = () => []) {
	const log: string[] = [];
	const degraded: string[] = [];
	let changes = 0;
	const hostLlm = new HostLlm(session, sessions);
	hostLlm.tell({ changed: () => void (changes += 1), log: line => void log.push(line), degraded: reason => void degraded.push(reason) });
	return { hostLlm, log, degraded, changes: () => changes };
}

test("a deny takes the row, the providers that bypass fetch, the keys and the settings, and gives all back", async () => {
	const { session, overrides, keeper } = sessionOf();
	const { hostLlm, log } = switchOf(() => session);
	const { getApiKey, resolver } = session.modelRegistry;
	expect(hostLlm.switch(false)).toEqual({ enabled: false, denied: 0, degraded: false });

	const row = session.agent.state.model as Model;
	expect(row).toMatchObject({ provider: "loop", id: "m", api: "a2mcp-deny" });
	expect(row.resolveHeaders).toBeUndefined();
	expect(session.modelRegistry.find("anthropic", "claude")?.api).toBe("a2mcp-deny");
	expect(session.modelRegistry.find("loop", "m")?.api).toBe("openai-completions");
	const registry = session.modelRegistry as unknown as { getApiKey(row: Model): Promise<string>; resolver(of: unknown): unknown };
	expect([await registry.getApiKey(row), registry.resolver(row)]).toEqual(["a2mcp-denied", "a2mcp-denied"]);
	expect([await registry.getApiKey(REAL[1] as Model), registry.resolver("loop")]).toEqual(["a real key", "a real resolver"]);
	expect(overrides.get("retry.enabled")).toBe(false);
	expect(overrides.get("compaction.enabled")).toBe(false);
	expect(overrides.has("unknown to this version")).toBe(false);
	expect(keeper.closed).toBe(1);
	expect(apis.get("a2mcp-deny")?.(row).events[0]?.error.errorMessage).toBe(
		"a2mcp takeover: host inference is disabled in this mode",
	);
	expect((await fetch("http://loop.example/v1/x")).status).toBe(451);
	expect(hostLlm.status.denied).toBe(2);
	expect(log).toEqual(["takeover armed: 1 provider(s) shadowed (anthropic), 2 tripwire key(s), model pushed: loop/m"]);

	expect(hostLlm.switch(true)).toEqual({ enabled: true, denied: 2, degraded: false });
	expect(session.agent.state.model).toBe(REAL[1] as Model);
	expect(session.modelRegistry.getAll()).toEqual(REAL);
	expect(session.modelRegistry.getApiKey).toBe(getApiKey);
	expect(session.modelRegistry.resolver).toBe(resolver);
	expect([...overrides]).toEqual([["retry.enabled", true]]);
	expect(globalThis.fetch).toBe(realFetch);
	expect(apis.size).toBe(0);
	expect(hostLlm.switch(true).enabled).toBe(true);
});

test("what the operator changes meanwhile stays", () => {
	const { session, overrides } = sessionOf();
	const { hostLlm } = switchOf(() => session);
	hostLlm.switch(false);
	const other: Model = { provider: "other", id: "o", api: "openai-completions" };
	session.agent.setModel(other);
	session.settings.override("compaction.enabled", "changed");
	hostLlm.switch(true);
	expect(session.agent.state.model).toBe(other);
	expect(overrides.get("compaction.enabled")).toBe("changed");
});

test("a denied row that a session took from the registry is exchanged at the end", () => {
	const { session } = sessionOf();
	const child = sessionOf(REAL, REAL[0]).session;
	const { hostLlm } = switchOf(
		() => session,
		() => [session, child],
	);
	hostLlm.switch(false);
	child.agent.setModel(session.modelRegistry.find("anthropic", "claude") as Model);
	hostLlm.switch(true);
	expect(child.agent.state.model).toBe(REAL[0] as Model);
});

test("without a live Main, or with a transport of its own, nothing is touched and the reason is told", () => {
	const none = switchOf(() => undefined);
	expect(() => none.hostLlm.switch(false)).toThrow("no live Main session");
	expect(none.hostLlm.state).toBe("refused");

	const native: Model = { provider: "gateway", id: "g", api: "openai-completions", transport: "pi-native" };
	const { session } = sessionOf([...REAL, native]);
	const { hostLlm, log } = switchOf(() => session);
	expect(() => hostLlm.switch(false)).toThrow(/gateway/);
	expect(hostLlm.status).toEqual({ enabled: true, denied: 0, degraded: false });
	expect(globalThis.fetch).toBe(realFetch);
	expect(log[0]).toStartWith("takeover refused: ");
});

test("it is put on again at each session start; a session that cannot be denied keeps the tripwire", async () => {
	const first = sessionOf();
	let main: AgentSession | undefined = first.session;
	const { hostLlm, log, degraded } = switchOf(() => main);
	hostLlm.sessionStarted();
	expect(first.session.agent.state.model).toBe(REAL[1] as Model);
	hostLlm.switch(false);

	// What the host dropped comes back.
	first.forget();
	hostLlm.sessionStarted();
	expect(first.session.modelRegistry.find("anthropic", "claude")?.api).toBe("a2mcp-deny");

	const native: Model = { provider: "gateway", id: "g", api: "openai-completions", transport: "pi-native" };
	main = sessionOf([...REAL, native]).session;
	hostLlm.sessionStarted();
	hostLlm.sessionStarted();
	expect(hostLlm.status).toEqual({ enabled: false, denied: 0, degraded: true });
	expect([hostLlm.state, degraded.length]).toEqual(["degraded", 1]);
	expect((await fetch("https://api.anthropic.com/v1/messages")).status).toBe(451);

	// Another session moves the deny; the earlier one has its own back.
	const second = sessionOf();
	main = second.session;
	hostLlm.sessionStarted();
	expect(hostLlm.state).toBe("armed");
	expect(second.session.agent.state.model).toMatchObject({ api: "a2mcp-deny" });
	expect(first.session.agent.state.model).toBe(REAL[1] as Model);

	// No Main for a moment: nothing to put it on, nothing to say.
	main = undefined;
	hostLlm.sessionStarted();
	expect(hostLlm.state).toBe("armed");
	hostLlm.switch(true);
	expect(second.session.modelRegistry.getAll()).toEqual(REAL);
	expect(globalThis.fetch).toBe(realFetch);
	expect(log.filter(line => line.includes("degraded")).length).toBe(1);
});

test("a tripwire under or over somebody else's wrapper ends without a trace in its own part", async () => {
	let denied = 0;
	const { hosts } = planFor(REAL, {});
	const tripwire = new Tripwire(() => void (denied += 1));
	const inner = Object.assign(async () => new Response("inner"), { preconnect: () => void (denied += 100) });
	globalThis.fetch = inner as never;
	tripwire.install(hosts);
	tripwire.install(hosts);
	const ours = globalThis.fetch;
	(globalThis.fetch as unknown as { preconnect(url: string): void }).preconnect("http://loop.example");
	expect(denied).toBe(0);

	const theirs = (...args: Parameters<typeof fetch>) => ours(...args);
	globalThis.fetch = theirs as never;
	expect((await fetch("http://loop.example/v1")).status).toBe(451);
	tripwire.install(hosts);
	expect((await fetch(new Request("http://loop.example/v1"))).status).toBe(451);
	expect(denied).toBe(2);
	expect(await (await fetch("http://elsewhere.example/")).text()).toBe("inner");
	tripwire.remove();
	expect(globalThis.fetch).toBe(theirs as never);
	expect(await (await fetch("http://loop.example/v1")).text()).toBe("inner");
	expect(denied).toBe(2);
});
