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

declare module "@oh-my-pi/pi-agent-core" {
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
	import type { AgentEvent, AgentTool } from "@oh-my-pi/pi-agent-core";

	export interface ToolInfo {
		name: string;
		description: string;
		parameters: unknown;
	}

	export interface AgentSession {
		readonly agent: { emitExternalEvent(event: AgentEvent): void };
		readonly sessionManager: unknown;
		readonly modelRegistry: unknown;
		readonly settings: unknown;
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
		readonly events: { on(channel: string, handler: (data: unknown) => void): unknown };
	}
}

declare module "@oh-my-pi/pi-coding-agent/registry/agent-registry" {
	import type { AgentSession } from "@oh-my-pi/pi-coding-agent";

	export const MAIN_AGENT_ID: string;
	export class AgentRegistry {
		static global(): AgentRegistry;
		get(id: string): { session: AgentSession | null } | undefined;
		onChange(listener: () => void): () => void;
	}
}
