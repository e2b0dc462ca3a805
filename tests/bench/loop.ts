/**
 * An omp extension for the bench: runs one of omp's own tools in a loop inside the process, without
 * any bridge. What it reaches is the most any bridge into this host can.
 *
 * Asked over the Unix socket `A2MCP_BENCH_LOOP`: one line `{"tool", "arguments", "concurrency",
 * "millis"}` is answered by one line `{"calls", "millis"}` or `{"error"}`.
 */

import { createServer } from "node:net";
import { createInterface } from "node:readline";

import type { ExtensionAPI, ExtensionContext } from "@oh-my-pi/pi-coding-agent";
import { AgentRegistry, MAIN_AGENT_ID } from "@oh-my-pi/pi-coding-agent/registry/agent-registry";

interface Order {
	tool: string;
	arguments: unknown;
	concurrency: number;
	millis: number;
}

export default function loop(pi: ExtensionAPI): void {
	const socket = process.env.A2MCP_BENCH_LOOP;
	if (!socket) return;
	let listening = false;
	pi.on("session_start", (_event, context) => {
		if (listening) return;
		listening = true;
		const server = createServer(connection => {
			// A peer that leaves ends its connection; an unhandled error would end the host.
			connection.on("error", () => connection.destroy());
			createInterface({ input: connection }).on("line", line => {
				run(JSON.parse(line), context)
					.catch(error => ({ error: String(error) }))
					.then(found => connection.write(`${JSON.stringify(found)}\n`));
			});
		});
		server.on("error", error => pi.logger.error(`bench loop: ${error}`));
		server.listen(socket);
	});
}

async function run(order: Order, first: ExtensionContext): Promise<{ calls: number; millis: number }> {
	const session = AgentRegistry.global().get(MAIN_AGENT_ID)?.session;
	const tool = session?.getToolByName(order.tool);
	if (!session || !tool) throw new Error(`no tool ${order.tool}`);
	// The same context the shim gives a remote call.
	const context = {
		sessionManager: session.sessionManager,
		modelRegistry: session.modelRegistry,
		model: session.model,
		settings: session.settings,
		isIdle: () => true,
		abort: () => {},
		hasQueuedMessages: () => false,
		ui: first.ui,
		hasUI: first.hasUI,
		localProtocolOptions: first.localProtocolOptions,
	};
	const signal = new AbortController().signal;
	const began = performance.now();
	let calls = 0;
	const one = async () => {
		while (performance.now() - began < order.millis) {
			await tool.execute(crypto.randomUUID(), order.arguments, signal, () => {}, context);
			calls += 1;
		}
	};
	await Promise.all(Array.from({ length: order.concurrency }, one));
	return { calls, millis: performance.now() - began };
}
