// Runs one turn: sends the messages, and reports the response piece by piece.

import { events, request } from "./api";
import type { Report, Settings, ToolCall } from "./conversation";

export interface TurnRequest {
  model: string;
  messages: unknown[];
  settings: Settings;
  tools: unknown[] | null;
  prefillTokensPerS: number | null;
}

export interface Progress {
  text: string;
  reasoning: string;
  calls: ToolCall[];
  read: { done: number; all: number } | null;
}

export interface Outcome {
  report?: Report;
  end?: "length" | "stopped";
}

/** Throws if the server refuses the request or the stream ends with an error. */
export async function runTurn(turn: TurnRequest, show: (progress: Progress) => void, signal: AbortSignal): Promise<Outcome> {
  const progress: Progress = { text: "", reasoning: "", calls: [], read: null };
  const begunMs = performance.now();
  let firstMs: number | null = null;
  let end: string | null = null;
  let usage: Usage | null = null;
  let reuse: Reuse | null = null;
  let rate: number | null = null;
  const body = {
    model: turn.model,
    messages: turn.messages,
    ...turn.settings,
    ...(turn.tools ? { tools: turn.tools } : {}),
    stream: true,
    stream_options: { include_usage: true },
    return_cache_key: true,
    prefill_progress: true,
  };
  try {
    const response = await request("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
    for await (const { event, data } of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (event === "x_cache") reuse = chunk;
      if (chunk.usage) usage = chunk.usage;
      if (chunk.timings) rate = chunk.timings.predicted_per_second;
      if (chunk.prefill_progress) {
        progress.read = { done: chunk.prefill_progress.done_tokens, all: chunk.prefill_progress.prompt_tokens };
        show({ ...progress });
      }
      const [choice] = chunk.choices;
      if (!choice) continue;
      end = choice.finish_reason ?? end;
      if (take(progress, choice.delta)) {
        firstMs ??= performance.now();
        progress.read = null;
        show({ ...progress, calls: progress.calls.map((call) => ({ ...call })) });
      }
    }
  } catch (error) {
    if (signal.aborted) return { end: "stopped" };
    throw error;
  }
  const report = usage && reuse ? reportOf(usage, reuse, (firstMs ?? performance.now()) - begunMs, rate, turn) : undefined;
  return { report, end: end === "length" ? "length" : undefined };
}

interface Delta {
  content?: string | null;
  reasoning_content?: string | null;
  tool_calls?: { index: number; id?: string; function?: { name?: string; arguments?: string } }[];
}

function take(progress: Progress, delta: Delta): boolean {
  const hasCalls = Boolean(delta.tool_calls?.length);
  if (!delta.content && !delta.reasoning_content && !hasCalls) return false;
  progress.text += delta.content ?? "";
  progress.reasoning += delta.reasoning_content ?? "";
  for (const piece of delta.tool_calls ?? []) {
    const call = (progress.calls[piece.index] ??= { id: "", name: "", arguments: "" });
    call.id = piece.id ?? call.id;
    call.name += piece.function?.name ?? "";
    call.arguments += piece.function?.arguments ?? "";
  }
  return true;
}

interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  first_token_time?: { restore: number };
}

interface Reuse {
  reused_tokens: number;
  tier: string | null;
  status: string;
  reason: string;
  diverged_at?: Report["diverged"];
}

function reportOf(usage: Usage, reuse: Reuse, firstMs: number, rate: number | null, turn: TurnRequest): Report {
  const firstTokenS = firstMs / 1000;
  const computingS = turn.prefillTokensPerS ? reuse.reused_tokens / turn.prefillTokensPerS : null;
  return {
    promptTokens: usage.prompt_tokens,
    reusedTokens: reuse.reused_tokens,
    outputTokens: usage.completion_tokens,
    tier: reuse.tier,
    status: reuse.status,
    reason: reuse.reason,
    diverged: reuse.diverged_at ?? null,
    firstTokenS,
    coldS: computingS === null ? null : firstTokenS + computingS - (usage.first_token_time?.restore ?? 0),
    tokensPerS: rate,
  };
}
