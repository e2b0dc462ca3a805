/**
 * Which remote calls wait for the operator. The host's own gate decides; this only tells the
 * sidecar of it, by the list in `bridge/state`; the sidecar tells the callers.
 */

export interface WaitingCall {
	readonly callId: string;
	readonly tool: string;
}

export class Approvals {
	/** By the host's tool call id. */
	readonly #waiting = new Map<string, WaitingCall>();
	readonly #changed: () => void;

	constructor(changed: () => void) {
		this.#changed = changed;
	}

	requested(toolCallId: string, call: WaitingCall): void {
		this.#waiting.set(toolCallId, call);
		this.#changed();
	}

	/** Answered, or its call ended without an answer. */
	settled(toolCallId: string): void {
		if (this.#waiting.delete(toolCallId)) this.#changed();
	}

	waits(toolCallId: string): boolean {
		return this.#waiting.has(toolCallId);
	}

	list(): WaitingCall[] {
		return [...this.#waiting.values()];
	}
}
