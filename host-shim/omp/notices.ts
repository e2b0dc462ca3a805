/**
 * What the operator is told. Notices belong to the first `session_start`'s context and never move
 * to a sub-agent's, which has no UI; what is said before it waits.
 */

export type Level = "info" | "warning" | "error";

export interface NoticeBoard {
	notify(text: string, level: Level): void;
}

/** Notices that may wait for the first context. */
const WAITING = 16;
const LONGEST = 4_000;

export class Notices {
	#board: NoticeBoard | undefined;
	#waiting: { text: string; level: Level }[] = [];

	/** The first context; what waited is told now. */
	belongTo(board: NoticeBoard): void {
		this.#board = board;
		for (const { text, level } of this.#waiting.splice(0)) this.tell(text, level);
	}

	tell(text: string, level: Level): void {
		if (!this.#board) {
			if (this.#waiting.length < WAITING) this.#waiting.push({ text, level });
			return;
		}
		show(this.#board, text, level);
	}
}

/** Shows `text` on one board; a board that is gone is no reason to fail. */
export function show(board: NoticeBoard, text: string, level: Level): void {
	try {
		board.notify(printable(text).slice(0, LONGEST), level);
	} catch {
		// The session it belonged to is over.
	}
}

/**
 * No control character and no bidirectional override reaches a terminal (contract 16); the line
 * breaks of a longer answer stay.
 */
export function printable(text: string): string {
	return text.replace(/[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, " ");
}

/** One line of foreign text, for use inside a notice. */
export function oneLine(text: string, longest = 300): string {
	const line = printable(text).replace(/\s+/g, " ").trim();
	return line.length > longest ? `${line.slice(0, longest)}…` : line;
}

export function levelOf(value: unknown): Level {
	return value === "warning" || value === "error" ? value : "info";
}
