/**
 * The extension omp loads. Starts the bridge at the first load in a process and wires each load's
 * events to it: omp runs this factory again for every sub-agent, which must find the same bridge.
 */

import { toolWireSchema } from "@oh-my-pi/pi-ai/utils/schema";
import type { ExtensionAPI } from "@oh-my-pi/pi-coding-agent";
import { getAgentDir, logger, VERSION } from "@oh-my-pi/pi-utils";

import { Bridge } from "./bridge.ts";
import { registerCommand } from "./command.ts";
import { liveMain, onRegistryChange } from "./main.ts";

// Not module state: a reloaded extension is another module in the same process.
const BRIDGE = Symbol.for("a2mcp.omp.bridge");

export default function a2mcp(pi: ExtensionAPI): void {
	const process = globalThis as { [BRIDGE]?: Bridge };
	const bridge = (process[BRIDGE] ??= new Bridge({
		agentDir: getAgentDir(),
		version: VERSION,
		directory: import.meta.dir,
		liveMain,
		onRegistryChange,
		schemaOf: toolWireSchema,
		log: (message, context) => logger.debug(`a2mcp: ${message}`, context),
	}));

	pi.on("session_start", (_event, ctx) => bridge.sessionStarted(pi, ctx));
	pi.on("session_shutdown", () => bridge.sessionShutDown(pi));
	pi.on("tool_approval_requested", event => bridge.approvalRequested(event.toolCallId));
	pi.on("tool_approval_resolved", event => bridge.approvalResolved(event.toolCallId));
	pi.on("mcp_notification", () => bridge.toolsMayHaveChanged());
	pi.events.on("mcp:connection-status", () => bridge.toolsMayHaveChanged());
	registerCommand(pi, bridge);
}
