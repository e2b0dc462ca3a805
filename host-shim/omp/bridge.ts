/**
 * One host process's bridge: starts the sidecar, keeps it alive, answers its requests, and ends it
 * with the Main session (contract 15 and 17).
 *
 * This is the driver: when to start again is decided in `supervisor.ts`, what a call does in
 * `calls.ts`, what the list says in `catalogue.ts`. An event of a sidecar that is not the current
 * one changes nothing.
 */

import { randomBytes } from "node:crypto";
import * as fs from "node:fs";

import type { AgentSession, ExtensionContext, ToolInfo } from "@oh-my-pi/pi-coding-agent";

import { Calls } from "./calls.ts";
import { Catalogue, LOOK_EVERY_MS } from "./catalogue.ts";
import { hostIdentity, Installation, NotInstalled, StartLog } from "./environment.ts";
import type { HostLlmNews, HostLlmState, HostLlmStatus } from "./host-llm.ts";
import { type Ended, Link, type LinkHandlers, type RequestId, RequestFailed } from "./link.ts";
import { type Level, levelOf, Notices, oneLine } from "./notices.ts";
import { messageOf } from "./outcome.ts";
import {
	afterEnding,
	afterHello,
	firstPulse,
	type GoodbyeReason,
	NO_HISTORY,
	onTick,
	PING_EVERY_MS,
	type Verdict,
} from "./supervisor.ts";

const PROTOCOL = 1;
const FEATURES = ["approvals", "hostLlm"];
/** A `session_shutdown` handler is cut at 2 s; calls get this much of it, the rest is for closing. */
const STOP_GRACE_MS = 1_500;
const STOP_ANSWER_MS = 1_700;
const STOP_EXIT_MS = 150;
/** An operator's command may open a tunnel, which has a minute for it. */
const COMMAND_MS = 120_000;
/** How long `/a2mcp restart` waits to say how it went. */
const RESTART_MS = 20_000;
/** Log lines and refusals that may wait for the next sidecar. */
const UNTOLD = 64;
/** Bytes that arrived before a tick are read before the tick is judged. */
const READ_FIRST_MS = 20;

/** JSON-RPC error codes of a hello that no retry cures. */
const REFUSED = new Set([-32001, -32002]);

export type Phase = "starting" | "running" | "pausing" | "stopping" | "stopped" | "refused" | "failed";

/** What the bridge needs of the process it lives in. */
export interface Host {
	readonly agentDir: string;
	readonly version: string;
	/** Where these files are, `binary.json` beside them. */
	readonly directory: string;
	liveMain(): AgentSession | undefined;
	onRegistryChange(changed: () => void): () => void;
	schemaOf(tool: ToolInfo): unknown;
	/** The switch on the host's own model requests. */
	readonly hostLlm: Switch;
	log(message: string, context: Record<string, unknown>): void;
}

/** What the bridge needs to know of that switch. */
export interface Switch {
	readonly state: HostLlmState;
	readonly status: HostLlmStatus;
	/** Throws with the reason when it cannot be done. */
	switch(enabled: boolean): HostLlmStatus;
	sessionStarted(): void;
	tell(news: HostLlmNews): void;
}

/** What a sidecar said of itself in its hello. */
interface Served {
	readonly url: string;
	readonly port: number;
	readonly tokenPrefix: string;
	readonly version: string;
}

/** What is known of the current sidecar besides its link. */
interface Current {
	readonly link: Link;
	served: boolean;
	goodbye: GoodbyeReason | undefined;
	/** The message of a hello answered with an error. */
	error: string | undefined;
	refused: boolean;
	/** `tools/list` requests that wait for a live Main. */
	readonly listRequests: RequestId[];
	/** A deny of the config that waits for the first session. */
	readonly switchRequests: { id: RequestId; enabled: boolean }[];
	/** `list_changed` was sent and the list not asked for since. */
	changeTold: boolean;
	/** The last `bridge/state` sent. */
	state: string;
}

/** The answer to what the operator typed. */
export interface Reply {
	readonly text: string;
	readonly level: Level;
}

