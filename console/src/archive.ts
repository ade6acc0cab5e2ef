// Keeps conversations in the browser (IndexedDB). Without it, they last until the page is closed.

import type { Conversation } from "./conversation";

const STORE = "conversations";
const inMemory = new Map<string, Conversation>();
let opened: Promise<IDBDatabase | null> | undefined;

function database(): Promise<IDBDatabase | null> {
  opened ??= new Promise((resolve) => {
    try {
      const opening = indexedDB.open("rekindle-console", 1);
      opening.onupgradeneeded = () => opening.result.createObjectStore(STORE, { keyPath: "id" });
      opening.onsuccess = () => resolve(opening.result);
      opening.onerror = opening.onblocked = () => resolve(null);
    } catch {
      resolve(null);
    }
  });
  return opened;
}

function done<T>(action: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    action.onsuccess = () => resolve(action.result);
    action.onerror = () => reject(action.error);
  });
}

/** All conversations, the last used first. */
export async function readAll(): Promise<Conversation[]> {
  const found = await database();
  const all = found
    ? await done<Conversation[]>(found.transaction(STORE).objectStore(STORE).getAll())
    : [...inMemory.values()];
  return all.sort((one, other) => other.usedAt - one.usedAt);
}

export async function write(conversation: Conversation): Promise<void> {
  const found = await database();
  if (found) await done(found.transaction(STORE, "readwrite").objectStore(STORE).put(conversation));
  else inMemory.set(conversation.id, conversation);
}

export async function remove(id: string): Promise<void> {
  const found = await database();
  if (found) await done(found.transaction(STORE, "readwrite").objectStore(STORE).delete(id));
  inMemory.delete(id);
}
