// The models: what is loaded, what may be loaded, and downloads with progress.

import { useEffect, useState } from "preact/hooks";
import { ApiError, blocks, json, post, request, type Live, type LiveModel } from "./api";
import { bytes, count } from "./format";
import { texts } from "./texts";

export function ModelsView({ live }: { live: Live }) {
  const [problem, setProblem] = useState("");
  const change = async (action: "load" | "unload", model: string) => {
    setProblem("");
    try {
      await post(`/v1/internal/model/${action}`, { model });
    } catch (error) {
      setProblem(explain(error));
    }
  };
  if (!live.snapshot) return <p class="loading">{texts.loading}</p>;
  return (
    <>
      <section aria-labelledby="models-title">
        <h1 id="models-title">{texts.models.title}</h1>
        {problem && <p class="problem" role="alert">{problem}</p>}
        <div class="cards">
          {live.snapshot.models.map((model) => <ModelCard key={model.id} model={model} onChange={change} />)}
        </div>
      </section>
      <Pull />
      <SettingsInForce />
    </>
  );
}

const explain = (error: unknown): string => {
  if (error instanceof ApiError && error.status === 403) return texts.models.adminOnly;
  return error instanceof Error ? error.message : texts.unknownError;
};

interface CardProps {
  model: LiveModel;
  onChange: (action: "load" | "unload", model: string) => void;
}

function ModelCard({ model, onChange }: CardProps) {
  const { id, status, loading, reason } = model;
  const facts: [string, string | null][] = [
    [texts.models.context, model.context_tokens ? texts.models.tokens(count(model.context_tokens)) : null],
    [texts.models.inputs, model.modalities.join(", ") || null],
    [texts.models.memory, model.memory_bytes ? bytes(model.memory_bytes) : null],
    [texts.models.prefill, model.prefill_tokens_per_s ? texts.turn.rate(count(model.prefill_tokens_per_s)) : null],
  ];
  const isUp = status === "loaded" || status === "loading";
  return (
    <article class="card" aria-label={id}>
      <h2>{id}</h2>
      <p class={`state ${status}`}>{texts.models[status]}{reason && `: ${reason}`}</p>
      {status === "loading" && <progress max={1} value={loading ?? undefined} aria-label={texts.models.loading} />}
      <dl>{facts.filter(([, value]) => value).map(([name, value]) => <><dt>{name}</dt><dd>{value}</dd></>)}</dl>
      <button type="button" onClick={() => onChange(isUp ? "unload" : "load", id)}>{isUp ? texts.models.unload : texts.models.load}</button>
    </article>
  );
}

interface Step {
  status?: string;
  completed?: number;
  total?: number;
  error?: string;
}

function Pull() {
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
  value: unknown;
  from: string;
}

const shown = (value: unknown): string =>
  value === null || (Array.isArray(value) && !value.length) ? texts.models.unset : Array.isArray(value) ? value.join(", ") : String(value);

function SettingsInForce() {
  const [settings, setSettings] = useState<[string, Setting][]>([]);
  useEffect(() => {
    void json<{ settings: Record<string, Setting> }>("/v1/internal/settings").then((found) => setSettings(Object.entries(found.settings)), () => undefined);
  }, []);
  if (!settings.length) return null;
  return (
    <section>
      <details>
        <summary>{texts.models.settings}</summary>
        <div class="wide" tabIndex={0} role="region" aria-label={texts.models.settings}>
          <table>
            <tbody>
              {settings.map(([name, { value, from }]) => (
                <tr key={name}><th scope="row"><code>{name}</code></th><td>{shown(value)}</td><td class="note">{from}</td></tr>
              ))}
            </tbody>
          </table>
        </div>
      </details>
    </section>
  );
}
