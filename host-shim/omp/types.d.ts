/**
 * What the shim uses of omp 18.2, and nothing else: enough to check the shim without installing
 * the host. Not installed beside the shim; at run time the host's own modules stand behind these
 * names.
 */

declare module "@oh-my-pi/pi-utils" {
	/** The agent directory as the host resolves it: profile, `PI_CODING_AGENT_DIR`, home. */
	export function getAgentDir(): string;
	export const VERSION: string;
	export const logger: Logger;
	export interface Logger {
		debug(message: string, context?: Record<string, unknown>): void;
		warn(message: string, context?: Record<string, unknown>): void;
		error(message: string, context?: Record<string, unknown>): void;
	}
}

declare module "@oh-my-pi/pi-ai/utils/schema" {
	export function toolWireSchema(tool: {
		name: string;
		description: string;
		parameters: unknown;
	}): Record<string, unknown>;
}

declare module "@oh-my-pi/pi-ai" {
	/** One row of the host's catalogue of models. */
	export interface Model {
		readonly provider: string;
		readonly id: string;
		readonly api: string;
		readonly baseUrl?: string;
		/** Streaming that goes past every api, e.g. `pi-native`. */
		readonly transport?: string;
		/** Runs the provider's own program for headers, before the api is looked at. */
		readonly resolveHeaders?: unknown;
		readonly name?: string;
		readonly reasoning?: boolean;
		readonly thinking?: unknown;
		readonly input?: readonly string[];
		readonly cost?: unknown;
		readonly contextWindow?: number | null;
		readonly maxTokens?: number | null;
	}

	export interface AssistantMessageEventStream {
		push(event: { type: "error"; reason: "error"; error: object }): void;
	}

	export function createAssistantMessageEventStream(): AssistantMessageEventStream;
	/** Built-in names are refused; the same name again replaces. */
	export function registerCustomApi(
		api: string,
		stream: (model: Model) => AssistantMessageEventStream,
		sourceId: string,
	): void;
	export function unregisterCustomApis(sourceId: string): void;
}

declare module "@oh-my-pi/pi-agent-core" {
	import type { Model } from "@oh-my-pi/pi-ai";

	export interface Agent {
		readonly state: { readonly model?: Model };
		readonly providerSessionState?: ReadonlyMap<string, { close(): void }>;
		/** In memory only. */
		setModel(model: Model): void;
		emitExternalEvent(event: AgentEvent): void;
	}

	export interface AgentToolResult {
		content: { type: string }[];
		details?: unknown;
		isError?: boolean;
	}

	/** Built from the session and the first context; the tools read what they need of it. */
	export interface AgentToolContext {
		sessionManager: unknown;
		modelRegistry: unknown;
		model: unknown;
		/** Without it the approval gate fails closed to `always-ask`. */
		settings: unknown;
		isIdle(): boolean;
		abort(): void;
		hasQueuedMessages(): boolean;
		ui: unknown;
		hasUI: boolean;
		localProtocolOptions?: unknown;
	}

	export interface AgentTool {
		name: string;
		execute(
			toolCallId: string,
			params: unknown,
			signal?: AbortSignal,
			onUpdate?: (partial: AgentToolResult) => void,
			context?: AgentToolContext,
		): Promise<AgentToolResult>;
	}

	export type AgentEvent =
		| { type: "tool_execution_start"; toolCallId: string; toolName: string; args: unknown; intent?: string }
		| { type: "tool_execution_update"; toolCallId: string; toolName: string; args: unknown; partialResult: unknown }
		| { type: "tool_execution_end"; toolCallId: string; toolName: string; result: unknown; isError?: boolean };
}

declare module "@oh-my-pi/pi-coding-agent" {
	import type { Agent, AgentTool } from "@oh-my-pi/pi-agent-core";
	import type { Model } from "@oh-my-pi/pi-ai";

	export interface ProviderConfig {
		baseUrl?: string;
		apiKey?: string;
		api?: string;
		models?: readonly object[];
	}

