// Talks to the server: requests, streams, and the live snapshots that all views share.

import { useEffect, useState } from "preact/hooks";
import { texts } from "./texts";

export class ApiError extends Error {
  constructor(readonly status: number, message: string) {
    super(message);
  }
}

const SESSION_KEY = "rekindle-key";
let apiKey = sessionStorage.getItem(SESSION_KEY) ?? "";

export const hasKey = (): boolean => apiKey !== "";

export function setKey(key: string, remember: boolean): void {
  apiKey = key;
  if (remember && key) sessionStorage.setItem(SESSION_KEY, key);
  else sessionStorage.removeItem(SESSION_KEY);
}

/** Requests are authenticated by a header only, never by a cookie, so no other page can send them. */
export async function request(path: string, options: RequestInit = {}): Promise<Response> {
  const headers = new Headers(options.headers);
  if (apiKey) headers.set("authorization", `Bearer ${apiKey}`);
  if (typeof options.body === "string") headers.set("content-type", "application/json");
  let response: Response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit" });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ApiError(0, texts.offline);
  }
  if (!response.ok) throw new ApiError(response.status, await reason(response));
  return response;
}

export async function json<T>(path: string, options: RequestInit = {}): Promise<T> {
  return (await request(path, options)).json() as Promise<T>;
}

export const post = <T>(path: string, body: unknown): Promise<T> =>
  json<T>(path, { method: "POST", body: JSON.stringify(body) });

async function reason(response: Response): Promise<string> {
  try {
    const { error } = await response.json();
    return typeof error === "string" ? error : error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

export interface ServerEvent {
  event: string;
  data: string;
}

/** The events of a stream. Comments keep the connection alive and are skipped. */
export async function* events(response: Response): AsyncGenerator<ServerEvent> {
  for await (const block of blocks(response, "\n\n")) {
    let event = "message";
    const data: string[] = [];
    for (const line of block.split("\n")) {
      if (line.startsWith("event:")) event = line.slice(6).trim();
      else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
    }
    if (data.length) yield { event, data: data.join("\n") };
  }
}

export async function* blocks(response: Response, end: string): AsyncGenerator<string> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      rest += value;
      const found = rest.split(end);
      rest = found.pop()!;
      yield* found;
    }
    if (rest) yield rest;
  } finally {
    void reader.cancel().catch(() => undefined);
  }
}

export interface RunningTurn {
  turn: number;
  request_id: string | null;
  state: string;
  age_s: number;
  prompt_tokens: number | null;
  read_tokens: number;
  reused_tokens: number | null;
  tier: string | null;
  output_tokens: number;
  tokens_per_s: number | null;
}

export interface EndedTurn {
  time: number;
  request_id: string | null;
  total_s: number;
  output_tokens: number;
  end: string;
  error?: string;
  prompt_tokens?: number;
  reused_tokens?: number;
  tier?: string | null;
  status?: string;
  reason?: string;
  first_token_s?: number | null;
  tokens_per_s?: number | null;
}

export interface Saved {
  tokens: number;
  seconds: number;
  share_of_last_hour: number | null;
  minutes: [number, number, number, number][];
  days: { day: string; tokens: number; seconds: number }[];
}

export interface CacheFigures {
  ram_bytes: number;
  disk_bytes: number;
  unique_bytes: number;
  ram_limit_bytes: number;
  disk_limit_bytes: number;
  disk_state: string;
  evictions: number;
}

export interface LiveModel {
  id: string;
  status: "loaded" | "loading" | "unloaded" | "failed";
  loading: number | null;
  reason: string | null;
  memory_bytes: number;
  context_tokens: number | null;
  modalities: string[];
  generates: boolean;
  restarts: number;
  prefill_tokens_per_s: number | null;
  running: RunningTurn[];
  ended: EndedTurn[];
  saved: Saved;
  cache: CacheFigures | null;
}

export interface Snapshot {
  problem: string | null;
  models: LiveModel[];
}

export interface Live {
  snapshot: Snapshot | null;
  isConnected: boolean;
}

/** The live snapshots, as long as the component is shown. Reconnects after every failure. */
export function useLive(onUnauthorized: () => void): Live {
  const [live, setLive] = useState<Live>({ snapshot: null, isConnected: true });
  useEffect(() => {
    const stop = new AbortController();
    void follow(stop.signal, setLive, onUnauthorized);
    return () => stop.abort();
  }, []);
  return live;
}

async function follow(
  signal: AbortSignal,
  show: (update: (before: Live) => Live) => void,
  onUnauthorized: () => void,
): Promise<void> {
  for (let wait = 500; !signal.aborted; wait = Math.min(2 * wait, 8000)) {
    try {
      const response = await request("/v1/internal/live", { signal });
      for await (const { data } of events(response)) {
        wait = 500;
        const snapshot = JSON.parse(data) as Snapshot;
        show(() => ({ snapshot, isConnected: true }));
      }
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) return onUnauthorized();
    }
    if (signal.aborted) return;
    show((before) => ({ ...before, isConnected: false }));
    await new Promise((resume) => setTimeout(resume, wait));
  }
}
