// The chat: conversations kept in the browser, with branches, images, tool calls and the bar of each turn.

import { memo } from "preact/compat";
import { useCallback, useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { Live } from "./api";
import * as archive from "./archive";
import {
  add, children, newConversation, newId, path, replace, requestMessages, show,
  type Conversation, type Message, type Settings, type ToolCall,
} from "./conversation";
import { count } from "./format";
import { copy, Markdown } from "./markdown";
import { texts } from "./texts";
import { runTurn, type Progress } from "./turn";
import { TurnBar } from "./turnbar";

const SAVE_AFTER_MS = 400;
const UNDO_MS = 6000;
const MAX_IMAGE_BYTES = 12_000_000;

export function ChatView({ live }: { live: Live }) {
  const models = (live.snapshot?.models ?? []).filter((model) => model.generates);
  const store = useConversations(models[0]?.id ?? "default");
  const { current } = store;
  const turn = useTurn(store, live);
  const [isListOpen, setListOpen] = useState(false);
  if (!current) return <p class="loading">{texts.loading}</p>;
  const model = models.find((each) => each.id === current.model);
  return (
    <>
      <ConversationList store={store} isOpen={isListOpen} onClose={() => setListOpen(false)} />
      <section class="talk" aria-label={current.title || texts.chat.untitled}>
        <div class="toolbar">
          <button type="button" class="list-toggle" aria-expanded={isListOpen} onClick={() => setListOpen(!isListOpen)}>
            {texts.chat.conversations}
          </button>
          <label>
            <span class="hidden">{texts.chat.model}</span>
            <select value={current.model} onChange={(event) => store.change({ ...current, model: event.currentTarget.value })}>
              {!model && <option value={current.model}>{current.model}</option>}
              {models.map((each) => <option key={each.id} value={each.id}>{each.id}</option>)}
            </select>
          </label>
          <SettingsPanel key={current.id} conversation={current} onChange={store.change} />
        </div>
        <Messages conversation={current} turn={turn} onChange={store.change} />
        <Composer
          key={current.id}
          isBusy={turn.isBusy}
          takesImages={model?.modalities.includes("image") ?? false}
          onSend={(text, images) => turn.send(current, { text, images })}
          onStop={turn.stop}
        />
      </section>
    </>
  );
}

// -- conversations in the browser -------------------------------------------------------------------

interface Store {
  all: Conversation[];
  current: Conversation | null;
  open: (id: string) => void;
  create: () => void;
  change: (conversation: Conversation) => void;
  /** Change the latest state of a conversation, whatever has changed since it was shown. */
  update: (id: string, changed: (latest: Conversation) => Conversation) => void;
  remove: (id: string) => void;
  removed: Conversation | null;
  restore: () => void;
}

function useConversations(model: string): Store {
  const [all, setAll] = useState<Conversation[] | null>(null);
  const [currentId, setCurrentId] = useState("");
  const [removed, setRemoved] = useState<Conversation | null>(null);
  const saving = useRef(new Map<string, number>());
  const latest = useRef<Conversation[]>([]);
  latest.current = all ?? [];
  useEffect(() => {
    void archive.readAll().then((found) => {
      const first = found[0] ?? newConversation(model);
      setAll(found.length ? found : [first]);
      setCurrentId(first.id);
    });
  }, []);
  const change = useCallback((conversation: Conversation) => {
    latest.current = latest.current.map((each) => (each.id === conversation.id ? conversation : each));
    setAll((before) => [conversation, ...(before ?? []).filter((each) => each.id !== conversation.id)]
      .sort((one, other) => other.usedAt - one.usedAt));
    clearTimeout(saving.current.get(conversation.id));
    saving.current.set(conversation.id, setTimeout(() => void archive.write(conversation), SAVE_AFTER_MS));
  }, []);
  const update: Store["update"] = useCallback((id, changed) => {
    const known = latest.current.find((each) => each.id === id);
    if (!known) return;
    const next = changed(known);
    latest.current = latest.current.map((each) => (each.id === id ? next : each));
    change(next);
  }, []);
  const create = useCallback(() => {
    const fresh = newConversation(model);
    setAll((before) => [fresh, ...(before ?? [])]);
    setCurrentId(fresh.id);
  }, [model]);
  const remove = (id: string) => {
    const rest = (all ?? []).filter((each) => each.id !== id);
    setRemoved(all?.find((each) => each.id === id) ?? null);
    clearTimeout(saving.current.get(id));
    void archive.remove(id);
    setAll(rest);
    if (id !== currentId) return;
    if (rest[0]) setCurrentId(rest[0].id);
    else create();
  };
  useEffect(() => {
    const timer = setTimeout(() => setRemoved(null), UNDO_MS);
    return () => clearTimeout(timer);
  }, [removed]);
  const restore = () => {
    if (removed) change(removed);
    setRemoved(null);
  };
  const current = all?.find((each) => each.id === currentId) ?? null;
  const isNew = current?.model === "default" && model !== "default" && !current.leaf;
  useEffect(() => {
    if (isNew) update(current!.id, (latest) => (latest.leaf ? latest : { ...latest, model }));
  }, [isNew]);
  return { all: all ?? [], current, open: setCurrentId, create, change, update, remove, removed, restore };
}

function ConversationList({ store, isOpen, onClose }: { store: Store; isOpen: boolean; onClose: () => void }) {
  return (
    <aside class={isOpen ? "conversations open" : "conversations"} aria-label={texts.chat.conversations}>
      <button type="button" class="primary" onClick={() => (store.create(), onClose())}>{texts.chat.fresh}</button>
      <ul>
        {store.all.map((each) => (
          <li key={each.id}>
            <button
              type="button"
              class="open"
              aria-current={each.id === store.current?.id ? "true" : undefined}
              onClick={() => (store.open(each.id), onClose())}
            >
              {each.title || texts.chat.untitled}
            </button>
            <button type="button" class="small" aria-label={`${texts.chat.remove}: ${each.title}`} onClick={() => store.remove(each.id)}>×</button>
          </li>
        ))}
      </ul>
      <div role="status">
        {store.removed && (
          <p>{texts.chat.removed} <button type="button" onClick={store.restore}>{texts.chat.undo}</button></p>
        )}
      </div>
    </aside>
  );
}

// -- settings ---------------------------------------------------------------------------------------

const NUMBERS: { name: keyof Settings; label: string; min: number; max?: number; step: number }[] = [
  { name: "temperature", label: texts.chat.temperature, min: 0, max: 2, step: 0.1 },
  { name: "top_p", label: texts.chat.topP, min: 0, max: 1, step: 0.05 },
  { name: "top_k", label: texts.chat.topK, min: 0, step: 1 },
  { name: "max_tokens", label: texts.chat.maxTokens, min: 1, step: 1 },
  { name: "seed", label: texts.chat.seed, min: 0, step: 1 },
];

function SettingsPanel({ conversation, onChange }: { conversation: Conversation; onChange: (changed: Conversation) => void }) {
  const set = (settings: Settings) => onChange({ ...conversation, settings });
  return (
    <details class="settings">
      <summary>{texts.chat.settings}</summary>
      <div class="fields">
        <label class="wide">
          {texts.chat.system}
          <textarea rows={3} value={conversation.system} onInput={(event) => onChange({ ...conversation, system: event.currentTarget.value })} />
        </label>
        {NUMBERS.map(({ name, label, ...limits }) => (
          <label key={name}>
            {label}
            <input
              type="number"
              {...limits}
              placeholder={texts.chat.byDefault}
              value={conversation.settings[name] ?? ""}
              onInput={(event) => {
                const { [name]: _, ...rest } = conversation.settings;
                const value = event.currentTarget.valueAsNumber;
                set(Number.isNaN(value) ? rest : { ...rest, [name]: value });
              }}
            />
          </label>
        ))}
        <label class="wide">
          {texts.chat.tools}
          <textarea rows={4} class="code" spellcheck={false} value={conversation.tools} onInput={(event) => onChange({ ...conversation, tools: event.currentTarget.value })} />
          {toolsOf(conversation) === undefined && <span class="problem" role="alert">{texts.chat.badTools}</span>}
        </label>
      </div>
    </details>
  );
}

/** The tools of a conversation; null without any, and undefined if they are not a JSON list. */
function toolsOf(conversation: Conversation): unknown[] | null | undefined {
  if (!conversation.tools.trim()) return null;
  try {
    const tools = JSON.parse(conversation.tools);
    return Array.isArray(tools) ? tools : undefined;
  } catch {
    return undefined;
  }
}

// -- running a turn ---------------------------------------------------------------------------------

interface NewMessage {
  text: string;
  images?: string[];
}

interface Turn {
  isBusy: boolean;
  /** The message that is being written, and how far it is. */
  messageId: string | null;
  progress: Progress | null;
  announcement: string;
  send: (conversation: Conversation, message: NewMessage, parent?: string | null) => void;
  answer: (conversation: Conversation, call: ToolCall, result: string) => void;
  retry: (conversation: Conversation, message: Message) => void;
  stop: () => void;
}

function useTurn(store: Store, live: Live): Turn {
  const [progress, setProgress] = useState<Progress | null>(null);
  const [messageId, setMessageId] = useState<string | null>(null);
  const [announcement, setAnnouncement] = useState("");
  const stopping = useRef<AbortController | null>(null);
  const snapshot = useRef(live.snapshot);
  snapshot.current = live.snapshot;

  const run = async (conversation: Conversation, parent: string | null) => {
    const tools = toolsOf(conversation);
    if (stopping.current || tools === undefined) return;
    stopping.current = new AbortController();
    const reply: Message = { id: newId(), parent, role: "assistant", text: "" };
    store.change(add(conversation, reply));
    setMessageId(reply.id);
    setAnnouncement(texts.chat.waiting);
    let latest: Progress | null = null;
    let frame = 0;
    const draw = () => {
      frame = 0;
      setProgress(latest);
    };
    const known = snapshot.current?.models.find((model) => model.id === conversation.model);
    try {
      const outcome = await runTurn(
        {
          model: conversation.model,
          messages: requestMessages(conversation, parent),
          settings: conversation.settings,
          tools,
          prefillTokensPerS: known?.prefill_tokens_per_s ?? null,
        },
        (now) => {
          latest = now;
          frame ||= requestAnimationFrame(draw);
        },
        stopping.current.signal,
      );
      finish(conversation, reply, latest, outcome);
      setAnnouncement(outcome.end === "stopped" ? texts.chat.stopped : texts.chat.finished);
    } catch (error) {
      const message = error instanceof Error ? error.message : texts.unknownError;
      finish(conversation, reply, latest, { error: message });
      setAnnouncement(message);
    }
    cancelAnimationFrame(frame);
    stopping.current = null;
    setProgress(null);
    setMessageId(null);
  };

  const finish = (conversation: Conversation, reply: Message, got: Progress | null, more: Partial<Message>) => {
    const whole: Message = { ...reply, text: got?.text ?? "", ...more };
    if (got?.reasoning) whole.reasoning = got.reasoning;
    if (got?.calls.length) whole.calls = got.calls;
    store.update(conversation.id, (latest) => replace(latest, whole));
  };

  const send = (conversation: Conversation, message: NewMessage, parent = conversation.leaf) => {
    const sent: Message = { id: newId(), parent, role: "user", ...message };
    void run(add(conversation, sent), sent.id);
  };
  const answer = (conversation: Conversation, call: ToolCall, result: string) => {
    const sent: Message = { id: newId(), parent: conversation.leaf, role: "tool", text: result, callId: call.id };
    const changed = add(conversation, sent);
    const asking = path(changed).findLast((each) => each.calls?.length);
    const answered = new Set(path(changed).map((each) => each.callId));
    if (asking?.calls?.every((each) => answered.has(each.id))) void run(changed, sent.id);
    else store.change(changed);
  };
  return {
    isBusy: messageId !== null,
    messageId,
    progress,
    announcement,
    send,
    answer,
    retry: (conversation, message) => void run(conversation, message.parent),
    stop: () => stopping.current?.abort(),
  };
}

// -- messages ---------------------------------------------------------------------------------------

function Messages({ conversation, turn, onChange }: { conversation: Conversation; turn: Turn; onChange: (changed: Conversation) => void }) {
  const shown = useMemo(() => path(conversation), [conversation.messages, conversation.leaf]);
  const versions = useMemo(() => children(conversation), [conversation.messages]);
  const box = useRef<HTMLDivElement>(null);
  const isAtEnd = useRef(true);
  // The latest values, so that the handlers and with them finished messages never change.
  const latest = useRef({ conversation, turn, onChange });
  latest.current = { conversation, turn, onChange };
  const actions = useMemo<Actions>(() => ({
    edit: (message, text) => latest.current.turn.send(latest.current.conversation, { text, images: message.images }, message.parent),
    retry: (message) => latest.current.turn.retry(latest.current.conversation, message),
    show: (id) => latest.current.onChange(show(latest.current.conversation, id)),
    answer: (call, result) => latest.current.turn.answer(latest.current.conversation, call, result),
  }), []);
  useEffect(() => {
    if (isAtEnd.current && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [turn.progress, shown.length, conversation.id]);
  const onScroll = () => {
    const { scrollTop, scrollHeight, clientHeight } = box.current!;
    isAtEnd.current = scrollHeight - scrollTop - clientHeight < 60;
  };
  const diverged = divergedMessage(conversation, shown);
  return (
    <div class="messages" ref={box} onScroll={onScroll} tabIndex={0} role="log" aria-label={conversation.title || texts.chat.untitled} aria-live="off">
      {!shown.length && (
        <div class="welcome">
          <h1>{texts.chat.welcome}</h1>
          <p>{texts.chat.welcomeText}</p>
        </div>
      )}
      {shown.map((message) => {
        const siblings = (versions.get(message.parent) ?? []).filter((each) => each.role === message.role);
        const place = siblings.indexOf(message);
        return (
          <MessageView
            key={message.id}
            message={message}
            previous={siblings[place - 1]?.id}
            next={siblings[place + 1]?.id}
            place={place + 1}
            of={siblings.length}
            progress={message.id === turn.messageId ? turn.progress : null}
            isWriting={message.id === turn.messageId}
            isBusy={turn.isBusy}
            isDiverged={message.id === diverged}
            isLast={message.id === conversation.leaf}
            answered={message.calls ? answeredCalls(shown, message) : ""}
            actions={actions}
          />
        );
      })}
      <p class="hidden" role="status">{turn.announcement}</p>
    </div>
  );
}

/** The message at which the last turn's prompt differed from what was stored. */
function divergedMessage(conversation: Conversation, shown: Message[]): string | null {
  const place = shown.findLast((each) => each.report)?.report?.diverged?.message;
  if (place === null || place === undefined) return null;
  return shown[place - (conversation.system ? 1 : 0)]?.id ?? null;
}

const answeredCalls = (shown: Message[], asking: Message): string =>
  shown.slice(shown.indexOf(asking)).map((each) => each.callId ?? "").filter(Boolean).join(" ");

interface Actions {
  edit: (message: Message, text: string) => void;
  retry: (message: Message) => void;
  show: (id: string) => void;
  answer: (call: ToolCall, result: string) => void;
}

interface MessageProps {
  message: Message;
  previous: string | undefined;
  next: string | undefined;
  place: number;
  of: number;
  progress: Progress | null;
  isWriting: boolean;
  isBusy: boolean;
  isDiverged: boolean;
  isLast: boolean;
  answered: string;
  actions: Actions;
}

const AUTHORS = { user: texts.chat.you, assistant: texts.chat.assistant, tool: texts.chat.tool };

const MessageView = memo(function MessageView(props: MessageProps) {
  const { message, progress, actions, isBusy } = props;
  const [edited, setEdited] = useState<string | null>(null);
  const text = progress?.text || message.text;
  const reasoning = progress?.reasoning || message.reasoning;
  const calls = progress?.calls.length ? progress.calls : message.calls;
  const isUser = message.role === "user";
  return (
    <article class={`message ${message.role}`} aria-label={AUTHORS[message.role]}>
      <h2>{AUTHORS[message.role]}</h2>
      {props.isDiverged && <p class="diverged">{texts.turn.diverged}</p>}
      {message.images?.map((url, place) => <img key={place} src={url} alt={`${texts.chat.image} ${place + 1}`} />)}
      {reasoning && (
        <details class="folded"><summary>{texts.chat.reasoning}</summary><Markdown text={reasoning} /></details>
      )}
      {edited !== null ? (
        <form class="edit" onSubmit={(event) => (event.preventDefault(), actions.edit(message, edited), setEdited(null))}>
          <textarea aria-label={texts.chat.edit} rows={4} value={edited} onInput={(event) => setEdited(event.currentTarget.value)} />
          <button class="primary">{texts.chat.save}</button>
          <button type="button" onClick={() => setEdited(null)}>{texts.chat.cancel}</button>
        </form>
      ) : isUser || message.role === "tool" ? (
        <p class="plain" dir="auto">{text}</p>
      ) : (
        text && <Markdown text={text} />
      )}
      {calls?.map((call) => (
        <CallView key={call.id} call={call} mayAnswer={!props.isWriting && !props.answered.split(" ").includes(call.id)} onAnswer={actions.answer} />
      ))}
      {props.isWriting && <Waiting progress={progress} />}
      {message.error && <p class="problem" role="alert">{message.error}</p>}
      {message.end && <p class="note">{message.end === "length" ? texts.chat.cut : texts.chat.stopped}</p>}
      {message.report && <TurnBar report={message.report} />}
      <div class="actions">
        {props.of > 1 && (
          <span class="versions">
            <button type="button" class="small" aria-label={texts.chat.earlier} disabled={!props.previous || isBusy} onClick={() => actions.show(props.previous!)}>‹</button>
            <span aria-label={texts.chat.version(props.place, props.of)}>{props.place}/{props.of}</span>
            <button type="button" class="small" aria-label={texts.chat.later} disabled={!props.next || isBusy} onClick={() => actions.show(props.next!)}>›</button>
          </span>
        )}
        {isUser && edited === null && <button type="button" class="small" disabled={isBusy} onClick={() => setEdited(message.text)}>{texts.chat.edit}</button>}
        {message.role === "assistant" && !props.isWriting && (
          <>
            <button type="button" class="small" disabled={isBusy} onClick={() => actions.retry(message)}>{texts.chat.retry}</button>
            {text && <button type="button" class="small" onClick={(event) => void copy(text, event.currentTarget)}>{texts.copy}</button>}
          </>
        )}
      </div>
    </article>
  );
});

function Waiting({ progress }: { progress: Progress | null }) {
  const read = progress?.read;
  if (read && read.done < read.all) {
    return (
      <p class="reading">
        <progress max={read.all} value={read.done} aria-label={texts.chat.reading(count(read.done), count(read.all))} />
        {texts.chat.reading(count(read.done), count(read.all))}
      </p>
    );
  }
  return <p class="note writing">{progress?.text || progress?.calls.length ? texts.chat.writing : texts.chat.waiting}</p>;
}

function CallView({ call, mayAnswer, onAnswer }: { call: ToolCall; mayAnswer: boolean; onAnswer: Actions["answer"] }) {
  const [result, setResult] = useState("");
  return (
    <div class="call">
      <details class="folded">
        <summary>{texts.chat.call(call.name)}</summary>
        <pre tabIndex={0}>{call.arguments}</pre>
      </details>
      {mayAnswer && (
        <form onSubmit={(event) => (event.preventDefault(), onAnswer(call, result))}>
          <label>
            {texts.chat.answerCall(call.name)}
            <textarea rows={2} class="code" value={result} onInput={(event) => setResult(event.currentTarget.value)} />
          </label>
          <button>{texts.chat.sendResult}</button>
        </form>
      )}
    </div>
  );
}

// -- writing a message ------------------------------------------------------------------------------

interface ComposerProps {
  isBusy: boolean;
  takesImages: boolean;
  onSend: (text: string, images: string[]) => void;
  onStop: () => void;
}

function Composer({ isBusy, takesImages, onSend, onStop }: ComposerProps) {
  const [text, setText] = useState("");
  const [images, setImages] = useState<string[]>([]);
  const input = useRef<HTMLTextAreaElement>(null);
  const file = useRef<HTMLInputElement>(null);
  useEffect(() => input.current?.focus(), []);
  const attach = async (files: Iterable<File>) => {
    for (const each of files) {
      if (!takesImages || !each.type.startsWith("image/") || each.size > MAX_IMAGE_BYTES) continue;
      const url = await dataUrl(each);
      setImages((before) => [...before, url]);
    }
  };
  const send = (event: Event) => {
    event.preventDefault();
    if (isBusy || !(text.trim() || images.length)) return;
    onSend(text, images);
    setText("");
    setImages([]);
  };
  return (
    <form
      class="composer"
      onSubmit={send}
      onDragOver={(event) => event.preventDefault()}
      onDrop={(event) => (event.preventDefault(), void attach(event.dataTransfer?.files ?? []))}
    >
      {images.map((url, place) => (
        <span key={place} class="attached">
          <img src={url} alt={`${texts.chat.image} ${place + 1}`} />
          <button type="button" class="small" aria-label={texts.chat.detach} onClick={() => setImages(images.filter((_, at) => at !== place))}>×</button>
        </span>
      ))}
      <textarea
        ref={input}
        rows={Math.min(10, Math.max(2, text.split("\n").length))}
        aria-label={texts.chat.input}
        placeholder={texts.chat.placeholder}
        value={text}
        onInput={(event) => setText(event.currentTarget.value)}
        onKeyDown={(event) => {
          if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
          if (event.key === "Escape" && isBusy) onStop();
        }}
        onPaste={(event) => void attach(event.clipboardData?.files ?? [])}
      />
      <input ref={file} hidden type="file" accept="image/*" multiple onChange={(event) => {
        void attach(event.currentTarget.files ?? []);
        event.currentTarget.value = "";
      }} />
      <button type="button" disabled={!takesImages} title={takesImages ? texts.chat.attach : texts.chat.takesNoImages} aria-label={texts.chat.attach} onClick={() => file.current?.click()}>+</button>
      {isBusy
        ? <button type="button" class="primary" onClick={onStop}>{texts.chat.stop}</button>
        : <button class="primary" disabled={!(text.trim() || images.length)}>{texts.chat.send}</button>}
    </form>
  );
}

function dataUrl(file: File): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result as string);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
