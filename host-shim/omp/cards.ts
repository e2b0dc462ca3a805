/**
 * The host's cards for remote calls: rendering only. A failure to draw one changes nothing.
 *
 * A card costs the host as much as a whole `read` (an entry in the session's memory, every
 * listener, every extension), so there is a budget: a person reads a few a second, and a caller
 * that makes thousands a second is not slowed down by drawing them. The audit has every call.
 */

import type { AgentEvent } from "@oh-my-pi/pi-agent-core";
import type { AgentSession } from "@oh-my-pi/pi-coding-agent";

/** Cards that may come at once, and how many more each second. */
export const CARDS_AT_ONCE = 200;
export const CARDS_PER_SECOND = 25;
/** Arguments and results over this size are drawn in short. */
const DRAWN_IN_FULL = 256 * 1024;
const DRAWN_TEXT = 2_000;
const DRAWN_ITEMS = 50;
const DRAWN_DEPTH = 6;

/** How many cards may be drawn now. Pure: callers pass `now`. */
export class CardBudget {
	#left = CARDS_AT_ONCE;
	#at = 0;

	take(now: number): boolean {
		const earned = (Math.max(0, now - this.#at) / 1000) * CARDS_PER_SECOND;
		this.#left = Math.min(CARDS_AT_ONCE, this.#left + earned);
		this.#at = now;
		if (this.#left < 1) return false;
		this.#left -= 1;
		return true;
	}
}

/** One call's card. Without a budget it draws nothing. */
export class Card {
	readonly #session: AgentSession | undefined;
	readonly #toolCallId: string;
	readonly #toolName: string;
	readonly #args: unknown;
	readonly #asker: string;
	readonly #fault: (error: unknown) => void;

	/** `size`: of the arguments, in bytes; `isTerminal`: the host draws its own terminal. */
	constructor(
		session: AgentSession | undefined,
		call: { toolCallId: string; tool: string; args: unknown; size: number; asker: string; isTerminal: boolean },
		fault: (error: unknown) => void,
	) {
		this.#session = session;
		this.#toolCallId = call.toolCallId;
		this.#toolName = call.tool;
		this.#args = session && call.size > DRAWN_IN_FULL ? inShort(call.args) : call.args;
		this.#asker = `asked by ${call.asker}`;
		this.#fault = fault;
		// The terminal takes an intent for what the host's own model is about to do, and says so at its
		// next turn; there the card's text alone says who asks.
		const intent = call.isTerminal ? {} : { intent: `${call.tool}, ${this.#asker}` };
		this.#draw({ type: "tool_execution_start", ...this.#names(), args: this.#args, ...intent });
		if (call.isTerminal) this.update({ content: [] });
	}

	update(partialResult: unknown): void {
		this.#draw({ type: "tool_execution_update", ...this.#names(), args: this.#args, partialResult: signed(partialResult, this.#asker) });
	}

	/** `size`: of the result, in bytes. */
	end(result: unknown, isError: boolean, size: number): void {
		if (!this.#session) return;
		const drawn = size > DRAWN_IN_FULL ? inShort(result) : result;
		this.#draw({ type: "tool_execution_end", ...this.#names(), result: signed(drawn, this.#asker), isError });
	}

	#names(): { toolCallId: string; toolName: string } {
		return { toolCallId: this.#toolCallId, toolName: this.#toolName };
	}

	#draw(event: AgentEvent): void {
		try {
			this.#session?.agent.emitExternalEvent(event);
		} catch (error) {
			this.#fault(error);
		}
	}
}

/** A result as it is drawn: its first text, which every card shows, says who asked. The result itself stays. */
function signed(result: unknown, asker: string): unknown {
	if (typeof result !== "object" || result === null) return result;
	const { content } = result as { content?: unknown };
	if (!Array.isArray(content)) return result;
	const at = content.findIndex(block => block?.type === "text" && typeof block.text === "string");
	if (at < 0) return { ...result, content: [...content, { type: "text", text: `[${asker}]` }] };
	const text = `${content[at].text}\n[${asker}]`;
	return { ...result, content: content.with(at, { ...content[at], text }) };
}

/** A copy with its long parts cut: megabytes of text say nothing on a card and block the host to draw. */
export function inShort(value: unknown, depth = 0): unknown {
	if (typeof value === "string") {
		return value.length > DRAWN_TEXT ? `${value.slice(0, DRAWN_TEXT)}… (${value.length} characters)` : value;
	}
	if (typeof value !== "object" || value === null) return value;
	if (depth >= DRAWN_DEPTH) return "…";
	if (Array.isArray(value)) return value.slice(0, DRAWN_ITEMS).map(item => inShort(item, depth + 1));
	return Object.fromEntries(
		Object.entries(value)
			.slice(0, DRAWN_ITEMS)
			.map(([key, item]) => [key, inShort(item, depth + 1)]),
	);
}
