/**
 * A wrapper around this process's `globalThis.fetch` that answers requests to given hosts by itself, with
 * a refusal, and lets everything else through untouched. omp reads the global at each model request, so this also stops
 * those that ask no session: sub-agents with a registry of their own, web search, commit messages.
 *
 * The refusal is a response: omp takes whatever a fetch throws for a passing fault and tries six times.
 * It sees nothing of other processes, of what kept an earlier reference to fetch, or of what is no
 * fetch.
 */

import { DENIED } from "./deny-api.ts";
import type { HostKeys } from "./deny-plan.ts";

type Fetch = typeof globalThis.fetch;

/** No status that omp, or a provider's client in it, tries again, rotates keys for, or works around. */
const STATUS = 451;

function refusal(): Response {
	const error = { type: "a2mcp_denied", message: DENIED };
	return Response.json({ type: "error", error }, { status: STATUS, headers: { "x-should-retry": "false" } });
}

interface Wrapper {
	readonly fetch: Fetch;
	readonly inner: Fetch;
	/** Cleared when it must not refuse any more, although somebody may still hold or wrap it. */
	isActive: boolean;
}

export class Tripwire {
	readonly #denied: () => void;
	#hosts: HostKeys | undefined;
	#wrapper: Wrapper | undefined;

	constructor(denied: () => void) {
		this.#denied = denied;
	}

	get isInstalled(): boolean {
		return this.#wrapper !== undefined;
	}

	/** Installs it, or gives it other hosts; on top again, should something else have taken its place. */
	install(hosts: HostKeys): void {
		const before = this.#wrapper;
		if (before === undefined || globalThis.fetch !== before.fetch) {
			const wrapper = this.#wrap(globalThis.fetch);
			globalThis.fetch = wrapper.fetch;
			if (before) before.isActive = false;
			this.#wrapper = wrapper;
		}
		this.#hosts = hosts;
	}

	/** Puts the original back. What somebody else put around ours stays; ours then only passes on. */
	remove(): void {
		const wrapper = this.#wrapper;
		if (!wrapper) return;
		wrapper.isActive = false;
		this.#wrapper = undefined;
		this.#hosts = undefined;
		if (globalThis.fetch === wrapper.fetch) globalThis.fetch = wrapper.inner;
	}

	#wrap(inner: Fetch): Wrapper {
		const fetch = (input: unknown, init?: unknown) => {
			if (wrapper.isActive && this.#refuses(input)) {
				this.#denied();
				return Promise.resolve(refusal());
			}
			return (inner as (...args: unknown[]) => Promise<Response>).call(globalThis, input, init);
		};
		// Whatever hangs on it; `preconnect`, which opens a connection before there is a request, as above.
		for (const [name, property] of Object.entries(Object.getOwnPropertyDescriptors(inner))) {
			if (!["length", "name", "prototype", "preconnect"].includes(name)) Object.defineProperty(fetch, name, property);
		}
		const { preconnect } = inner as { preconnect?: (url: unknown, ...rest: unknown[]) => void };
		if (typeof preconnect === "function") {
			const guarded = (url: unknown, ...rest: unknown[]) => {
				if (!wrapper.isActive || !this.#refuses(url)) preconnect.call(inner, url, ...rest);
			};
			Object.defineProperty(fetch, "preconnect", { value: guarded, configurable: true, writable: true });
		}
		const wrapper: Wrapper = { fetch: fetch as Fetch, inner, isActive: true };
		return wrapper;
	}

	#refuses(input: unknown): boolean {
		try {
			const url = input instanceof Request ? input.url : String(input);
			return this.#hosts?.has(new URL(url).host) === true;
		} catch {
			return false;
		}
	}
}
