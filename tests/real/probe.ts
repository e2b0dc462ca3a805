/**
 * An omp extension for the tests: tools that misbehave in known ways, and a way to ask the host
 * itself what is true.
 *
 * Asked over the Unix socket `A2MCP_PROBE`: one connection, one line of JSON `{"op", …}`, answered by
 * one line `{"ok": …}` or `{"error"}`. It says nothing anywhere else: omp's stdout is a protocol.
 */

import { existsSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { createInterface } from "node:readline";

import { completeSimple, getCustomApi } from "@oh-my-pi/pi-ai";
import { toolWireSchema } from "@oh-my-pi/pi-ai/utils/schema";
import type { ExtensionAPI, ExtensionContext } from "@oh-my-pi/pi-coding-agent";
import { ModelRegistry } from "@oh-my-pi/pi-coding-agent/config/model-registry";
import { AgentRegistry, MAIN_AGENT_ID } from "@oh-my-pi/pi-coding-agent/registry/agent-registry";

interface Order {
	op: string;
	[key: string]: unknown;
}

type Handler = (event: unknown, context: unknown) => unknown;

/** omp runs the factory again for every sub-agent, perhaps from another copy of this module. */
const loads = ((globalThis as never as Record<symbol, { factory: number; started: number }>)[Symbol.for("a2mcp.probe")] ??= {
	factory: 0,
	started: 0,
});

export default function probe(pi: ExtensionAPI): void {
	const socket = process.env.A2MCP_PROBE;
	if (!socket) return;
	registerTools(pi);
	loads.factory += 1;
	pi.on("session_start", (_event, context) => {
		loads.started += 1;
		if (loads.started > 1) return;
		const server = createServer(connection => {
			// A peer that leaves ends its connection; an unhandled error would end the host.
			connection.on("error", () => connection.destroy());
			createInterface({ input: connection }).on("line", line => {
				obey(pi, context, JSON.parse(line))
					.then(ok => ({ ok: ok ?? null }))
					.catch(error => ({ error: String(error?.stack ?? error) }))
					.then(found => connection.end(`${JSON.stringify(found)}\n`));
			});
		});
		server.on("error", error => pi.logger.error(`probe: ${error}`));
		server.listen(socket);
	});
}

function registerTools(pi: ExtensionAPI): void {
	const tool = (name: string, parameters: object, execute: (args: any, signal?: AbortSignal) => Promise<unknown>) =>
		pi.registerTool({
			name,
			label: name,
			description: `${name}, of the tests`,
			parameters: parameters as never,
			approval: "read",
			execute: async (_id, args, signal) => (await execute(args, signal)) as never,
		});
	const anything = { type: "object", properties: {} };

	tool("probe_throw", anything, async () => {
		throw new Error("the probe threw: \u201cas told\u201d");
	});
	tool("probe_throw_string", anything, async () => {
		throw "a bare string";
	});
	tool("probe_odd", { anyOf: [{ type: "object", properties: { a: { type: "string" } }, required: ["a"] }, { type: "object" }] }, async args =>
		said(JSON.stringify(args)),
	);
	tool("probe_kinds", anything, async () => ({
		content: [
			{ type: "text", text: "known" },
			{ type: "thinking", thinking: "a kind MCP does not know" },
		],
		details: { secret: "of the host" },
	}));
	tool("probe_big", { type: "object", properties: { bytes: { type: "number" } } }, async args => said("b".repeat(args.bytes)));
	// Waits until the file is there, so that a test decides when the call ends; leaves word when it was aborted.
	tool("probe_wait", { type: "object", properties: { file: { type: "string" } } }, async (args, signal) => {
		while (!existsSync(args.file)) {
			if (signal?.aborted) {
				writeFileSync(`${args.file}.aborted`, "");
				throw new Error("the probe was aborted");
			}
			await new Promise(resolve => setTimeout(resolve, 20));
		}
		return said("the file is there");
	});
}

/** Main while `main-ends` has taken it away. */
let away: ReturnType<AgentRegistry["get"]>;

async function obey(pi: ExtensionAPI, context: ExtensionContext, order: Order): Promise<unknown> {
	const registry = AgentRegistry.global();
	const session = (registry.get(MAIN_AGENT_ID) ?? away)?.session;
	if (!session) throw new Error("no Main session");
	switch (order.op) {
		case "names":
			return session.getAllToolNames();
		case "agents":
			return { ...loads, agents: AgentRegistry.global().list().map(({ id, status }) => ({ id, status })) };
		// The process lives on without its Main session, and gets another: what omp does under ACP.
		case "main-ends":
			away = registry.get(MAIN_AGENT_ID);
			registry.unregister(MAIN_AGENT_ID);
			return null;
		case "main-comes":
			registry.register({ ...away, session } as never);
			await session.extensionRunner?.emit({ type: "session_start" });
			return null;
		case "catalogue":
			return pi
				.getAllTools()
				.map(tool => ({ name: tool.name, description: tool.description, inputSchema: toolWireSchema(tool as never) }));
		case "execute": {
			const tool = session.getToolByName(String(order.tool));
			if (!tool) throw new Error(`no tool ${order.tool}`);
			const signal = AbortSignal.timeout(Number(order.millis ?? 60_000));
			try {
				return await tool.execute(crypto.randomUUID(), order.arguments as never, signal, () => {}, {
					sessionManager: session.sessionManager,
					modelRegistry: session.modelRegistry,
					model: session.model,
					settings: session.settings,
					isIdle: () => true,
					abort: () => {},
					hasQueuedMessages: () => false,
					ui: context.ui,
					hasUI: context.hasUI,
				} as never);
			} catch (error) {
				return { threw: String((error as Error)?.message ?? error) };
			}
		}
		case "register":
			pi.registerTool({
				name: String(order.tool),
				label: String(order.tool),
				description: "registered while the session ran",
				parameters: { type: "object", properties: {} } as never,
				execute: async () => said("registered late") as never,
			});
			return null;
		case "block": {
			// Answered first: the loop is blocked from then on.
			setTimeout(() => {
				const end = performance.now() + Number(order.millis);
				while (performance.now() < end);
			}, 50);
			return null;
		}
		case "session-start":
			await session.extensionRunner?.emit({ type: "session_start" });
			return null;
		case "host":
			return hostState(session);
		case "ask":
			return ask(session, String(order.provider), order.registry === "own", Number(order.millis ?? 15_000));
		case "provider":
			// As an extension does it: rows of its own, under its own path.
			pi.registerProvider(String(order.name), order.config as never);
			// Beside models omp takes no transport.
			if (order.transport) pi.registerProvider(String(order.name), { transport: order.transport } as never);
			return null;
		case "no-provider":
			pi.unregisterProvider(String(order.name));
			return null;
		case "prune":
			// What omp does to a registry for each session it builds.
			session.modelRegistry.syncExtensionSources([]);
			return null;
		case "break":
			return breakStep(session, String(order.step));
		case "mend":
			for (const undo of broken.splice(0)) undo();
			return null;
		case "sub-agents":
			return subAgents(String(order.shim), Number(order.count));
		default:
			throw new Error(`unknown order ${order.op}`);
	}
}

/** Before anything else in this process could replace it. */
const firstFetch = globalThis.fetch;

/** Whatever a deny changes, as it is now. */
function hostState(session: any): unknown {
	const { modelRegistry, settings, agent } = session;
	// The placeholder goes by itself, some time after the start.
	const kept = modelRegistry.getAll().filter((row: any) => row.provider !== "a2mcp");
	const rows = kept.map((row: any) => `${row.provider}/${row.id} ${row.api} ${row.baseUrl}`);
	const paths = [
		"bash.autoBackground.enabled",
		"retry.enabled",
		"advisor.enabled",
		"ttsr.enabled",
		"compaction.enabled",
		"recap.enabled",
		"features.unexpectedStopDetection",
	];
	return {
		fetch: globalThis.fetch === firstFetch,
		api: getCustomApi("a2mcp-deny") !== undefined,
		model: `${agent.state.model?.provider}/${agent.state.model?.id} ${agent.state.model?.api}`,
		rows: rows.length,
		digest: String(Bun.hash(rows.sort().join("\n"))),
		denied: modelRegistry.getAll().filter((row: any) => row.api === "a2mcp-deny").length,
		own: ["getApiKey", "resolver"].filter(name => Object.hasOwn(modelRegistry, name)),
		settings: Object.fromEntries(paths.map(path => [path, settings.get(path)])),
	};
}

/** One completion past the session: with its registry, or with one built here, as other callers in omp do. */
async function ask(session: any, provider: string, own: boolean, millis: number): Promise<unknown> {
	const registry = own ? new ModelRegistry(session.modelRegistry.authStorage) : session.modelRegistry;
	// Never another row of it: those lead off this machine.
	const row = registry.getAll().find((row: any) => row.provider === provider && /\/\/(127\.0\.0\.1|localhost):/.test(row.baseUrl));
	if (!row) throw new Error(`no model of ${provider}`);
	const context = { systemPrompt: ["be brief"], messages: [{ role: "user", content: "hello", timestamp: Date.now() }] };
	try {
		const message: any = await completeSimple(row, context as never, {
			apiKey: "not-a-real-key",
			signal: AbortSignal.timeout(millis),
		});
		return { api: row.api, stopReason: message.stopReason, errorMessage: message.errorMessage };
	} catch (error) {
		return { api: row.api, stopReason: "threw", errorMessage: String((error as Error)?.message ?? error) };
	}
}

const broken: (() => void)[] = [];

/** Makes one step of what a deny does throw, in the host's own objects. */
function breakStep(session: any, step: string): null {
	const fixed = (object: any, name: string, value: unknown) => {
		const before = Object.getOwnPropertyDescriptor(object, name);
		Object.defineProperty(object, name, { value, writable: false, configurable: true, enumerable: true });
		broken.push(() => (before ? Object.defineProperty(object, name, before) : delete object[name]));
	};
	const throwing = (object: any, name: string, from: number) => {
		const real = object[name];
		let calls = 0;
		fixed(object, name, function (this: unknown, ...args: unknown[]) {
			calls += 1;
			if (calls === from) throw new Error(`${name} was broken`);
			return real.apply(this, args);
		});
	};
	switch (step) {
		case "rows":
			throwing(session.modelRegistry, "getAll", 1);
			break;
		case "fetch":
			fixed(globalThis, "fetch", globalThis.fetch);
			break;
		case "credentials":
			fixed(session.modelRegistry, "resolver", session.modelRegistry.resolver);
			break;
		case "first setting":
			throwing(session.settings, "override", 1);
			break;
		case "later setting":
			throwing(session.settings, "override", 5);
			break;
		case "first provider":
			throwing(session.modelRegistry, "registerProvider", 1);
			break;
		case "later provider":
			throwing(session.modelRegistry, "registerProvider", 2);
			break;
		case "model":
			throwing(session.agent, "setModel", 1);
			break;
		default:
			throw new Error(`no step ${step}`);
	}
	return null;
}

/**
 * Loads the shim as omp does for a sub-agent: its factory again, with an API and a context of its own
 * that have no UI. All start at once; every second one also ends again.
 */
async function subAgents(shim: string, count: number): Promise<{ told: number }> {
	let told = 0;
	const ui = { notify: () => void (told += 1) };
	const one = async (index: number) => {
		const { default: factory } = await import(shim);
		const handlers = new Map<string, Handler[]>();
		const api = {
			on: (event: string, handler: Handler) => handlers.set(event, [...(handlers.get(event) ?? []), handler]),
			events: { on: () => () => {} },
			registerCommand: () => {},
			registerProvider: () => {},
			logger: { debug: () => {}, error: () => {} },
		};
		await factory(api);
		const fire = async (event: string) => {
			for (const handler of handlers.get(event) ?? []) await handler({ type: event }, { ui, hasUI: false, mode: "rpc" });
		};
		await fire("session_start");
		if (index % 2 === 0) await fire("session_shutdown");
	};
	await Promise.all(Array.from({ length: count }, (_, index) => one(index)));
	return { told };
}

function said(text: string): unknown {
	return { content: [{ type: "text", text }] };
}
