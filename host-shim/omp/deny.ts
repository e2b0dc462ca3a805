/**
 * The deny on the host's model requests, put on and taken off as a whole.
 *
 * ```text
 *   process   deny api · tripwire on fetch
 *   session   rows of providers that bypass fetch · credentials · quiet settings · the agent's own row
 * ```
 *
 * Everything is done in one turn of the event loop, so no request falls into a gap. Whatever fails
 * while it is put on takes back what was done before: a half deny would answer "restored" and leave
 * the host without a model. What cannot be stopped is found out before anything is touched.
 */

import type { Model } from "@oh-my-pi/pi-ai";
import type { AgentSession, ModelRegistry } from "@oh-my-pi/pi-coding-agent";

import { denied, isDenied, NO_KEY, registerDenyApi, unregisterDenyApi, withholdCredentials } from "./deny-api.ts";
import { DENY_API, DenyRefused, type Plan, planFor } from "./deny-plan.ts";
import { quieten } from "./quiet.ts";
import { Tripwire } from "./tripwire.ts";

/** A provider's state of pi-ai that may send a request by itself: the keep-alive of a prompt cache. */
const CACHE_KEEPER = "anthropic-cache-refresh";
/** Where a row without a base URL leads; never reached. */
const NOWHERE = "http://a2mcp.invalid/v1";

/** What was put on one session. */
interface Fitted {
	readonly session: AgentSession;
	readonly registry: ModelRegistry;
	/** How to take it off, newest last. */
	readonly undo: (() => void)[];
	/** What the claimed providers served before, by provider. */
	readonly before: Map<string, string>;
	/** The agent's row and the copy that stands in its place. */
	row: { real: Model; copy: Model } | undefined;
}

export class Deny {
	readonly #denied: () => void;
	readonly #log: (line: string) => void;
	readonly #tripwire: Tripwire;
	#isWired = false;
	#fitted: Fitted | undefined;

	/** `denied` is told of each refused request. */
	constructor(denied: () => void, log: (line: string) => void) {
		this.#denied = denied;
		this.#log = log;
		this.#tripwire = new Tripwire(denied);
	}

	/**
	 * Puts the deny on `session`, or completes it there; returns what there is to log. When it throws,
	 * the process is as it was: without anything, or, when a deny was on before, with its tripwire.
	 */
	arm(session: AgentSession): string {
		const registry = session.modelRegistry;
		// Refusals come first: a session that cannot be denied must not cost the tripwire.
		let plan = planFor(registry.getAll(), process.env);
		const wasWired = this.#isWired;
		try {
			this.#wire(plan);
			if (this.#fitted && (this.#fitted.session !== session || this.#fitted.registry !== registry)) {
				this.#release();
				// The registry may be the same one, which serves its own rows again.
				plan = planFor(registry.getAll(), process.env);
			}
			this.#fit(session, plan);
		} catch (error) {
			this.#release();
			if (!wasWired) this.#unwire();
			throw error;
		}
		const names = [...plan.claims.keys()];
		const row = this.#fitted?.row?.real;
		return (
			`takeover armed: ${names.length} provider(s) shadowed (${names.join(", ") || "none"}), ` +
			`${plan.hosts.size} tripwire key(s), model pushed: ${row ? `${row.provider}/${row.id}` : "none"}`
		);
	}

	/**
	 * Takes everything off. `sessions` are those that may hold a denied row which they took from a
	 * registry meanwhile. What could not be undone, and which providers did not come back, is logged.
	 */
	restore(sessions: Iterable<AgentSession>): void {
		this.#release();
		this.#unwire();
		for (const session of sessions) {
			try {
				giveBackRow(session);
			} catch (error) {
				this.#log(`takeover restore: a session keeps a denied model: ${error}`);
			}
		}
	}

	#wire(plan: Plan): void {
		this.#isWired = true;
		registerDenyApi(this.#denied);
		this.#tripwire.install(plan.hosts);
	}

