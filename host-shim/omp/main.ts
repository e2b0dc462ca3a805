/** The host's Main session: the one whose tools are served, looked up anew each time. */

import type { AgentSession } from "@oh-my-pi/pi-coding-agent";
import { AgentRegistry, MAIN_AGENT_ID } from "@oh-my-pi/pi-coding-agent/registry/agent-registry";

/** The live Main session; an entry whose session is null (parked, aborted, starting) is none. */
export function liveMain(): AgentSession | undefined {
	return AgentRegistry.global().get(MAIN_AGENT_ID)?.session ?? undefined;
}

/** Every live session: Main's and the sub-agents'. */
export function liveSessions(): AgentSession[] {
	return AgentRegistry.global()
		.list()
		.flatMap(entry => entry.session ?? []);
}

/** Calls `changed` at each change of the registry. Returns how to stop that. */
export function onRegistryChange(changed: () => void): () => void {
	return AgentRegistry.global().onChange(changed);
}
