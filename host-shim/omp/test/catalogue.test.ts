import { expect, test } from "bun:test";

import type { AgentTool } from "@oh-my-pi/pi-agent-core";
import type { AgentSession, ToolInfo } from "@oh-my-pi/pi-coding-agent";

import { Catalogue, COMPARE_EVERY_MS } from "../catalogue.ts";

/** A session with a registry of its own; counts how often the whole list was rendered. */
class Registry {
	readonly tools = new Map<string, { tool: AgentTool; info: ToolInfo }>();
	rendered = 0;

	set(name: string, description = "", parameters: unknown = { type: "object" }): void {
		const tool: AgentTool = { name, execute: async () => ({ content: [] }) };
		this.tools.set(name, { tool, info: { name, description, parameters } });
	}

	get session(): AgentSession {
		return {
			getAllToolNames: () => [...this.tools.keys()],
			getAllToolInfos: () => {
				this.rendered += 1;
				return [...this.tools.values()].map(({ info }) => info);
			},
			getToolByName: (name: string) => this.tools.get(name)?.tool,
		} as unknown as AgentSession;
	}
}

function setUp() {
	const odd: string[] = [];
	const registry = new Registry();
	const catalogue = new Catalogue(
		({ parameters }) => parameters,
		name => odd.push(name),
	);
	return { registry, catalogue, odd };
}

test("the list is the registry, in its order, verbatim", () => {
	const { registry, catalogue } = setUp();
	registry.set("read", "Reads.", { type: "object", properties: { z: {}, a: {} } });
	registry.set("日本 語/x:y");
	expect(catalogue.fetch(registry.session, 0)).toBe(
		'{"tools":[{"name":"read","description":"Reads.","inputSchema":{"type":"object","properties":{"z":{},"a":{}}}},' +
			'{"name":"日本 語/x:y","description":"","inputSchema":{"type":"object"}}]}',
	);
	expect(catalogue.last).toContain('"read"');
});

test("nothing has changed before the first list was asked for", () => {
	const { registry, catalogue } = setUp();
	registry.set("read");
	expect(catalogue.changed(registry.session, 0)).toBe(false);
});

test("looking at an unchanged registry renders nothing", () => {
	const { registry, catalogue } = setUp();
	registry.set("read");
	catalogue.fetch(registry.session, 0);
	for (let now = 0; now < COMPARE_EVERY_MS; now += 250) expect(catalogue.changed(registry.session, now)).toBe(false);
	expect(registry.rendered).toBe(1);
});

test("an added, a removed and a replaced tool are seen at the next look", () => {
	const { registry, catalogue } = setUp();
	registry.set("read");
	catalogue.fetch(registry.session, 0);
	registry.set("bash");
	expect(catalogue.changed(registry.session, 1)).toBe(true);
	expect(catalogue.changed(registry.session, 2)).toBe(false);
	registry.tools.delete("read");
	expect(catalogue.changed(registry.session, 3)).toBe(true);
	registry.set("bash", "another");
	expect(catalogue.changed(registry.session, 4)).toBe(true);
});

test("a tool replaced by an equal one is no change", () => {
	const { registry, catalogue } = setUp();
	registry.set("read");
	catalogue.fetch(registry.session, 0);
	registry.set("read");
	expect(catalogue.changed(registry.session, 1)).toBe(false);
	expect(registry.rendered).toBe(2);
});

test("a description that renders differently is seen by the full comparison, or at once on a hint", () => {
	const { registry, catalogue } = setUp();
	registry.set("read", "one");
	catalogue.fetch(registry.session, 0);
	const info = registry.tools.get("read")?.info as ToolInfo;
	info.description = "two";
	expect(catalogue.changed(registry.session, 1)).toBe(false);
	expect(catalogue.changed(registry.session, COMPARE_EVERY_MS)).toBe(true);
	info.description = "three";
	catalogue.suspect();
	expect(catalogue.changed(registry.session, COMPARE_EVERY_MS + 1)).toBe(true);
});

test("one odd schema costs no other tool", () => {
	const { registry, catalogue, odd } = setUp();
	const circular: Record<string, unknown> = {};
	circular.self = circular;
	registry.set("odd", "", circular);
	registry.set("none", "", undefined);
	registry.set("read");
	const { tools } = JSON.parse(catalogue.fetch(registry.session, 0));
	expect(tools.map(({ name }: { name: string }) => name)).toEqual(["odd", "none", "read"]);
	expect(odd).toEqual(["odd"]);
});
