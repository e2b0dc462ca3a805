/**
 * Runs remote calls in the host's Main session and keeps their ends until they are acknowledged.
 *
 * A call outlives the sidecar that sent it: its end goes out as the answer to that sidecar's
 * request, or, when another one is there by then, as `bridge/result`. The host's gate decides
 * about approvals; a cancelled call is answered at once, because neither a tool nor a pending
 * approval can be trusted to let go of it.
 */

import type { AgentSession, ExtensionContext } from "@oh-my-pi/pi-coding-agent";
import type { AgentTool, AgentToolContext, AgentToolResult } from "@oh-my-pi/pi-agent-core";

import { Approvals, type WaitingCall } from "./approvals.ts";
import { asker } from "./asker.ts";
import { foreground } from "./background.ts";
import { Card, CardBudget } from "./cards.ts";
import type { Link, RequestId } from "./link.ts";
import { oneLine } from "./notices.ts";
import { cancelled, failed, messageOf, NO_MAIN, NOT_EXPOSED, returned, threw } from "./outcome.ts";
import { lastLine, Progress } from "./progress.ts";
import { type Outcome, type Remembered, ResultStore } from "./results.ts";

/** Of a cancellation, in characters. */
const LONGEST_REASON = 120;

/** What calls need of the bridge they came over. */
export interface Surroundings {
	/** The Main session and the first context, when both are there. */
	main(): { session: AgentSession; context: ExtensionContext } | undefined;
	/** The sidecar that can be told things now; hello was answered. */
	link(): Link | undefined;
	/** The list of calls that wait for an approval changed. */
	approvalsChanged(): void;
	/** The host asks its operator about a call; its own question does not say who wants it. */
	asked(tool: string, asker: string): void;
	/** A call was cancelled, for that reason, while the host asks about it: the question cannot be withdrawn. */
	abandoned(tool: string, reason: string): void;
	fault(where: string, error: unknown): void;
}

interface Call extends WaitingCall {
	readonly link: Link;
	readonly requestId: RequestId;
	/** Who asks, for people. */
	readonly asker: string;
	/** Fresh for each call: the host draws its cards by it. */
	readonly toolCallId: string;
	readonly abort: AbortController;
	/** Ends the call as cancelled, and says why; set while the tool runs. */
	cancel: (reason: string) => void;
	progress: number;
}

export class Calls {
	readonly approvals: Approvals;
	readonly #around: Surroundings;
	readonly #store = new ResultStore();
	readonly #cards = new CardBudget();
	/** Running calls, by call id. */
	readonly #running = new Map<string, Call>();
	readonly #byToolCallId = new Map<string, Call>();

	constructor(around: Surroundings) {
		this.#around = around;
		this.approvals = new Approvals(() => around.approvalsChanged());
	}

	get running(): number {
		return this.#running.size;
	}

