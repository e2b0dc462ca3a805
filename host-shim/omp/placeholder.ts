/**
 * A model for a host that has none. omp ends at once, headless, or refuses every prompt, when nothing
 * is configured; with this row it runs, the bridge with it, and a prompt ends in a connection failure.
 *
 * The row is offered while omp loads its extensions, which is early enough for a headless start. Once
 * the session is there it stays only where nothing else was found, under a source of its own; it never
 * takes the place of a real model, and makes room when one turns up. Everything is in memory: choosing
 * goes past omp's `setModel`, which notes the choice in its database.
 *
 * The host name is reserved (RFC 6761) and resolves nowhere. That it takes images makes omp's tools
 * return them as images.
 */

import * as fs from "node:fs";
import * as path from "node:path";

import type { Model } from "@oh-my-pi/pi-ai";
import type { AgentSession, ExtensionAPI, ProviderConfig } from "@oh-my-pi/pi-coding-agent";

export const PROVIDER = "a2mcp";
export const MODEL = "offline";
const SOURCE = "a2mcp-auto-model";

const CONFIG: ProviderConfig = {
	baseUrl: "http://a2mcp.invalid/v1",
	api: "anthropic-messages",
	apiKey: "not-a-real-key",
	models: [
		{
			id: MODEL,
			name: "a2mcp placeholder (unreachable)",
			reasoning: false,
			input: ["text", "image"],
			cost: { input: 0, output: 0, cacheRead: 0, cacheWrite: 0 },
			contextWindow: 100_000,
			maxTokens: 4_096,
		},
	],
};

export class Placeholder {
	readonly #agentDir: string;
	readonly #tell: (text: string) => void;
	readonly #fault: (error: unknown) => void;
	#wasOffered = false;
	/** The main session has nothing else. */
	#isInUse = false;
	#isTold = false;

	constructor(agentDir: string, tell: (text: string) => void, fault: (error: unknown) => void) {
		this.#agentDir = agentDir;
		this.#tell = tell;
		this.#fault = fault;
	}

	/** While omp loads this extension, for the main session or a sub-agent's. */
	offer(pi: ExtensionAPI): void {
		try {
			if (this.#wasOffered && !this.#isInUse) return;
			this.#wasOffered = true;
			// Somebody's own provider of that name would get our base URL.
			if (!this.#isNameTaken()) pi.registerProvider(PROVIDER, CONFIG);
		} catch (error) {
			this.#fault(error);
		}
	}

	/** At each `session_start`: `session` is Main's, when there is one. */
	sessionStarted(session: AgentSession | undefined): void {
		try {
			if (session && !this.#isNameTaken()) this.#fill(session);
		} catch (error) {
			this.#fault(error);
		}
	}

	#fill(session: AgentSession): void {
		const registry = session.modelRegistry;
		this.#isInUse = isEmpty(session);
		if (this.#isInUse) {
			if (!registry.find(PROVIDER, MODEL)) registry.registerProvider(PROVIDER, CONFIG, SOURCE);
			const row = registry.find(PROVIDER, MODEL);
			if (!session.agent.state.model && row) session.agent.setModel(row);
			if (!this.#isTold) {
				this.#isTold = true;
				this.#tell(
					`a2mcp: no model is configured, so the placeholder ${PROVIDER}/${MODEL} was selected; it reaches nothing. Choose one with /login or /model.`,
				);
			}
		}
		// What a registry finds while its rows are changed is lost: not before omp's own search is over.
		const searched = registry.awaitInitialBackgroundRefresh?.() ?? Promise.resolve();
		searched.then(() => this.#settle(session)).catch(this.#fault);
	}

	/** omp has looked for local and listed models too: what there is goes first. */
	#settle(session: AgentSession): void {
		const registry = session.modelRegistry;
		if (isEmpty(session)) {
			const isReal = (row: Model) => row.provider !== PROVIDER && registry.hasConcreteAuth(row.provider);
			const found = registry.getAvailable().find(isReal);
			if (!found) {
				// Under our own source: what others register and clear does not touch it.
				registry.registerProvider(PROVIDER, CONFIG, SOURCE);
				return;
			}
			session.agent.setModel(found);
			this.#tell(`a2mcp: ${found.provider}/${found.id} was found and takes the placeholder's place.`);
		}
		this.#isInUse = false;
		if (registry.find(PROVIDER, MODEL)) registry.unregisterProvider(PROVIDER);
	}

	/** A provider of this name in the operator's own files: they know what they want. */
	#isNameTaken(): boolean {
		return ["models.yml", "models.yaml", "models.json", "models.jsonc"].some(name => {
			try {
				const text = fs.readFileSync(path.join(this.#agentDir, name), "utf8");
				return new RegExp(`^[ \\t{,]*["']?${PROVIDER}["']?[ \\t]*:`, "m").test(text);
			} catch {
				return false;
			}
		});
	}
}

/** It has no model, or only the placeholder. */
function isEmpty(session: AgentSession): boolean {
	const row = session.agent.state.model;
	return row === undefined || (row.provider === PROVIDER && row.id === MODEL);
}
