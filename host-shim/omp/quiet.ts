/**
 * Holds down what makes omp ask its model by itself while model requests are denied: each attempt
 * would be one more error in the session. Runtime overrides only, which never reach the disk; an
 * override that was there before comes back, and what somebody set meanwhile stays.
 *
 * The values cannot tell ours from somebody else's (most are `false`), so omp's own two ways to change
 * an override are listened to: whoever uses one has had the last word on that setting. What is only
 * written to the config stays under the override and shows once that is gone.
 *
 * The title generator has no setting that turns it off: it tries and is refused.
 */

import type { Settings } from "@oh-my-pi/pi-coding-agent";

import { replaceMethods } from "./replace.ts";

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
	// The host's own ways, taken before they are listened to: what we do is not heard.
	const override: Settings["override"] = settings.override.bind(settings);
	const clearOverride: Settings["clearOverride"] = settings.clearOverride.bind(settings);
	const heard = new Set<string>();
	// Undone last: the steps go backwards.
	undo(listen(settings, path => heard.add(path)));
	for (const [path, quiet] of Object.entries(QUIET)) {
		const before = settings.get(path);
		// Unknown to this version of the host: nothing to hold down.
		if (before === undefined) continue;
		clearOverride(path);
		const wasOverridden = !Object.is(settings.get(path), before);
		const back = () => {
			if (wasOverridden) override(path, before);
			else clearOverride(path);
		};
		try {
			override(path, quiet);
		} catch (error) {
			back();
			throw error;
		}
		undo(() => {
			// The value is asked too: a way that was not heard may have changed it.
			if (!heard.has(path) && Object.is(settings.get(path), quiet)) back();
		});
	}
}

/** Tells of each path whose override is set or cleared; returns how to end that. */
function listen(settings: Settings, changed: (path: string) => void): () => void {
	const { override, clearOverride } = settings;
	const own = {
		override(this: Settings, ...args: Parameters<Settings["override"]>) {
			override.apply(this, args);
			if (this === settings) changed(args[0]);
		},
		clearOverride(this: Settings, ...args: Parameters<Settings["clearOverride"]>) {
			clearOverride.apply(this, args);
			if (this === settings) changed(args[0]);
		},
	};
	return replaceMethods(settings, own);
}
