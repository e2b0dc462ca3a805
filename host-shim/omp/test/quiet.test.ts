import { expect, test } from "bun:test";

import type { Settings } from "@oh-my-pi/pi-coding-agent";

import { quieten } from "../quiet.ts";

/** Settings in layers, like omp's: `set` writes the config, an override masks it. */
class Layers {
	#configured = new Map<string, unknown>([
		["compaction.enabled", true],
		["retry.enabled", true],
	]);
	#overrides = new Map<string, unknown>();

	get(path: string): unknown {
		return this.#overrides.has(path) ? this.#overrides.get(path) : this.#configured.get(path);
	}
	set(path: string, value: unknown): void {
		this.#configured.set(path, value);
	}
	override(path: string, value: unknown): void {
		this.#overrides.set(path, value);
	}
	clearOverride(path: string): void {
		this.#overrides.delete(path);
	}
	/** omp's `setAutoCompactionEnabled` and `setAutoRetryEnabled`. */
	choose(path: string, value: boolean, persist: boolean): void {
		if (!persist) return this.override(path, value);
		this.set(path, value);
		this.clearOverride(path);
	}
}

function setUp(overridden?: unknown) {
	const settings = new Layers();
	if (overridden !== undefined) settings.override("compaction.enabled", overridden);
	const steps: (() => void)[] = [];
	const arm = () => quieten(settings as unknown as Settings, step => steps.push(step));
	const restore = () => {
		for (const step of steps.splice(0).reverse()) step();
	};
	arm();
	expect([settings.get("compaction.enabled"), settings.get("retry.enabled")]).toEqual([false, false]);
	return { settings, arm, restore, now: () => settings.get("compaction.enabled") };
}

for (const before of [undefined, true, false]) {
	for (const chosen of [true, false]) {
		for (const persist of [true, false]) {
			const how = `${chosen}${persist ? ", saved" : ""}, an override of ${before} before`;
			test(`what is chosen while it is held down stays (${how})`, () => {
				const { settings, restore, now } = setUp(before);
				settings.choose("compaction.enabled", chosen, persist);
				restore();
				expect([now(), settings.get("retry.enabled")]).toEqual([chosen, true]);
			});
		}
	}
}

test("what nobody touched is as before, and the settings have their own methods again", () => {
	const { settings, arm, restore, now } = setUp();
	expect(Object.keys(settings)).toEqual(["override", "clearOverride"]);
	restore();
	expect(now()).toBe(true);
	expect(Object.keys(settings)).toEqual([]);
	// A second time it is ours again, whoever had the last word before.
	arm();
	restore();
	expect(now()).toBe(true);
});

test("what is only written to the config shows at the end, as it would have without", () => {
	const { settings, restore, now } = setUp();
	settings.set("compaction.enabled", "later");
	expect(now()).toBe(false);
	restore();
	expect(now()).toBe("later");

	const masked = setUp("mine");
	masked.settings.set("compaction.enabled", "later");
	masked.restore();
	expect(masked.now()).toBe("mine");
});
