import { expect, test } from "bun:test";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";

const ROOT = join(import.meta.dir, "..");
const { files } = JSON.parse(readFileSync(join(ROOT, "package.json"), "utf8")) as { files: string[] };

test("package.json names exactly the files an installation needs", () => {
	const sources = readdirSync(ROOT).filter(name => name.endsWith(".ts") && !name.endsWith(".d.ts"));
	expect(files.toSorted()).toEqual(sources.toSorted());
});

test("the installed files import only each other, the host and built-ins, and never print", () => {
	for (const file of files) {
		const source = readFileSync(join(ROOT, file), "utf8");
		for (const [, from] of source.matchAll(/ from "([^"]+)"/g)) {
			const own = from?.startsWith("./") && files.includes(from.slice(2));
			expect(own || from?.startsWith("@oh-my-pi/") || from?.startsWith("node:"), `${file} imports ${from}`).toBe(true);
		}
		expect(source, file).not.toMatch(/\bconsole\.|process\.stdout/);
	}
});
