/**
 * The api that refuses: what a denied row of a model leads to. One attempt, counted, that ends with a
 * sentence in which omp's retry rules recognise nothing; no request is built and no credential is
 * looked up for such a row.
 */

import { createAssistantMessageEventStream, type Model, registerCustomApi, unregisterCustomApis } from "@oh-my-pi/pi-ai";
import type { ModelRegistry } from "@oh-my-pi/pi-coding-agent";

import { DENY_API } from "./deny-plan.ts";
import { replaceMethods } from "./replace.ts";

export const DENIED = "a2mcp takeover: host inference is disabled in this mode";

const SOURCE = "a2mcp";
/** Stands where omp wants to see that there is a key; it leads nowhere. */
export const NO_KEY = "a2mcp-denied";

/** Registers the api; `denied` is told of each refused request. */
export function registerDenyApi(denied: () => void): void {
	const refuse = (model: Model) => {
		denied();
		const stream = createAssistantMessageEventStream();
		const cost = { input: 0, output: 0, cacheRead: 0, cacheWrite: 0, total: 0 };
		const error = {
			role: "assistant",
			content: [],
			api: model.api,
			provider: model.provider,
			model: model.id,
			usage: { input: 0, output: 0, cacheRead: 0, cacheWrite: 0, totalTokens: 0, cost },
			stopReason: "error",
			errorMessage: DENIED,
			timestamp: Date.now(),
		};
		stream.push({ type: "error", reason: "error", error });
		return stream;
	};
	registerCustomApi(DENY_API, refuse, SOURCE);
}

export function unregisterDenyApi(): void {
	unregisterCustomApis(SOURCE);
}

/** The denied copy of a row: the same model to look at, without what omp would run before the api. */
export function denied(row: Model): Model {
	const { resolveHeaders: _, transport: __, ...rest } = row;
	return { ...rest, api: DENY_API };
}

export function isDenied(row: { api?: unknown } | undefined): boolean {
	return row?.api === DENY_API;
}

/**
 * omp asks for a model's key before each turn, and that may run a program or refresh a login: for a
 * denied row the registry answers by itself. Returns how to take that back.
 */
export function withholdCredentials(registry: ModelRegistry): () => void {
	const { getApiKey, resolver } = registry;
	const own = {
		getApiKey(this: ModelRegistry, ...args: Parameters<ModelRegistry["getApiKey"]>) {
			return isDenied(args[0]) ? Promise.resolve(NO_KEY) : getApiKey.apply(this, args);
		},
		resolver(this: ModelRegistry, ...args: Parameters<ModelRegistry["resolver"]>) {
			const [target] = args;
			return typeof target === "object" && isDenied(target) ? NO_KEY : resolver.apply(this, args);
		},
	};
	// Somebody else's, put on top of ours, stays; ours then only passes on.
	return replaceMethods(registry, own);
}
