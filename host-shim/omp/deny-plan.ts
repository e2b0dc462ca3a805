/**
 * What a deny has to reach, read from the host's registry of models. Pure.
 *
 * Every model request of omp 18.2 leaves by one of these doors (pi-ai, `transport-fetch.ts` and the
 * providers): `globalThis.fetch`, read anew at each call; or, for the few in {@link LANES}, something
 * that is no fetch. The first door is watched by host name, the others are closed by taking their
 * providers' rows. A model with a transport of its own is dispatched before anything an extension can
 * register: nothing here reaches it, so the deny is refused.
 */

import type { Model } from "@oh-my-pi/pi-ai";

/** The api under which a denied row stands. */
export const DENY_API = "a2mcp-deny";

/** Requests that do not go through fetch: node:https, a WebSocket, HTTP/2. */
const LANES: readonly ((row: Model) => boolean)[] = [
	row => row.provider === "anthropic" && row.api === "anthropic-messages",
	row => row.api === "openai-codex-responses",
	row => row.api === "cursor-agent",
];

/**
 * Providers that compute the host from a region, a resource or a token, so that no base URL names it.
 */
const FAMILIES: readonly { readonly api?: string; readonly provider?: string; readonly host: RegExp }[] = [
	{ api: "bedrock-converse-stream", host: /^bedrock-runtime(-fips)?\.[a-z0-9-]+\.amazonaws\.com(\.cn)?$/ },
	{ provider: "google-vertex", host: /^([a-z0-9-]+-)?aiplatform(\.[a-z]+\.rep)?\.googleapis\.com$/ },
	{ api: "azure-openai-responses", host: /\.(openai|cognitiveservices|services\.ai)\.azure\.com$/ },
	{ api: "google-gemini-cli", host: /(^|[.-])cloudcode-pa(\.sandbox)?\.googleapis\.com$/ },
	{ provider: "github-copilot", host: /(^|\.)githubcopilot\.com$|^copilot-api\./ },
];

/** The host's environment overrules base URLs with these. */
const BASE_URL_VARIABLES = [
	"ANTHROPIC_BASE_URL",
	"AZURE_OPENAI_BASE_URL",
	"FOUNDRY_BASE_URL",
	"FUGU_BASE_URL",
	"KIMI_CODE_BASE_URL",
	"MOONSHOT_BASE_URL",
	"OPENAI_BASE_URL",
];

/** Why no deny can be put on this host; the message is shown to whoever asked. */
export class DenyRefused extends Error {}

export interface Plan {
	/** Providers whose rows have to be taken, with those rows. */
	readonly claims: ReadonlyMap<string, readonly Model[]>;
	readonly hosts: HostKeys;
}

/** The hosts that model requests go to. */
export class HostKeys {
	readonly #exact: ReadonlySet<string>;
	readonly #patterns: readonly RegExp[];

	constructor(exact: ReadonlySet<string>, patterns: readonly RegExp[]) {
		this.#exact = exact;
		this.#patterns = patterns;
	}

	get size(): number {
		return this.#exact.size + this.#patterns.length;
	}

	/** `host` with its port, as `URL.host` gives it. */
	has(host: string): boolean {
		return this.#exact.has(host) || this.#patterns.some(pattern => pattern.test(host));
	}
}

/** @throws {DenyRefused} when something in `rows` cannot be stopped. */
export function planFor(rows: readonly Model[], env: Record<string, string | undefined>): Plan {
	const claimed = new Set(rows.filter(row => isClaimed(row)).map(row => row.provider));
	const claims = new Map<string, Model[]>();
	const exact = new Set<string>();
	const patterns = new Map<string, RegExp>();
	for (const row of rows) {
		if (claimed.has(row.provider)) claims.set(row.provider, [...(claims.get(row.provider) ?? []), row]);
		else if (row.transport) {
			throw new DenyRefused(
				`the models of provider "${row.provider}" use a transport of their own ("${row.transport}"), which cannot be held back: remove it from the host's model configuration first`,
			);
		}
		addHost(row.baseUrl, exact, patterns);
		for (const { api, provider, host } of FAMILIES) {
			if (row.api === api || row.provider === provider) patterns.set(host.source, host);
		}
	}
	for (const name of BASE_URL_VARIABLES) addHost(env[name]?.trim(), exact, patterns);
	return { claims, hosts: new HostKeys(exact, [...patterns.values()]) };
}

/** Whether a row's request leaves by a door that fetch does not see; one that was taken before stays so. */
function isClaimed(row: Model): boolean {
	return row.api === DENY_API || LANES.some(isLane => isLane(row));
}

function addHost(url: string | undefined, exact: Set<string>, patterns: Map<string, RegExp>): void {
	if (!url) return;
	// A region or project may stand in the host as `{location}`.
	const template = /^[a-z]+:\/\/([^/?#]*\{[^/?#]*)/i.exec(url)?.[1];
	if (template !== undefined) {
		const parts = template.toLowerCase().split(/\{[^}]*\}/);
		const pattern = new RegExp(`^${parts.map(part => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("[a-z0-9-]+")}$`);
		patterns.set(pattern.source, pattern);
		return;
	}
	try {
		const { host } = new URL(url);
		if (host !== "") exact.add(host);
	} catch {
		// No request can go there.
	}
}
