/**
 * Holds down what makes omp ask its model by itself while model requests are denied: each attempt
 * would be one more error in the session. Runtime overrides only, which never reach the disk; an
 * override that was there before comes back, and one that somebody made meanwhile stays.
 *
 * The title generator has no setting that turns it off: it tries and is refused.
 */

import type { Settings } from "@oh-my-pi/pi-coding-agent";

const QUIET: Readonly<Record<string, unknown>> = {
	"bash.autoBackground.enabled": false,
	"eval.autoBackground.enabled": false,
	"retry.enabled": false,
	"retry.modelFallback": false,
	"retry.usageAwareFallback": false,
	"advisor.enabled": false,
	"ttsr.enabled": false,
	"prewalk.enabled": false,
	"autolearn.enabled": false,
	"autolearn.autoContinue": false,
	"compaction.enabled": false,
	"compaction.idleEnabled": false,
	"compaction.midTurnEnabled": false,
	"contextPromotion.enabled": false,
	"branchSummary.enabled": false,
	"recap.enabled": false,
	"title.refreshOnReplan": false,
	"features.unexpectedStopDetection": "none",
};

/** Sets the overrides; `undo` gets how to take each back, in the moment it is set. */
export function quieten(settings: Settings, undo: (step: () => void) => void): void {
	for (const [path, quiet] of Object.entries(QUIET)) {
		const before = settings.get(path);
		// Unknown to this version of the host: nothing to hold down.
		if (before === undefined) continue;
		settings.clearOverride(path);
		const wasOverridden = !Object.is(settings.get(path), before);
		const back = () => {
			if (wasOverridden) settings.override(path, before);
			else settings.clearOverride(path);
		};
		try {
			settings.override(path, quiet);
		} catch (error) {
			back();
			throw error;
		}
		undo(() => {
			if (Object.is(settings.get(path), quiet)) back();
		});
	}
}