export class Bridge {
	readonly #host: Host;
	readonly #instance = randomBytes(16).toString("hex");
	readonly #installation: Installation;
	readonly #log: StartLog;
	readonly #notices = new Notices();
	readonly #catalogue: Catalogue;
	readonly #calls: Calls;
	readonly #skipped = new Map<string, number>();

	#phase: Phase = "stopped";
	#why = "it was not started";
	#current: Current | undefined;
	#history = NO_HISTORY;
	/** The last sidecar that served; survives its death. */
	#served: Served | undefined;
	/** A death to tell of once the next one serves. */
	#incident: { cause: string; often: boolean } | undefined;
	/** The config's word on the host's model requests was asked for: it counts once per process. */
	#startSwitched = false;
	/** For the next sidecar that serves: log lines, refusals of a deny that was on. */
	readonly #untold: { method: string; params: object }[] = [];
	/** The operator asked for this start and waits for the answer. */
	#startAsked = false;
	#pause: Timer | undefined;
	#stopping: Promise<void> | undefined;
	/** Woken at each change of phase. */
	#phaseChanged: (() => void)[] = [];

	/** The first `session_start`: its owner and its context. Cleared when its Main has ended. */
	#first: { owner: object; context: ExtensionContext } | undefined;
	/** The start was judged: a live Main was there and the endpoint was announced. */
	#judged = false;
	#mainEnded = false;
	/** A new Main came while the bridge was stopping for the end of the one before. */
	#startAgain = false;
	#watched: { session: AgentSession; unsubscribe: () => void } | undefined;
	#lagMs = 0;
	#lookDueAt = 0;