	/** One `tools/call` frame of `size` bytes. */
	start(link: Link, requestId: RequestId, params: unknown, size: number): void {
		const { name, arguments: args = {}, _meta } = record(params);
		const { callId, note } = record(record(_meta)["a2mcp/call"]);
		if (typeof callId !== "string" || callId === "") {
			link.refuse(requestId, -32602, 'tools/call without _meta["a2mcp/call"].callId');
			return;
		}
		const tool = typeof name === "string" ? name : "";
		if (!this.#store.begin(callId, tool, note, Date.now())) {
			link.refuse(requestId, -32600, "a call of that id was started before");
			return;
		}
		const call: Call = {
			callId,
			tool,
			link,
			requestId,
			asker: asker(record(record(_meta)["a2mcp/client"])),
			toolCallId: crypto.randomUUID(),
			abort: new AbortController(),
			cancel: () => {},
			progress: 0,
		};
		this.#running.set(callId, call);
		this.#byToolCallId.set(call.toolCallId, call);
		this.#run(call, args, size)
			.catch(threw)
			.then(outcome => this.#end(call, outcome))
			.catch(error => this.#around.fault("call", error));
	}

	/** `notifications/cancelled`: by the id of a request of that link. */
	cancelRequest(link: Link, requestId: unknown, reason: unknown): void {
		for (const call of this.#running.values()) {
			if (call.link === link && call.requestId === requestId) return call.cancel(reasonOf(reason));
		}
	}

	/** `bridge/cancel`: by call id, of whichever sidecar. */
	cancelCall(callId: string, reason: unknown): void {
		this.#running.get(callId)?.cancel(reasonOf(reason));
	}

	note(callId: string, note: unknown): void {
		this.#store.note(callId, note);
	}

	acknowledge(callIds: readonly unknown[]): void {
		for (const callId of callIds) if (typeof callId === "string") this.#store.acknowledge(callId);
	}

	/** Every call the next sidecar must hear of. */
	inFlight(): Remembered[] {
		return this.#store.inFlight(Date.now());
	}

	/** Sends a new sidecar the ends that came before it, oldest first. */
	deliverAgain(link: Link): void {
		for (const { callId, outcome } of this.#store.outcomes()) sendResult(link, callId, outcome);
	}

	/** The host asks its operator about one of its tool calls: perhaps one of ours. */
	approvalRequested(toolCallId: string): void {
		const call = this.#byToolCallId.get(toolCallId);
		if (!call) return;
		this.approvals.requested(toolCallId, { callId: call.callId, tool: call.tool });
		this.#around.asked(call.tool, call.asker);
	}

	approvalResolved(toolCallId: string): void {
		this.approvals.settled(toolCallId);
	}

	async #run(call: Call, args: unknown, size: number): Promise<Outcome> {
		const main = this.#around.main();
		if (!main) return failed(NO_MAIN);
		const { session, context } = main;
		// The list of names decides: looking a tool up accepts aliases that are not offered.
		const exposed = call.tool !== "" && session.getAllToolNames().includes(call.tool);
		const tool = exposed ? session.getToolByName(call.tool) : undefined;
		if (!tool) return failed(NOT_EXPOSED);

		const { toolCallId, tool: toolName } = call;
		const card = new Card(
			this.#cards.take(performance.now()) ? session : undefined,
			{ toolCallId, tool: toolName, args, size, asker: call.asker, isTerminal: context.mode === "tui" },
			error => this.#around.fault("card", error),
		);
		const progress = new Progress(partial => {
			this.#tellProgress(call, lastLine(partial));
			card.update(partial);
		});

		const end = Promise.withResolvers<{ outcome: Outcome; drawn: unknown }>();
		call.cancel = reason => {
			if (this.approvals.waits(toolCallId)) this.#around.abandoned(toolName, reason);
			this.#store.cancel(call.callId, Date.now());
			end.resolve({ outcome: cancelled(), drawn: text(reason) });
			call.abort.abort(new Error(reason));
		};
		execute(tool, call, args, partial => progress.update(partial), toolContext(session, context))
			.then(result => foreground(session, args, result, call.abort.signal))
			.then(result => ({ outcome: returned(result), drawn: result }))
			.catch(error => ({ outcome: threw(error), drawn: text(messageOf(error)) }))
			.then(end.resolve);
		const { outcome, drawn } = await end.promise;
		progress.end();
		card.end(drawn, outcome.isError, outcome.bytes);
		return outcome;
	}

	#end(call: Call, outcome: Outcome): void {
		this.#running.delete(call.callId);
		this.#byToolCallId.delete(call.toolCallId);
		this.approvals.settled(call.toolCallId);
		this.#store.finish(call.callId, outcome, Date.now());
		const link = this.#around.link();
		// Without a sidecar to tell, the next one hears of it in hello and gets it after that.
		if (link === call.link) {
			if (outcome.kind === "result") link.answer(call.requestId, outcome.json);
			else link.answerError(call.requestId, outcome.json);
		} else if (link) sendResult(link, call.callId, outcome);
	}

	#tellProgress(call: Call, message: string): void {
		call.progress += 1;
		this.#around.link()?.notifyLossy("notifications/progress", {
			progressToken: call.callId,
			progress: call.progress,
			...(message === "" ? {} : { message }),
			_meta: { "a2mcp/call": { callId: call.callId } },
		});
	}
}

async function execute(
	tool: AgentTool,
	call: Call,
	args: unknown,
	onUpdate: (partial: unknown) => void,
	context: AgentToolContext,
): Promise<AgentToolResult> {
	return tool.execute(call.toolCallId, args, call.abort.signal, onUpdate, context);
}

/** What the host's tools want to know of the session they run in. */
function toolContext(session: AgentSession, first: ExtensionContext): AgentToolContext {
	return {
		sessionManager: session.sessionManager,
		modelRegistry: session.modelRegistry,
		model: session.model,
		settings: session.settings,
		isIdle: () => !session.isStreaming,
		abort: () => first.abort(),
		hasQueuedMessages: () => session.queuedMessageCount > 0,
		ui: first.ui,
		hasUI: first.hasUI,
		localProtocolOptions: first.localProtocolOptions,
	};
}

function sendResult(link: Link, callId: string, { kind, json }: Outcome): void {
	link.notifyJson("bridge/result", `{"callId":${JSON.stringify(callId)},"${kind}":${json}}`);
}

/** Who cancelled, in the sidecar's words: the caller, the end of its session, the operator, the bridge's stop. */
function reasonOf(reason: unknown): string {
	return (typeof reason === "string" && oneLine(reason, LONGEST_REASON)) || "cancelled";
}

function text(message: string): unknown {
	return { content: [{ type: "text", text: message }] };
}

function record(value: unknown): Record<string, unknown> {
	return typeof value === "object" && value !== null ? (value as Record<string, unknown>) : {};
}
