import { expect, test } from "bun:test";

import type { Model } from "@oh-my-pi/pi-ai";

import { DENY_API, DenyRefused, planFor } from "../deny-plan.ts";

const row = (provider: string, api: string, baseUrl?: string, more: Partial<Model> = {}): Model => ({
	provider,
	id: "m",
	api,
	...(baseUrl === undefined ? {} : { baseUrl }),
	...more,
});

test("only providers whose requests are no fetch are claimed, with all their rows", () => {
	const { claims } = planFor(
		[
			row("anthropic", "anthropic-messages", "https://api.anthropic.com"),
			row("anthropic", "openai-completions", "https://api.anthropic.com"),
			row("proxy", "anthropic-messages", "https://proxy.example"),
			row("openai-codex", "openai-codex-responses", "https://chatgpt.com/backend-api"),
			row("cursor", "cursor-agent", "https://api2.cursor.sh"),
			row("openai", "openai-responses", "https://api.openai.com/v1"),
		],
		{},
	);
	expect([...claims].map(([provider, rows]) => [provider, rows.length])).toEqual([
		["anthropic", 2],
		["openai-codex", 1],
		["cursor", 1],
	]);
});

test("what was claimed before stays claimed", () => {
	expect([...planFor([row("anthropic", DENY_API)], {}).claims.keys()]).toEqual(["anthropic"]);
});

test("a transport of its own is refused and named, but not on a claimed provider", () => {
	const native = row("gateway", "openai-completions", "https://g.example", { transport: "pi-native" });
	expect(() => planFor([native], {})).toThrow(DenyRefused);
	expect(() => planFor([native], {})).toThrow(/"gateway".*"pi-native"/);
	planFor([row("anthropic", "anthropic-messages", "https://api.anthropic.com", { transport: "pi-native" })], {});
});

test("hosts are those of the base URLs, ports and templates included", () => {
	const { hosts } = planFor(
		[
			row("a", "x", "https://API.example.com/v1/{project}/y"),
			row("b", "x", "http://127.0.0.1:1234/v1"),
			row("c", "x", "https://{location}-models.example.org/v1"),
			row("d", "x", "not a url"),
			row("e", "x", ""),
			row("f", "x"),
		],
		{ OPENAI_BASE_URL: " http://gateway:8080/v1 ", OTHER: "http://other" },
	);
	expect(hosts.size).toBe(4);
	for (const host of ["api.example.com", "127.0.0.1:1234", "eu-west1-models.example.org", "gateway:8080"]) {
		expect(hosts.has(host), host).toBe(true);
	}
	for (const host of ["127.0.0.1", "127.0.0.1:1", "example.com", "x.api.example.com", "evil.com-models.example.org", "other"]) {
		expect(hosts.has(host), host).toBe(false);
	}
});

test("hosts that are computed from a region or a token belong to their family", () => {
	const { hosts } = planFor(
		[
			row("amazon-bedrock", "bedrock-converse-stream", "https://bedrock-runtime.us-east-1.amazonaws.com"),
			row("google-vertex", "google-vertex", "https://{location}-aiplatform.googleapis.com"),
			row("azure", "azure-openai-responses"),
			row("github-copilot", "openai-responses", "https://api.individual.githubcopilot.com"),
			row("google-gemini-cli", "google-gemini-cli", "https://cloudcode-pa.googleapis.com"),
		],
		{},
	);
	for (const host of [
		"bedrock-runtime.eu-central-1.amazonaws.com",
		"aiplatform.googleapis.com",
		"europe-west4-aiplatform.googleapis.com",
		"aiplatform.eu.rep.googleapis.com",
		"mine.openai.azure.com",
		"api.business.githubcopilot.com",
		"daily-cloudcode-pa.sandbox.googleapis.com",
	]) {
		expect(hosts.has(host), host).toBe(true);
	}
	for (const host of ["s3.eu-central-1.amazonaws.com", "storage.googleapis.com", "github.com", "azure.com"]) {
		expect(hosts.has(host), host).toBe(false);
	}
});