	constructor(host: Host) {
		this.#host = host;
		this.#installation = new Installation(host.directory);
		this.#log = new StartLog(host.agentDir);
		this.#catalogue = new Catalogue(
			tool => host.schemaOf(tool),
			(tool, error) => host.log("a tool's schema cannot be listed", { tool, error: messageOf(error) }),
		);
		this.#calls = new Calls({
			main: () => {
				const session = host.liveMain();
				return session && this.#first ? { session, context: this.#first.context } : undefined;
			},
			link: () => this.#servingLink(),
			approvalsChanged: () => this.#tellState(),
			asked: (tool, asker) =>
				this.#notices.tell(`a2mcp: "${oneLine(tool, 80)}", asked by ${asker}, waits for your approval`, "info"),
			abandoned: (tool, reason) =>
				this.#notices.tell(
					`a2mcp: the remote call of "${oneLine(tool, 80)}" that waits for your approval has ended (${reason}). Deny it.`,
					"warning",
				),
			fault: (where, error) => this.#fault(where, error),
		});
		host.hostLlm.tell({
			changed: () => this.#tellState(),
			log: text => this.#tellLater("bridge/log", { text }),
			degraded: reason => {
				this.#tellLater("bridge/hostLlmRefused", { error: reason });
				this.#notices.tell(
					`a2mcp: the deny on this host's model requests could not be put on the new session (${oneLine(reason)}); only the tripwire holds`,
					"warning",
				);
			},
		});
		host.onRegistryChange(() => this.#quietly("registry", () => this.#mainMayHaveChanged()));
		this.#lookDueAt = performance.now() + LOOK_EVERY_MS;
		setInterval(() => this.#quietly("look", () => this.#look()), LOOK_EVERY_MS).unref();
		this.#start();
	}

	// ── what the extension's events mean ─────────────────────────────────────────────────────────

	/** `owner` is the extension instance the event came over: sub-agents have others. */
	sessionStarted(owner: object, context: ExtensionContext): void {
		this.#quietly("host model requests", () => this.#host.hostLlm.sessionStarted());
		if (this.#first) return;
		this.#first = { owner, context };
		this.#notices.belongTo(context.ui);
		if (this.#mainEnded && this.#host.liveMain()) {
			// A later Main of the same process (ACP): a life of its own, announced like the first.
			this.#mainEnded = false;
			this.#judged = false;
			if (this.#phase === "stopped") this.#start();
			else this.#startAgain = this.#phase === "stopping";
		}
		this.#answerLists();
		this.#answerSwitches();
		this.#tellState();
		this.#judge();
	}

	/** Something the operator should know; it waits for the first session. */
	notice(text: string): void {
		this.#notices.tell(text, "info");
	}

	/** Resolves within the host's limit for this event. */
	async sessionShutDown(owner: object): Promise<void> {
		// Omp unregisters Main only after this event: its own context's end counts as Main's.
		if (this.#first?.owner === owner) await this.#endWithMain();
		else if (this.#judged && !this.#host.liveMain()) await this.#endWithMain();
	}

	approvalRequested(toolCallId: string): void {
		this.#calls.approvalRequested(toolCallId);
	}

	approvalResolved(toolCallId: string): void {
		this.#calls.approvalResolved(toolCallId);
	}

	/** Something hints at a changed list of tools. */
	toolsMayHaveChanged(): void {
		this.#catalogue.suspect();
	}

	/** What the operator typed after `/a2mcp`. */
	async command(argv: string[]): Promise<Reply> {
		const current = this.#current;
		const isRestart = argv.length === 1 && argv[0] === "restart";
		if (this.#phase === "running" && current) {
			try {
				const answer = await within(COMMAND_MS, current.link.request("bridge/command", { argv }));
				const { text, level } = (answer ?? {}) as { text?: unknown; level?: unknown };
				return { text: typeof text === "string" ? text : "done", level: levelOf(level) };
			} catch (error) {
				// A restart may overtake its own answer.
				if (isRestart && this.#current !== current) return this.#settledReply();
				return { text: `a2mcp: ${messageOf(error)}`, level: "error" };
			}
		}
		if (!isRestart) return this.#ownStatus();
		if (this.#phase === "stopping") await this.#stopping;
		if (this.#phase !== "starting") {
			this.#history = NO_HISTORY;
			this.#startAsked = true;
			this.#start();
		}
		const reply = await this.#settledReply();
		this.#startAsked = false;
		return reply;
	}

	// ── the life of a sidecar ────────────────────────────────────────────────────────────────────

	#start(): void {
		clearTimeout(this.#pause);
		this.#setPhase("starting");
		let link: Link;
		try {
			link = this.#spawn();
		} catch (error) {
			const reason = messageOf(error);
			// One that served before may just be being replaced: the policy tries again.
			if (error instanceof NotInstalled && !this.#served) return this.#fail("failed", reason);
			return this.#act(
				afterEnding(this.#history, { served: false, code: null, signal: null, asked: false, at: performance.now() }),
				reason,
			);
		}
		const current: Current = {
			link,
			served: false,
			goodbye: undefined,
			error: undefined,
			refused: false,
			listRequests: [],
			switchRequests: [],
			changeTold: false,
			state: "",
		};
		this.#current = current;
		link
			.request("bridge/hello", {
				protocol: PROTOCOL,
				instance: this.#instance,
				features: FEATURES,
				capabilities: { tools: { listChanged: true } },
				host: hostIdentity(this.#host.version),
				...(this.#served ? { resume: { port: this.#served.port } } : {}),
				inFlight: this.#calls.inFlight(),
			})
			.then(
				result => this.#helloAnswered(current, result),
				error => this.#helloRefused(current, error),
			)
			.catch(error => this.#fault("hello", error));
		link.ended.then(ended => this.#ended(current, ended)).catch(error => this.#fault("end", error));
		this.#watchPulse(current);
	}

	#spawn(): Link {
		const binary = this.#installation.binary();
		const stderr = this.#log.open();
		try {
			return new Link([binary, "sidecar", "--agent-dir", this.#host.agentDir], stderr, this.#handlers);
		} finally {
			if (typeof stderr === "number") fs.closeSync(stderr);
		}
	}

	#helloAnswered(current: Current, result: unknown): void {
		if (current !== this.#current) return;
		const { protocol, url, port, tokenPrefix, version } = (result ?? {}) as Record<string, unknown>;
		if (protocol !== PROTOCOL || typeof url !== "string" || typeof port !== "number") {
			current.refused = true;
			current.error = `it speaks another protocol (${oneLine(JSON.stringify(protocol) ?? "none")}): run \`a2mcp install omp\``;
			return current.link.kill(current.error);
		}
		const before = this.#served;
		current.served = true;
		this.#served = {
			url,
			port,
			tokenPrefix: typeof tokenPrefix === "string" ? tokenPrefix.slice(0, 6) : "",
			version: typeof version === "string" ? version : "",
		};
		this.#history = afterHello(this.#history);
		if (this.#phase !== "stopping") this.#setPhase("running");
		this.#calls.deliverAgain(current.link);
		this.#tellState();
		this.#tellUntold();
		this.#answerLists();
		if (this.#incident) this.#tellIncident(this.#incident, before);
		this.#incident = undefined;
		this.#judge();
	}

	#helloRefused(current: Current, error: unknown): void {
		if (current !== this.#current || !(error instanceof RequestFailed) || error.code === undefined) return;
		current.error = error.message;
		current.refused = REFUSED.has(error.code);
		// It ends by itself; one that does not is no use.
		setTimeout(() => current.link.kill("its hello failed"), 2_000).unref();
	}

	#ended(current: Current, ended: Ended): void {
		if (current !== this.#current) return;
		this.#current = undefined;
		const cause = ended.reason ?? (ended.signal === null ? `exit code ${ended.code}` : `signal ${ended.signal}`);
		const asked = this.#phase === "stopping";
		this.#host.log("sidecar ended", { cause, goodbye: current.goodbye, served: current.served, cut: ended.cut });
		const verdict = afterEnding(this.#history, {
			served: current.served,
			code: ended.code,
			signal: ended.signal,
			goodbye: current.goodbye,
			refusal: current.refused ? (current.error ?? cause) : undefined,
			asked,
			at: performance.now(),
		});
		// Its reason: what it answered, else what it last wrote, else how it ended.
		const reason = current.error ?? (current.served ? undefined : this.#log.lastLine()) ?? cause;
		if (verdict.next === "start" && verdict.incident) this.#incident = { cause, often: verdict.incident === "often" };
		this.#act(verdict, reason);
	}

	#act(verdict: Verdict, reason: string): void {
		this.#history = verdict.history;
		switch (verdict.next) {
			case "start": {
				this.#why = `it stopped (${oneLine(reason)}) and is started again`;
				if (verdict.afterMs === 0) return this.#start();
				this.#setPhase("pausing");
				this.#pause = setTimeout(() => {
					if (this.#phase === "pausing") this.#quietly("start", () => this.#start());
				}, verdict.afterMs);
				this.#pause.unref();
				return;
			}
			case "stopped": {
				// The port, the keeper and the calls' callers are gone with it: the next start is a first one.
				this.#served = undefined;
				if (this.#phase !== "stopping") {
					this.#why = "it was stopped by the operator";
					this.#notices.tell("a2mcp: the bridge was stopped. /a2mcp restart starts it again.", "info");
				}
				this.#setPhase("stopped");
				if (this.#startAgain) this.#start();
				this.#startAgain = false;
				return;
			}
			case "refused":
			case "failed":
				return this.#fail(verdict.next, reason);
		}
	}

	#fail(phase: "failed" | "refused", reason: string): void {
		this.#incident = undefined;
		this.#why = oneLine(reason);
		this.#setPhase(phase);
		const what = phase === "refused" ? "the bridge refused to start" : "the bridge cannot be started";
		// Whoever asked for the start gets this as the answer.
		if (!this.#startAsked) this.#notices.tell(`a2mcp: ${what}: ${this.#why}. /a2mcp restart tries again.`, "error");
	}

	#tellIncident({ cause, often }: { cause: string; often: boolean }, before: Served | undefined): void {
		const now = this.#served;
		if (often) {
			this.#notices.tell(
				`a2mcp: the bridge stopped unexpectedly (${oneLine(cause)}) again; from now on it is restarted after a pause of 1 s. \`a2mcp logs\` shows why.`,
				"warning",
			);
			return;
		}
		const where = before && now?.url === before.url ? "URL and sessions are unchanged" : `its URL is now ${now?.url}`;
		this.#notices.tell(`a2mcp: the bridge stopped unexpectedly (${oneLine(cause)}) and was restarted; ${where}`, "warning");
	}

	/** One ping per tick; three without a byte in return mean that the sidecar hangs. */
	#watchPulse(current: Current): void {
		let pulse = firstPulse(performance.now());
		let seen = 0;
		const judge = (now: number) => {
			if (current !== this.#current) return;
			const heard = current.link.bytesRead !== seen;
			seen = current.link.bytesRead;
			const verdict = onTick(pulse, now, heard);
			pulse = verdict.pulse;
			if (verdict.hung) current.link.kill("it did not answer for 15 s");
			else void current.link.request("bridge/ping", {});
		};
		const timer = setInterval(() => {
			const now = performance.now();
			if (current !== this.#current) clearInterval(timer);
			else setTimeout(() => this.#quietly("ping", () => judge(now)), READ_FIRST_MS).unref();
		}, PING_EVERY_MS);
		timer.unref();
	}

	/** The start is judged once both `session_start` has fired and hello was answered. */
	#judge(): void {
		if (this.#judged || !this.#first || this.#phase !== "running" || !this.#served) return;
		if (!this.#host.liveMain()) {
			this.#first = undefined;
			this.#mainEnded = true;
			void this.#stop("no Main session is live");
			return;
		}
		this.#judged = true;
		const { url, tokenPrefix } = this.#served;
		this.#notices.tell(
			`a2mcp: this session's tools are served at ${url} (token ${tokenPrefix}…). /a2mcp shows more.`,
			"info",
		);
	}

	async #endWithMain(): Promise<void> {
		this.#first = undefined;
		this.#mainEnded = true;
		await this.#stop("the Main session ended");
	}

	/** Stops the sidecar, with its grace for calls, within the time a shutdown handler has. */
	#stop(why: string): Promise<void> {
		this.#stopping ??= this.#stopNow(why)
			.catch(error => this.#fault("stop", error))
			.finally(() => {
				this.#stopping = undefined;
			});
		return this.#stopping;
	}

	async #stopNow(why: string): Promise<void> {
		clearTimeout(this.#pause);
		this.#why = why;
		const current = this.#current;
		if (!current) {
			if (this.#phase === "pausing") this.#setPhase("stopped");
			return;
		}
		this.#setPhase("stopping");
		const { link } = current;
		if (current.served) {
			const answered = link.request("bridge/stop", { graceMs: STOP_GRACE_MS }).catch(() => {});
			await Promise.race([answered, link.ended, sleep(STOP_ANSWER_MS)]);
		}
		link.end();
		await Promise.race([link.ended, sleep(STOP_EXIT_MS)]);
		if (current === this.#current) link.kill("it did not stop in time");
	}

	// ── what a sidecar asks and says ─────────────────────────────────────────────────────────────

	readonly #handlers: LinkHandlers = {
		request: (link, id, method, params, size) => {
			switch (method) {
				case "tools/call":
					return this.#calls.start(link, id, params, size);
				case "tools/list":
					return this.#listRequested(link, id);
				case "bridge/ping":
					return void link.answer(id, JSON.stringify({ lagMs: this.#lag() }));
				case "bridge/hostLlm":
					return this.#switchRequested(link, id, params);
				default:
					this.#count(`unknown request ${oneLine(method, 80)}`);
					return link.refuse(id, -32601, "method not found");
			}
		},
		notification: (link, method, params) => {
			const { requestId, callId, callIds, note, level, text, reason } = (params ?? {}) as Record<string, unknown>;
			switch (method) {
				case "notifications/cancelled":
					return this.#calls.cancelRequest(link, requestId, reason);
				case "bridge/cancel":
					return this.#calls.cancelCall(String(callId), reason);
				case "bridge/ack":
					return this.#calls.acknowledge(Array.isArray(callIds) ? callIds : []);
				case "bridge/note":
					return this.#calls.note(String(callId), note);
				case "bridge/notify":
					return this.#notices.tell(named(String(text)), levelOf(level));
				case "bridge/goodbye":
					if (this.#current?.link === link && (reason === "stop" || reason === "restart" || reason === "host")) {
						this.#current.goodbye = reason;
					}
					return;
				default:
					return this.#count(`unknown notification ${oneLine(method, 80)}`);
			}
		},
		skipped: (_link, why) => this.#count(why),
		fault: (where, error) => this.#fault(where, error),
	};

	#listRequested(link: Link, id: RequestId): void {
		const current = this.#current;
		if (current?.link !== link) return;
		current.changeTold = false;
		current.listRequests.push(id);
		this.#answerLists();
	}

	/** `bridge/hostLlm`; before hello was answered it is the config that asks, and waits for a session. */
	#switchRequested(link: Link, id: RequestId, params: unknown): void {
		const current = this.#current;
		if (current?.link !== link) return;
		const { enabled } = (params ?? {}) as { enabled?: unknown };
		if (typeof enabled !== "boolean") return link.refuse(id, -32602, '"enabled" must be a boolean');
		if (current.served) return this.#switch(link, id, enabled);
		current.switchRequests.push({ id, enabled });
		this.#answerSwitches();
	}

	#answerSwitches(): void {
		const current = this.#current;
		if (!current || !this.#first) return;
		for (const { id, enabled } of current.switchRequests.splice(0)) {
			if (this.#startSwitched) current.link.answer(id, JSON.stringify(this.#host.hostLlm.status));
			else this.#switch(current.link, id, enabled);
			this.#startSwitched = true;
		}
	}

	#switch(link: Link, id: RequestId, enabled: boolean): void {
		let answer: string;
		try {
			answer = JSON.stringify(this.#host.hostLlm.switch(enabled));
		} catch (error) {
			return link.refuse(id, -32000, messageOf(error));
		}
		link.answer(id, answer);
	}

	/** A notification for the sidecar that serves now, or the next one. */
	#tellLater(method: string, params: object): void {
		if (this.#untold.length < UNTOLD) this.#untold.push({ method, params });
		this.#tellUntold();
	}

	#tellUntold(): void {
		const link = this.#servingLink();
		if (link) for (const { method, params } of this.#untold.splice(0)) link.notify(method, params);
	}

	/** Answers what waits for the list: with the list as it is, without a Main with the last one. */
	#answerLists(): void {
		const current = this.#current;
		if (!current || current.listRequests.length === 0) return;
		const session = this.#first ? this.#host.liveMain() : undefined;
		const list = session ? this.#catalogue.fetch(session, performance.now()) : this.#catalogue.last;
		if (list === undefined) return;
		for (const id of current.listRequests.splice(0)) {
			if (!current.link.answer(id, list)) current.link.refuse(id, -32000, "the list of tools exceeds the frame limit");
		}
	}

	/** Several times a second: how late is this loop, is Main there, did its tools change? */
	#look(): void {
		const now = performance.now();
		this.#lagMs = Math.max(0, now - this.#lookDueAt);
		this.#lookDueAt = now + LOOK_EVERY_MS;
		this.#mainMayHaveChanged();
		const current = this.#current;
		const session = this.#first ? this.#host.liveMain() : undefined;
		if (session) this.#watchSession(session);
		if (!current?.served || !session || current.changeTold) return;
		this.#answerLists();
		if (this.#catalogue.changed(session, now)) {
			current.changeTold = true;
			current.link.notify("notifications/tools/list_changed", {});
		}
	}

	#mainMayHaveChanged(): void {
		this.#tellState();
		if (this.#judged && !this.#mainEnded && !this.#host.liveMain()) void this.#endWithMain();
	}

	/** The host's partial signals of a changed tool set; the look several times a second is what counts. */
	#watchSession(session: AgentSession): void {
		if (this.#watched?.session === session) return;
		this.#watched?.unsubscribe();
		const suspect = () => this.#catalogue.suspect();
		const off = [
			session.extensionRunner?.onToolRegistered(suspect),
			session.subscribe(event => {
				if (event.type === "notice" && event.source === "xdev") suspect();
			}),
		];
		this.#watched = {
			session,
			unsubscribe: () => {
				for (const unsubscribe of off) unsubscribe?.();
			},
		};
		suspect();
	}

	#tellState(): void {
		const link = this.#servingLink();
		if (!link || !this.#current) return;
		const { state: hostLlm, status } = this.#host.hostLlm;
		const state = {
			main: this.#host.liveMain() !== undefined,
			hostLlm,
			denied: status.denied,
			approvals: this.#calls.approvals.list(),
		};
		const json = JSON.stringify(state);
		if (this.#current.state === json) return;
		this.#current.state = json;
		link.notifyJson("bridge/state", json);
	}

	#servingLink(): Link | undefined {
		return this.#current?.served ? this.#current.link : undefined;
	}

	/** How late this process's loop runs: as last measured, or by how much a look is overdue. */
	#lag(): number {
		return Math.round(Math.max(this.#lagMs, performance.now() - this.#lookDueAt, 0));
	}

	// ── telling ──────────────────────────────────────────────────────────────────────────────────

	#setPhase(phase: Phase): void {
		this.#phase = phase;
		for (const wake of this.#phaseChanged.splice(0)) wake();
	}

	/** What can be said without a sidecar; a deny goes on without one. */
	#ownStatus(): Reply {
		const { text, level } = this.#phaseReply();
		const { state, status } = this.#host.hostLlm;
		if (status.enabled) return { text, level };
		const denied = state === "degraded" ? "(tripwire only)" : `denied=${status.denied}`;
		return { text: `${text}\nhost_llm=deny ${denied}`, level };
	}

	#phaseReply(): Reply {
		const served = this.#served;
		switch (this.#phase) {
			case "running":
				return { text: `a2mcp: running at ${served?.url} (token ${served?.tokenPrefix}…)`, level: "info" };
			case "starting":
				return { text: "a2mcp: the bridge is starting", level: "info" };
			case "pausing":
				return { text: `a2mcp: the bridge is down for a moment: ${this.#why}`, level: "warning" };
			case "stopping":
				return { text: `a2mcp: the bridge is stopping: ${this.#why}`, level: "info" };
			case "stopped":
				return { text: `a2mcp: the bridge is stopped: ${this.#why}. /a2mcp restart starts it.`, level: "info" };
			case "refused":
			case "failed":
				return {
					text: `a2mcp: the bridge is not running: ${this.#why}. /a2mcp restart tries again.`,
					level: "error",
				};
		}
	}

	/** How a start went, once that is known. */
	async #settledReply(): Promise<Reply> {
		const deadline = sleep(RESTART_MS).then(() => "late" as const);
		while (this.#phase === "starting" || this.#phase === "pausing") {
			const changed = new Promise<"changed">(resolve => this.#phaseChanged.push(() => resolve("changed")));
			if ((await Promise.race([changed, deadline])) === "late") break;
		}
		return this.#ownStatus();
	}

	#count(why: string): void {
		const count = (this.#skipped.get(why) ?? 0) + 1;
		if (count > 1 || this.#skipped.size < 100) this.#skipped.set(why, count);
		if (count === 1 || count % 100 === 0) this.#host.log("a frame of the sidecar was skipped", { why, count });
	}

	#fault(where: string, error: unknown): void {
		this.#host.log("fault", { where, error: messageOf(error) });
	}

	#quietly(where: string, action: () => void): void {
		try {
			action();
		} catch (error) {
			this.#fault(where, error);
		}
	}
}

function named(text: string): string {
	return text.startsWith("a2mcp") ? text : `a2mcp: ${text}`;
}

function sleep(ms: number): Promise<void> {
	return new Promise(resolve => {
		setTimeout(resolve, ms).unref();
	});
}

/** Rejects when `promise` takes longer than `ms`. */
function within<T>(ms: number, promise: Promise<T>): Promise<T> {
	const late = sleep(ms).then((): never => {
		throw new RequestFailed(`no answer within ${ms / 1000} s`);
	});
	late.catch(() => {});
	return Promise.race([promise, late]);
}
