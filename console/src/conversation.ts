// A conversation is a tree of messages: an edit or a retry adds a sibling. The shown path ends at `leaf`.

export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

export interface Divergence {
  message: number | null;
  role: string | null;
  stored: string;
  sent: string;
}

/** What a turn reused, computed and generated. */
export interface Report {
  promptTokens: number;
  reusedTokens: number;
  outputTokens: number;
  tier: string | null;
  status: string;
  reason: string;
  diverged: Divergence | null;
  firstTokenS: number;
  coldS: number | null;
  tokensPerS: number | null;
}

export interface Message {
  id: string;
  parent: string | null;
  role: "user" | "assistant" | "tool";
  text: string;
  images?: string[];
  reasoning?: string;
  calls?: ToolCall[];
  callId?: string;
  report?: Report;
  error?: string;
  end?: "length" | "stopped";
}

export interface Settings {
  temperature?: number;
  top_p?: number;
  top_k?: number;
  max_tokens?: number;
  seed?: number;
}

export interface Conversation {
  id: string;
  title: string;
  model: string;
  system: string;
  settings: Settings;
  tools: string;
  messages: Record<string, Message>;
  leaf: string | null;
  usedAt: number;
}

export const newId = (): string =>
  Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

export const newConversation = (model: string): Conversation => ({
  id: newId(),
  title: "",
  model,
  system: "",
  settings: {},
  tools: "",
  messages: {},
  leaf: null,
  usedAt: Date.now(),
});

/** The messages from the first one to `leaf`. */
export function path(conversation: Conversation, leaf = conversation.leaf): Message[] {
  const found: Message[] = [];
  for (let id = leaf; id !== null; ) {
    const message: Message | undefined = conversation.messages[id];
    if (!message) break;
    found.push(message);
    id = message.parent;
  }
  return found.reverse();
}

/** Children of each message, oldest first, by the id of the parent. */
export function children(conversation: Conversation): Map<string | null, Message[]> {
  const found = new Map<string | null, Message[]>();
  for (const message of Object.values(conversation.messages)) {
    const siblings = found.get(message.parent);
    if (siblings) siblings.push(message);
    else found.set(message.parent, [message]);
  }
  return found;
}

export function add(conversation: Conversation, message: Message): Conversation {
  const title = conversation.title || (message.role === "user" ? message.text.trim().slice(0, 60) : "");
  return {
    ...conversation,
    title,
    messages: { ...conversation.messages, [message.id]: message },
    leaf: message.id,
    usedAt: Date.now(),
  };
}

export const replace = (conversation: Conversation, message: Message): Conversation => ({
  ...conversation,
  messages: { ...conversation.messages, [message.id]: message },
});

/** Show another version: the newest end of the conversation below it. */
export function show(conversation: Conversation, id: string): Conversation {
  const below = children(conversation);
  let leaf = id;
  for (let next = below.get(leaf); next?.length; next = below.get(leaf)) leaf = next[next.length - 1].id;
  return { ...conversation, leaf };
}

/** The messages as the chat API takes them. */
export function requestMessages(conversation: Conversation, leaf: string | null): unknown[] {
  const system = conversation.system ? [{ role: "system", content: conversation.system }] : [];
  return [...system, ...path(conversation, leaf).filter((each) => !isEmpty(each)).map(requestMessage)];
}

const isEmpty = (message: Message): boolean =>
  message.role === "assistant" && !message.text && !message.calls?.length;

function requestMessage(message: Message): unknown {
  if (message.role === "tool") return { role: "tool", tool_call_id: message.callId, content: message.text };
  if (message.role === "assistant" && message.calls?.length) {
    const calls = message.calls.map(({ id, name, arguments: text }) => ({
      id,
      type: "function",
      function: { name, arguments: text },
    }));
    return { role: "assistant", content: message.text || null, tool_calls: calls };
  }
  if (!message.images?.length) return { role: message.role, content: message.text };
  const images = message.images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role: message.role, content: [...images, { type: "text", text: message.text }] };
}