	export interface ModelRegistry {
		getAll(): Model[];
		getAvailable(): Model[];
		find(provider: string, id: string): Model | undefined;
		hasConcreteAuth(provider: string): boolean;
		getApiKey(model: Model, ...rest: unknown[]): Promise<string | undefined>;
		/** A key, or how to get one. */
		resolver(target: string | Model, ...rest: unknown[]): unknown;
		registerProvider(name: string, config: ProviderConfig, sourceId?: string): void;
		unregisterProvider(name: string): void;
		/** `offline`: from the cache of what was found before. */
		refreshProvider?(name: string, strategy: "offline"): Promise<void>;
		/** The search for models that begins after the session has started. */
		awaitInitialBackgroundRefresh?(): Promise<void>;
	}

	export interface Settings {
		get(path: string): unknown;
		/** Runtime only. */
		override(path: string, value: unknown): void;
		clearOverride(path: string): void;
	}

	export interface AsyncJob {
		readonly status: "running" | "completed" | "failed" | "cancelled";
		/** Settles with the job and never rejects. */
		readonly promise: Promise<void>;
		readonly resultText?: string;
		readonly errorText?: string;
		readonly latestDetails?: { images?: { type: string }[] };
	}

	export interface AsyncJobManager {
		getJob(id: string): AsyncJob | undefined;
		/** Its result is not delivered to the session. */
		acknowledgeDeliveries(ids: string[]): number;
		/** Its result was seen. */
		consumeJobResults(ids: string[]): number;
		cancel(id: string): boolean;
	}

	export interface ToolInfo {
		name: string;
		description: string;
		parameters: unknown;
	}

	export interface AgentSession {
		readonly agent: Agent;
		readonly sessionManager: unknown;
		readonly modelRegistry: ModelRegistry;
		readonly settings: Settings;
		readonly asyncJobManager?: AsyncJobManager;
		readonly model: unknown;
		readonly isStreaming: boolean;
		readonly queuedMessageCount: number;
		readonly extensionRunner?: { onToolRegistered(listener: () => void): () => void };
		getAllToolNames(): string[];
		getAllToolInfos(): ToolInfo[];
		/** Also accepts aliases (`xd://bash`): exposure is decided by {@link getAllToolNames}. */
		getToolByName(name: string): AgentTool | undefined;
		subscribe(listener: (event: { type: string; source?: string }) => void): () => void;
	}

	export interface ExtensionUIContext {
		notify(message: string, type?: "info" | "warning" | "error"): void;
	}

	export interface ExtensionContext {
		ui: ExtensionUIContext;
		hasUI: boolean;
		/** `tui`, `rpc`, `acp`, `print`. */
		mode?: string;
		abort(): void;
		localProtocolOptions?: unknown;
	}

	export interface ExtensionCommandContext extends ExtensionContext {
		waitForIdle(): Promise<void>;
	}

	type Handler<E> = (event: E, ctx: ExtensionContext) => void | Promise<void>;

	export interface ExtensionAPI {
		on(event: "session_start" | "session_shutdown" | "mcp_notification", handler: Handler<unknown>): void;
		on(
			event: "tool_approval_requested" | "tool_approval_resolved",
			handler: Handler<{ toolCallId: string; toolName: string }>,
		): void;
		registerCommand(
			name: string,
			options: {
				description?: string;
				handler(args: string, ctx: ExtensionCommandContext): Promise<void>;
			},
		): void;
		/** Queued until the session's registry is there, under this extension's path. */
		registerProvider(name: string, config: ProviderConfig): void;
		readonly events: { on(channel: string, handler: (data: unknown) => void): unknown };
	}
}

declare module "@oh-my-pi/pi-coding-agent/registry/agent-registry" {
	import type { AgentSession } from "@oh-my-pi/pi-coding-agent";

	export const MAIN_AGENT_ID: string;
	export class AgentRegistry {
		static global(): AgentRegistry;
		get(id: string): { session: AgentSession | null } | undefined;
		list(): { session: AgentSession | null }[];
		onChange(listener: () => void): () => void;
	}
}
