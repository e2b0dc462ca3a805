/**
 * A remote caller gets what its command gave, not the news that the host moved it to the background.
 *
 * omp turns a `bash` (or `eval`) that runs longer than a minute, or than `timeout` minus a second, into
 * a job of the session: the call succeeds at once and the output goes to the session later, where it
 * starts a model turn. That is how its operator works; a remote caller would never see the output. So
 * the job of a remote call is taken over here: its delivery to the session is called off, its end is
 * the call's end, and cancelling the call cancels it. Nothing is changed for the host's own calls, nor
 * for a caller that asks for `async: true`.
 */

import type { AgentToolResult } from "@oh-my-pi/pi-agent-core";
import type { AgentSession, AsyncJob } from "@oh-my-pi/pi-coding-agent";

/** `result`, or the end of the job it only announces. */
export async function foreground(
	session: AgentSession,
	args: unknown,
	result: AgentToolResult,
	signal: AbortSignal,
): Promise<AgentToolResult> {
	const jobId = backgroundJob(result);
	if (jobId === undefined || (args as { async?: unknown } | undefined)?.async === true) return result;
	const jobs = session.asyncJobManager;
	const job = jobs?.getJob(jobId);
	if (!jobs || !job) return result;
	jobs.acknowledgeDeliveries([jobId]);
	const cancel = () => jobs.cancel(jobId);
	if (signal.aborted) cancel();
	else signal.addEventListener("abort", cancel, { once: true });
	try {
		await job.promise;
	} finally {
		signal.removeEventListener("abort", cancel);
	}
	jobs.consumeJobResults([jobId]);
	return ended(job);
}

/** A tool of an extension may give anything. */
function backgroundJob(result: AgentToolResult | undefined): string | undefined {
	const details = result?.details as { async?: Record<string, unknown> | null } | null | undefined;
	const { state, type, jobId } = details?.async ?? {};
	// A sub-agent is a job by nature: `task` answers when it was started.
	const isCommand = type === "bash" || type === "eval";
	return isCommand && state === "running" && typeof jobId === "string" ? jobId : undefined;
}

function ended(job: AsyncJob): AgentToolResult {
	if (job.status !== "completed") {
		const text = job.errorText ?? job.resultText ?? "Command aborted";
		return { content: [{ type: "text", text } as { type: string }], isError: true };
	}
	const text = { type: "text", text: job.resultText ?? "" };
	return { content: [text, ...(job.latestDetails?.images ?? [])] };
}
