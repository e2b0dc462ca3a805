/**
 * What the shim needs to know of this machine: the agent directory, the sidecar's binary, the
 * start log, this process's identity. Reads files and the environment; decides nothing.
 */

import * as fs from "node:fs";
import { homedir } from "node:os";
import * as path from "node:path";

/** Why no sidecar can be started at all; the message tells what to do. */
export class NotInstalled extends Error {}

/**
 * Where the sidecar's binary is. `binary.json` is read at each start: a new installation acts at the
 * next one. Without the file the path it named last counts: an uninstalled bridge lasts as long as
 * the host that runs.
 */
export class Installation {
	readonly #file: string;
	#last: string | undefined;

	/** `dir`: where `binary.json` is. */
	constructor(dir: string) {
		this.#file = path.join(dir, "binary.json");
	}

	/** Throws {@link NotInstalled}. */
	binary(): string {
		const binary = this.#named();
		try {
			fs.accessSync(binary, fs.constants.X_OK);
			if (!fs.statSync(binary).isFile()) throw new Error("no file");
		} catch {
			throw new NotInstalled(`the a2mcp binary is missing or not executable: ${binary}: run \`a2mcp install omp\``);
		}
		return binary;
	}

	#named(): string {
		const file = this.#file;
		let binary: unknown;
		try {
			binary = (JSON.parse(fs.readFileSync(file, "utf8")) as { binary?: unknown } | null)?.binary;
		} catch (error) {
			const missing = (error as NodeJS.ErrnoException).code === "ENOENT";
			if (missing && this.#last !== undefined) return this.#last;
			throw new NotInstalled(`${file} ${missing ? "is missing" : "cannot be read"}: run \`a2mcp install omp\``);
		}
		if (typeof binary !== "string" || !path.isAbsolute(binary)) {
			throw new NotInstalled(`${file} names no absolute path of the a2mcp binary: run \`a2mcp install omp\``);
		}
		this.#last = binary;
		return binary;
	}
}

/**
 * The log of the sidecar's first steps. A file, never a pipe: a sidecar must be able to write
 * whoever reads. Truncated at the first start of a host process; the sidecar moves to a log of
 * its own once it serves.
 */
export class StartLog {
	readonly #file: string;
	#truncate = true;
	#from = 0;

	constructor(agentDir: string) {
		this.#file = path.join(agentDir, "a2mcp.start.stderr");
	}

	/** A descriptor for the next sidecar (the caller closes it), or `ignore` when there can be none. */
	open(): number | "ignore" {
		const { O_WRONLY, O_CREAT, O_APPEND, O_TRUNC, O_NOFOLLOW } = fs.constants;
		try {
			const flags = O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | (this.#truncate ? O_TRUNC : 0);
			const fd = fs.openSync(this.#file, flags, 0o600);
			fs.fchmodSync(fd, 0o600);
			this.#truncate = false;
			this.#from = fs.fstatSync(fd).size;
			return fd;
		} catch {
			return "ignore";
		}
	}

	/** The last line written since {@link StartLog.open}: most often the reason of a failed start. */
	lastLine(): string | undefined {
		try {
			const fd = fs.openSync(this.#file, "r");
			try {
				const end = fs.fstatSync(fd).size;
				const start = Math.max(this.#from, end - 4096);
				const tail = Buffer.alloc(Math.max(0, end - start));
				const read = fs.readSync(fd, tail, 0, tail.length, start);
				const lines = tail.toString("utf8", 0, read).split("\n");
				return lines.map(line => line.trim()).findLast(line => line !== "");
			} finally {
				fs.closeSync(fd);
			}
		} catch {
			return undefined;
		}
	}
}

/** This process, as `bridge/hello` names it. */
export interface HostIdentity {
	readonly name: "omp";
	readonly version: string;
	readonly pid: number;
	/** Field 22 of `/proc/self/stat`: with the pid it names this process and no later one. */
	readonly startTime?: number;
	readonly cwd: string;
	readonly home: string;
}

export function hostIdentity(version: string): HostIdentity {
	const startTime = ownStartTime();
	return {
		name: "omp",
		version,
		pid: process.pid,
		...(startTime === undefined ? {} : { startTime }),
		cwd: workingDirectory(),
		home: homedir(),
	};
}

function ownStartTime(): number | undefined {
	try {
		const stat = fs.readFileSync("/proc/self/stat", "latin1");
		// Field 2 is the program's name in parentheses and may hold anything; count from its end.
		const ticks = Number(stat.slice(stat.lastIndexOf(")") + 2).split(" ")[19]);
		return Number.isSafeInteger(ticks) && ticks > 0 ? ticks : undefined;
	} catch {
		return undefined;
	}
}

function workingDirectory(): string {
	try {
		return process.cwd();
	} catch {
		return homedir();
	}
}
