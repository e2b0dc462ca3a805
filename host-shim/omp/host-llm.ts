/**
 * The switch on the host's own model requests (contract 8): its state, and when the deny is put on
 * again. How a deny works is in `deny.ts`.
 *
 * ```text
 *            off ok
 *   allow ─────────▶ armed ◀──────────▶ degraded   a new session could not be denied: the tripwire
 *     ▲ ╲ refused     │  on                │  on     holds, the session's own row does not
 *     │  ▶ refused    │                    │
 *     └───────────────┴────────────────────┘
 * ```
 */

import type { AgentSession } from "@oh-my-pi/pi-coding-agent";

import { Deny } from "./deny.ts";
import { messageOf } from "./outcome.ts";

/** The state in the words of `bridge/state`. */
export type HostLlmState = "allow" | "armed" | "degraded" | "refused";

/** The answer to a switch, as callers get it. */
export interface HostLlmStatus {
	readonly enabled: boolean;
	readonly denied: number;
	readonly degraded: boolean;
}

/** What the switch tells of. */
export interface HostLlmNews {
	/** State or count changed. */
	changed(): void;
	/** A line for the log. */
	log(text: string): void;
	/** A session that came while the deny was on could not be denied. */
	degraded(reason: string): void;
}

export class HostLlm {
	readonly #liveMain: () => AgentSession | undefined;
	readonly #sessions: () => Iterable<AgentSession>;
	readonly #deny: Deny;
	#news: HostLlmNews = { changed() {}, log() {}, degraded() {} };
	#state: HostLlmState = "allow";
	#denied = 0;

	constructor(liveMain: () => AgentSession | undefined, sessions: () => Iterable<AgentSession>) {
		this.#liveMain = liveMain;
		this.#sessions = sessions;
		this.#deny = new Deny(
			() => {
				this.#denied += 1;
				this.#news.changed();
			},
			line => this.#news.log(line),
		);
	}

	/** Who hears of it; set once. */
	tell(news: HostLlmNews): void {
		this.#news = news;
	}

	get state(): HostLlmState {
		return this.#state;
	}

	get status(): HostLlmStatus {
		return { enabled: !this.#isDenying(), denied: this.#denied, degraded: this.#state === "degraded" };
	}

	/**
	 * Switches; the state it is in already is no error.
	 *
	 * @throws with the reason, for whoever asked, when a deny could not be put on and none was before.
	 */
	switch(enabled: boolean): HostLlmStatus {
		if (enabled) this.#restore();
		else if (this.#isDenying()) this.#again();
		else this.#begin();
		return this.status;
	}

	/** At each `session_start`, of sub-agents too: the host may have dropped what was put on. */
	sessionStarted(): void {
		if (this.#isDenying()) this.#again();
	}

	#isDenying(): boolean {
		return this.#state === "armed" || this.#state === "degraded";
	}

	#begin(): void {
		try {
			const session = this.#liveMain();
			if (!session) throw new Error("no live Main session");
			this.#news.log(this.#deny.arm(session));
			this.#become("armed");
		} catch (error) {
			this.#news.log(`takeover refused: ${messageOf(error)}`);
			this.#become("refused");
			throw error;
		}
	}

	/** Puts on what is missing. Without a live Main there is nothing to put it on: it stays as it is. */
	#again(): void {
		const session = this.#liveMain();
		if (!session) return;
		try {
			const line = this.#deny.arm(session);
			if (this.#state === "degraded") this.#news.log(line);
			this.#become("armed");
		} catch (error) {
			const reason = messageOf(error);
			const isNew = this.#state !== "degraded";
			this.#become("degraded");
			if (!isNew) return;
			this.#news.log(`takeover degraded, only the tripwire is in place: ${reason}`);
			this.#news.degraded(reason);
		}
	}

	#restore(): void {
		if (this.#isDenying()) {
			this.#deny.restore(this.#sessions());
			this.#news.log("takeover restored");
		}
		this.#become("allow");
	}

	#become(state: HostLlmState): void {
		if (this.#state === state) return;
		this.#state = state;
		this.#news.changed();
	}
}
