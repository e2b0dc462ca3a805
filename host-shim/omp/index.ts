/**
 * The extension omp loads. Starts the bridge at the first load in a process and wires each load's
 * events to it: omp runs this factory again for every sub-agent, which must find the same bridge.
 */

import { toolWireSchema } from "@oh-my-pi/pi-ai/utils/schema";
import type { ExtensionAPI } from "@oh-my-pi/pi-coding-agent";
import { getAgentDir, logger, VERSION } from "@oh-my-pi/pi-utils";

import { Bridge } from "./bridge.ts";
import { registerCommand } from "./command.ts";
import { HostLlm } from "./host-llm.ts";
import { liveMain, liveSessions, onRegistryChange } from "./main.ts";
import { messageOf } from "./outcome.ts";
import { Placeholder } from "./placeholder.ts";

/** What lives once per process. */
interface Once {
	readonly bridge: Bridge;
	readonly placeholder: Placeholder;
}

// Not module state: a reloaded extension is another module in the same process.
const ONCE = Symbol.for("a2mcp.omp.bridge");

function begin(): Once {
	const log = (message: string, context: Record<string, unknown>) => logger.debug(`a2mcp: ${message}`, context);
	const agentDir = getAgentDir();
	const bridge = new Bridge({
		agentDir,
		version: VERSION,
		directory: import.meta.dir,
		liveMain,
		onRegistryChange,
		schemaOf: toolWireSchema,
		hostLlm: new HostLlm(liveMain, liveSessions),
		log,
	});
	const placeholder = new Placeholder(
		agentDir,
		text => bridge.notice(text),
		error => log("fault", { where: "placeholder model", error: messageOf(error) }),
	);
	return { bridge, placeholder };
}

export default function a2mcp(pi: ExtensionAPI): void {
	const { bridge, placeholder } = ((globalThis as { [ONCE]?: Once })[ONCE] ??= begin());

	placeholder.offer(pi);
	pi.on("session_start", (_event, ctx) => {
		// First: a deny covers the model that the session has then.
		placeholder.sessionStarted(liveMain());
		bridge.sessionStarted(pi, ctx);
	});
	pi.on("session_shutdown", () => bridge.sessionShutDown(pi));
	pi.on("tool_approval_requested", event => bridge.approvalRequested(event.toolCallId));
	pi.on("tool_approval_resolved", event => bridge.approvalResolved(event.toolCallId));
	pi.on("mcp_notification", () => bridge.toolsMayHaveChanged());
	pi.events.on("mcp:connection-status", () => bridge.toolsMayHaveChanged());
	registerCommand(pi, bridge);
}
