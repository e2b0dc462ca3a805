import { expect, test } from "bun:test";
import { chmodSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

import { Installation } from "../environment.ts";

function setUp() {
	const directory = mkdtempSync(join(tmpdir(), "a2mcp-installed-"));
	const file = join(directory, "binary.json");
	const program = (name: string) => {
		const path = join(directory, name);
		writeFileSync(path, "#!/bin/sh\n");
		chmodSync(path, 0o755);
		return path;
	};
	const install = (binary: unknown) => writeFileSync(file, JSON.stringify({ binary }));
	return { installation: new Installation(directory), file, program, install };
}

test("without the file the last binary counts; a file that is there again wins", () => {
	const { installation, file, program, install } = setUp();
	expect(() => installation.binary()).toThrow("binary.json is missing: run `a2mcp install omp`");
	const first = program("first");
	install(first);
	expect(installation.binary()).toBe(first);
	rmSync(file);
	expect(installation.binary()).toBe(first);
	const second = program("second");
	install(second);
	expect(installation.binary()).toBe(second);
	rmSync(file);
	expect(installation.binary()).toBe(second);
});

test("a binary that is gone, and a file that names none, stay errors", () => {
	const { installation, file, program, install } = setUp();
	const binary = program("a2mcp");
	install(binary);
	installation.binary();
	for (const text of ["", "null", '{"binary": "relative/a2mcp"}', "{}"]) {
		writeFileSync(file, text);
		expect(() => installation.binary()).toThrow("run `a2mcp install omp`");
	}
	rmSync(file);
	expect(installation.binary()).toBe(binary);
	rmSync(binary);
	expect(() => installation.binary()).toThrow(`missing or not executable: ${binary}`);
});
