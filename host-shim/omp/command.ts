/** `/a2mcp …` in the host: what was typed goes to the sidecar, the answer to whoever typed it. */

import type { ExtensionAPI } from "@oh-my-pi/pi-coding-agent";

import type { Bridge } from "./bridge.ts";
import { show } from "./notices.ts";
import { messageOf } from "./outcome.ts";

export function registerCommand(pi: ExtensionAPI, bridge: Bridge): void {
	pi.registerCommand("a2mcp", {
		description: "The bridge to remote agents: status, or token, rotate, restart, tunnel",
		handler: async (args, ctx) => {
			try {
				const { text, level } = await bridge.command(args.split(/\s+/).filter(word => word !== ""));
				show(ctx.ui, text, level);
			} catch (error) {
				show(ctx.ui, `a2mcp: ${messageOf(error)}`, "error");
			}
		},
	});
}
