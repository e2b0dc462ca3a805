/**
 * The list of tools as the sidecar serves it: the registry of the Main session, verbatim.
 *
 * Fetching it renders every description (0.5 ms and more), so it happens when something changed
 * and never per call. The host has no event for "the tools changed": a cheap look (names, and the
 * identity of each tool object) several times a second finds additions, removals and replacements;
 * a full comparison every few seconds finds the rest (a description that renders differently).
 * The host's partial signals only ask for a full comparison sooner.
 */

import type { AgentTool } from "@oh-my-pi/pi-agent-core";
import type { AgentSession, ToolInfo } from "@oh-my-pi/pi-coding-agent";

export const LOOK_EVERY_MS = 250;
export const COMPARE_EVERY_MS = 5_000;

/** JSON Schema of a tool's parameters. */
export type SchemaOf = (tool: ToolInfo) => unknown;

export class Catalogue {
	readonly #schemaOf: SchemaOf;
	readonly #odd: (tool: string, error: unknown) => void;
	#names = "";
	#tools: (AgentTool | undefined)[] = [];
	#json: string | undefined;
	#comparedAt = 0;
	#suspect = false;

	/** `odd` hears of a tool that cannot be listed as it is: one odd schema must not cost the others. */
	constructor(schemaOf: SchemaOf, odd: (tool: string, error: unknown) => void) {
		this.#schemaOf = schemaOf;
		this.#odd = odd;
	}

	/** The last list, as the text of a `tools/list` result. */
	get last(): string | undefined {
		return this.#json;
	}

	/** Something hints at a change: the next look compares in full. */
	suspect(): void {
		this.#suspect = true;
	}

	/** The list as it is now, as the text of a `tools/list` result. */
	fetch(session: AgentSession, now: number): string {
		this.#remember(session);
		this.#comparedAt = now;
		this.#suspect = false;
		const tools = session.getAllToolInfos().flatMap(info => this.#entry(info));
		this.#json = `{"tools":[${tools.join(",")}]}`;
		return this.#json;
	}

	/** True when the list differs from the last one fetched. */
	changed(session: AgentSession, now: number): boolean {
		if (this.#json === undefined) return false;
		if (!this.#suspect && now - this.#comparedAt < COMPARE_EVERY_MS && !this.#differs(session)) return false;
		const before = this.#json;
		return this.fetch(session, now) !== before;
	}

	#differs(session: AgentSession): boolean {
		const names = session.getAllToolNames();
		return names.join("\n") !== this.#names || names.some((name, i) => session.getToolByName(name) !== this.#tools[i]);
	}

	#remember(session: AgentSession): void {
		const names = session.getAllToolNames();
		this.#names = names.join("\n");
		this.#tools = names.map(name => session.getToolByName(name));
	}

	#entry(info: ToolInfo): string[] {
		const { name } = info;
		let description = "";
		try {
			description = info.description ?? "";
			return [JSON.stringify({ name, description, inputSchema: this.#schemaOf(info) ?? {} })];
		} catch (error) {
			this.#odd(String(name), error);
			return typeof name === "string" ? [JSON.stringify({ name, description, inputSchema: {} })] : [];
		}
	}
}