	#unwire(): void {
		this.#isWired = false;
		this.#tripwire.remove();
		unregisterDenyApi();
	}

	#fit(session: AgentSession, plan: Plan): void {
		const registry = session.modelRegistry;
		let fitted = this.#fitted;
		if (!fitted) {
			fitted = { session, registry, undo: [], before: new Map(), row: undefined };
			this.#fitted = fitted;
			fitted.undo.push(withholdCredentials(registry));
			const { undo } = fitted;
			quieten(session.settings, step => undo.push(step));
		}
		for (const [provider, rows] of plan.claims) claim(fitted, provider, rows);
		session.agent.providerSessionState?.get(CACHE_KEEPER)?.close();
		const real = session.agent.state.model;
		if (real && !isDenied(real)) pushRow(fitted, real);
	}

	/** Takes the deny off the session it is on. */
	#release(): void {
		const fitted = this.#fitted;
		this.#fitted = undefined;
		if (!fitted) return;
		for (const undo of fitted.undo.reverse()) {
			try {
				undo();
			} catch (error) {
				this.#log(`takeover restore: a step failed: ${error}`);
			}
		}
		this.#check(fitted).catch(error => this.#log(`takeover restore: the providers could not be checked: ${error}`));
	}

	/**
	 * Names the claimed providers that do not serve what they did. The host forgets with a claim what it
	 * had found by asking the provider, and remembers that from its cache; an extension's own rows under
	 * such a name do not come back.
	 */
	async #check({ registry, before }: Fitted): Promise<void> {
		const lost = () => [...before].filter(([provider, rows]) => served(registry, provider) !== rows);
		for (const [provider] of lost()) await registry.refreshProvider?.(provider, "offline");
		const names = lost().map(([provider]) => provider);
		// A deny that was put on again meanwhile has its own account.
		if (names.length === 0 || this.#fitted) return;
		this.#log(
			`takeover restore left ${names.length} provider(s) not serving their pre-arm rows (${names.join(", ")})`,
		);
	}
}

/** Puts denied rows in the place of a provider's own. */
function claim(fitted: Fitted, provider: string, rows: readonly Model[]): void {
	if (rows.every(isDenied)) return;
	const { registry, before, undo } = fitted;
	if (!before.has(provider)) {
		before.set(provider, signature(rows));
		undo.push(() => registry.unregisterProvider(provider));
	}
	// Without a source: omp drops the registrations of every source that is no extension's path at the
	// next session it builds.
	registry.registerProvider(provider, {
		baseUrl: rows.find(row => row.baseUrl)?.baseUrl ?? NOWHERE,
		apiKey: NO_KEY,
		api: DENY_API,
		models: rows.map(row => ({
			id: row.id,
			name: row.name,
			api: DENY_API,
			baseUrl: row.baseUrl || NOWHERE,
			reasoning: row.reasoning,
			thinking: row.thinking,
			input: row.input,
			cost: row.cost,
			contextWindow: row.contextWindow,
			maxTokens: row.maxTokens,
		})),
	});
	const left = registry.getAll().find(row => row.provider === provider && (!isDenied(row) || row.transport));
	if (left) throw new DenyRefused(`the host keeps its own row of ${provider}/${left.id}`);
}

function pushRow(fitted: Fitted, real: Model): void {
	const { session, undo } = fitted;
	const isFirst = fitted.row === undefined;
	const row = { real, copy: denied(real) };
	fitted.row = row;
	if (isFirst) {
		undo.push(() => {
			// Another model the operator chose meanwhile stays.
			if (fitted.row && session.agent.state.model === fitted.row.copy) session.agent.setModel(fitted.row.real);
		});
	}
	session.agent.setModel(row.copy);
}

/** A session that took a denied row from a registry, by choosing a model meanwhile, gets the real one. */
function giveBackRow(session: AgentSession): void {
	const row = session.agent.state.model;
	if (!row || !isDenied(row)) return;
	const real = session.modelRegistry.find(row.provider, row.id);
	if (real && !isDenied(real)) session.agent.setModel(real);
}

function served(registry: ModelRegistry, provider: string): string {
	return signature(registry.getAll().filter(row => row.provider === provider));
}

/** Which models, asked how and where. */
function signature(rows: readonly Model[]): string {
	return rows
		.map(row => `${row.id}\n${row.api}\n${row.baseUrl ?? ""}`)
		.sort()
		.join("\n");
}
