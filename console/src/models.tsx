// The models: what is loaded, what may be loaded, and downloads with progress.

import { useEffect, useState } from "preact/hooks";
import { ApiError, blocks, json, post, request, type Live, type LiveModel } from "./api";
import { bytes, count } from "./format";
import { texts } from "./texts";

interface Listed {
  id: string;
  status?: string;
  max_model_len?: number | null;
  modalities?: string[];
  progress?: number | null;
}

interface Process {
  model: string;
  pid: number | null;
  memory_bytes: number | null;
}

export function ModelsView({ live }: { live: Live }) {
  const [listed, setListed] = useState<Listed[] | null>(null);
  const [processes, setProcesses] = useState<Process[]>([]);
  const [problem, setProblem] = useState("");
  const refresh = async () => {
    const found = await json<{ data: Listed[] }>("/v1/models");
    setListed(found.data);
    const running = await json<{ processes: Process[] }>("/management/processes").catch(() => ({ processes: [] }));
    setProcesses(running.processes);
  };
  useEffect(() => {
    void refresh().catch(() => setListed([]));
    const timer = setInterval(() => void refresh().catch(() => undefined), 3000);
    return () => clearInterval(timer);
  }, []);
  const change = async (action: "load" | "unload", model: string) => {
    setProblem("");
    try {
      await post(`/v1/internal/model/${action}`, { model_name: model });
    } catch (error) {
      setProblem(explain(error));
    }
    await refresh().catch(() => undefined);
  };
  if (!listed) return <p class="loading">{texts.loading}</p>;
  return (
    <>
      <section aria-labelledby="models-title">
        <h1 id="models-title">{texts.models.title}</h1>
        {problem && <p class="problem" role="alert">{problem}</p>}
        <div class="cards">
          {listed.map((model) => (
            <ModelCard
              key={model.id}
              model={model}
              live={live.snapshot?.models.find((each) => each.id === model.id)}
              process={processes.find((each) => each.model === model.id)}
              onChange={change}
            />
          ))}
        </div>
      </section>
      <Pull onPulled={() => void refresh()} />
      <SettingsInForce />
    </>
  );
}

const explain = (error: unknown): string => {
  if (error instanceof ApiError && error.status === 403) return texts.models.adminOnly;
  return error instanceof Error ? error.message : texts.unknownError;
};

interface CardProps {
  model: Listed;
  live: LiveModel | undefined;
  process: Process | undefined;
  onChange: (action: "load" | "unload", model: string) => void;
}

const STATES: Record<string, string> = {
  loaded: texts.models.loaded,
  loading: texts.models.loading,
  unloaded: texts.models.unloaded,
  failed: texts.models.failed,
};

function ModelCard({ model, live, process, onChange }: CardProps) {
  const state = model.status ?? (live?.is_ready === false ? "loading" : "loaded");
  const facts: [string, string | null][] = [
    [texts.models.context, model.max_model_len ? count(model.max_model_len) : null],
    [texts.models.inputs, model.modalities?.join(", ") ?? null],
    [texts.models.memory, process?.memory_bytes ? bytes(process.memory_bytes) : null],
    [texts.models.prefill, live?.prefill_tokens_per_s ? texts.turn.rate(count(live.prefill_tokens_per_s)) : null],
  ];
  return (
    <article class="card" aria-label={model.id}>
      <h2>{model.id}</h2>
      <p class={`state ${state}`}>{STATES[state] ?? state}{live?.reason && state !== "unloaded" ? `: ${live.reason}` : ""}</p>
      {state === "loading" && <progress max={1} value={model.progress ?? undefined} aria-label={texts.models.loading} />}
      <dl>{facts.filter(([, value]) => value).map(([name, value]) => <><dt>{name}</dt><dd>{value}</dd></>)}</dl>
      {model.status && (state === "loaded"
        ? <button type="button" onClick={() => onChange("unload", model.id)}>{texts.models.unload}</button>
        : state !== "loading" && <button type="button" onClick={() => onChange("load", model.id)}>{texts.models.load}</button>)}
    </article>
  );
}

interface Step {
  status?: string;
  completed?: number;
  total?: number;
  error?: string;
}

function Pull({ onPulled }: { onPulled: () => void }) {
  const [name, setName] = useState("");
  const [step, setStep] = useState<Step | null>(null);
  const [problem, setProblem] = useState("");
  const pull = async (event: Event) => {
    event.preventDefault();
    setProblem("");
    setStep({ status: texts.loading });
    try {
      const response = await request("/api/pull", { method: "POST", body: JSON.stringify({ model: name.trim(), stream: true }) });
      for await (const row of blocks(response, "\n")) {
        if (!row.trim()) continue;
        const found = JSON.parse(row) as Step;
        if (found.error) throw new Error(found.error);
        setStep(found);
      }
      setStep({ status: texts.models.pulled });
      onPulled();
    } catch (error) {
      setStep(null);
      setProblem(explain(error));
    }
  };
  return (
    <section aria-labelledby="pull-title">
      <h1 id="pull-title">{texts.models.pull}</h1>
      <form class="toolbar" onSubmit={pull}>
        <label>
          {texts.chat.model}{" "}
          <input required value={name} placeholder={texts.models.pullHint} size={50} onInput={(event) => setName(event.currentTarget.value)} />
        </label>
        <button>{texts.models.pullButton}</button>
      </form>
      <div role="status">
        {step && <p>{step.status} {step.total ? `${bytes(step.completed ?? 0)} / ${bytes(step.total)}` : ""}</p>}
        {step?.total && <progress max={step.total} value={step.completed ?? 0} aria-label={texts.models.pull} />}
      </div>
      {problem && <p class="problem" role="alert">{problem}</p>}
    </section>
  );
}

interface Setting {
  name: string;
  value: string;
  source: string;
}

function SettingsInForce() {
  const [settings, setSettings] = useState<Setting[]>([]);
  useEffect(() => {
    void json<{ settings: Setting[] }>("/v1/internal/settings").then((found) => setSettings(found.settings), () => undefined);
  }, []);
  if (!settings.length) return null;
  return (
    <section>
      <details>
        <summary>{texts.models.settings}</summary>
        <div class="wide">
          <table>
            <tbody>
              {settings.map(({ name, value, source }) => (
                <tr key={name}><th scope="row"><code>{name}</code></th><td>{value}</td><td class="note">{texts.models.from} {source}</td></tr>
              ))}
            </tbody>
          </table>
        </div>
      </details>
    </section>
  );
}
