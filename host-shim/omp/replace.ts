/**
 * Puts functions of ours in the place of a host object's methods, for a while. The object's class is
 * not touched; somebody else's function, put on top of ours meanwhile, stays.
 */

/** Returns how to take them off again. When it throws, nothing is replaced. */
export function replaceMethods<T extends object>(target: T, own: Partial<T>): () => void {
	const names = Object.keys(own) as (keyof T & string)[];
	const before = names.map(name => Object.getOwnPropertyDescriptor(target, name));
	const undo = () => {
		for (const [index, name] of names.entries()) {
			if (target[name] !== own[name]) continue;
			const previous = before[index];
			if (previous) Object.defineProperty(target, name, previous);
			else Reflect.deleteProperty(target, name);
		}
	};
	try {
		Object.assign(target, own);
	} catch (error) {
		undo();
		throw error;
	}
	return undo;
}
