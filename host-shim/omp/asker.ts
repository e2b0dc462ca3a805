/**
 * Who asks for a remote call, for the operator's eyes: cards and notices name the client and the
 * beginning of its session. Both come from the caller: foreign text, cleaned and cut.
 */

import { oneLine } from "./notices.ts";

const LONGEST_NAME = 40;
/** As much of a session's id as `a2mcp status` shows. */
const SESSION_SHOWN = 8;

/** From `_meta["a2mcp/client"]`: `claude-code (session 1a2b3c4d)`. */
export function asker(client: { sid?: unknown; name?: unknown }): string {
	const name = typeof client.name === "string" ? oneLine(client.name, LONGEST_NAME) : "";
	const session = typeof client.sid === "string" ? oneLine(client.sid.slice(0, SESSION_SHOWN)) : "";
	return `${name || "a remote client"}${session ? ` (session ${session})` : ""}`;
}
