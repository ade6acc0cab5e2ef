// What happens now: running turns, speeds, the share of reused tokens, and the last turns.

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import type { EndedTurn, Live, LiveModel, RunningTurn, Saved } from "./api";
import { clock, count, percent, seconds } from "./format";
import { texts } from "./texts";

export function LiveView({ live }: { live: Live }) {
  const models = live.snapshot?.models;
  if (!models) return <p class="loading">{texts.loading}</p>;
  const minutes = addMinutes(models.map((model) => model.saved));
  const [prompt, reused] = [1, 2].map((place) => minutes.reduce((sum, minute) => sum + minute[place], 0));
  const rate = models.flatMap((model) => model.running).reduce((sum, turn) => sum + (turn.tokens_per_s ?? 0), 0);
  const sum = (figure: (model: LiveModel) => number) => models.reduce((total, model) => total + figure(model), 0);
  const disk = models.map((model) => model.cache?.disk_state).find((state) => state && state !== "ok") ?? models[0]?.cache?.disk_state;
  return (
    <>
      <section class="figures">
        <Figure name={texts.live.health} value={live.snapshot?.problem ?? texts.live.healthy} note={disk ? texts.live.diskStates[disk] : undefined} />
        <Figure name={texts.live.reusedShare} value={prompt ? percent(reused / prompt) : "–"} />
        <Figure name={texts.live.rate} value={count(rate)} />
        <Figure name={texts.live.evictions} value={count(sum((model) => model.cache?.evictions ?? 0))} />
        <Figure name={texts.live.restarts} value={count(sum((model) => model.restarts))} />
      </section>
      <section aria-labelledby="running-title">
        <h1 id="running-title">{texts.live.running}</h1>
        <Running models={models} />
      </section>
      <section aria-labelledby="chart-title">
        <h1 id="chart-title">{texts.live.chart}</h1>
        <Chart minutes={minutes} />
      </section>
      <section aria-labelledby="ended-title">
        <h1 id="ended-title">{texts.live.ended}</h1>
        <Ended models={models} />
      </section>
    </>
  );
}

function Figure({ name, value, note }: { name: string; value: string; note?: string }) {
  return (
    <div class="figure">
      <h2>{name}</h2>
      <p>{value}</p>
      {note && <p class="note">{note}</p>}
    </div>
  );
}

function Running({ models }: { models: LiveModel[] }) {
  const turns = models.flatMap((model) => model.running.map((turn) => ({ model: model.id, turn })));
  if (!turns.length) return <p class="note">{texts.live.nothing}</p>;
  return (
    <div class="wide" tabIndex={0} role="region" aria-labelledby="running-title">
      <table>
        <thead><tr>{texts.live.columns.map((name) => <th key={name} scope="col">{name}</th>)}</tr></thead>
        <tbody>{turns.map(({ model, turn }) => <RunningRow key={`${model} ${turn.turn}`} model={model} turn={turn} />)}</tbody>
      </table>
    </div>
  );
}

function RunningRow({ model, turn }: { model: string; turn: RunningTurn }) {
  const all = turn.prompt_tokens;
  return (
    <tr>
      <td>{turn.request_id ?? turn.turn}</td>
      <td>{model}</td>
      <td>
        {texts.live.states[turn.state] ?? turn.state}
        {turn.state === "prefill" && all !== null && <progress max={all} value={turn.read_tokens} aria-label={`${count(turn.read_tokens)} / ${count(all)}`} />}
      </td>
      <td>{all === null ? "–" : count(all)}</td>
      <td>{turn.reused_tokens === null ? "–" : `${count(turn.reused_tokens)}${turn.tier ? ` (${texts.tiers[turn.tier] ?? turn.tier})` : ""}`}</td>
      <td>{count(turn.output_tokens)}</td>
      <td>{turn.tokens_per_s === null ? "–" : texts.turn.rate(turn.tokens_per_s.toFixed(0))}</td>
      <td>{seconds(turn.age_s)}</td>
    </tr>
  );
}

function Ended({ models }: { models: LiveModel[] }) {
  const turns = models.flatMap((model) => model.ended.map((turn) => ({ model: model.id, turn })))
    .sort((one, other) => other.turn.time - one.turn.time);
  if (!turns.length) return <p class="note">{texts.live.noneEnded}</p>;
  return (
    <div class="log" tabIndex={0} role="log" aria-live="off" aria-labelledby="ended-title">
      {turns.map(({ model, turn }) => <p key={`${model} ${turn.request_id} ${turn.time}`} class={turn.end === "failed" ? "problem" : ""}>{line(model, turn)}</p>)}
    </div>
  );
}

/** One line for a turn, in the words of the server's log. */
function line(model: string, turn: EndedTurn): string {
  const parts = [`${clock(turn.time)} ${model} ${turn.request_id ?? ""}`];
  if (turn.prompt_tokens !== undefined) {
    const where = turn.reused_tokens && turn.tier ? ` from ${texts.tiers[turn.tier] ?? turn.tier}` : "";
    parts.push(`prompt ${count(turn.prompt_tokens)} (${count(turn.reused_tokens ?? 0)} reused${where}: ${turn.status}, ${turn.reason})`);
  }
  parts.push(`output ${count(turn.output_tokens)}`);
  if (turn.first_token_s) parts.push(`first token ${seconds(turn.first_token_s)}`);
  if (turn.tokens_per_s) parts.push(texts.turn.rate(turn.tokens_per_s.toFixed(0)));
  parts.push(`total ${seconds(turn.total_s)}`, `end=${turn.error ?? turn.end}`);
  return parts.join(", ");
}

type Minute = Saved["minutes"][number];

/** The minutes of all models, added up; the last hour without gaps. */
function addMinutes(each: Saved[]): Minute[] {
  const now = Math.floor(Date.now() / 60000);
  const found = new Map<number, Minute>();
  for (let minute = now - 59; minute <= now; minute += 1) found.set(minute, [minute, 0, 0, 0]);
  for (const [minute, ...tokens] of each.flatMap((saved) => saved.minutes)) {
    const known = found.get(minute);
    if (known) tokens.forEach((more, place) => (known[place + 1] += more));
  }
  return [...found.values()];
}

function Chart({ minutes }: { minutes: Minute[] }) {
  const element = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const data: uPlot.AlignedData = [
    minutes.map(([minute]) => minute * 60),
    minutes.map(([, , reused]) => reused),
    minutes.map(([, prompt, reused]) => prompt - reused),
  ];
  useEffect(() => {
    const box = element.current!;
    const draw = () => {
      plot.current?.destroy();
      plot.current = new uPlot(options(box.clientWidth), data, box);
    };
    draw();
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    const resized = new ResizeObserver(() => plot.current?.setSize({ width: box.clientWidth, height: 200 }));
    scheme.addEventListener("change", draw);
    resized.observe(box);
    return () => {
      scheme.removeEventListener("change", draw);
      resized.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, []);
  useEffect(() => plot.current?.setData(data), [minutes]);
  const [prompt, reused] = [1, 2].map((place) => minutes.reduce((sum, minute) => sum + minute[place], 0));
  const label = `${texts.live.reused}: ${count(reused)}, ${texts.live.computed}: ${count(prompt - reused)}`;
  return <div class="chart" ref={element} role="img" aria-label={label} />;
}

function options(width: number): uPlot.Options {
  const colour = (name: string) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const bars = uPlot.paths.bars!({ size: [0.8, 12] });
  const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line") }, ticks: { stroke: colour("--line") } };
  return {
    width,
    height: 200,
    series: [
      {},
      { label: texts.live.reused, stroke: colour("--ram"), fill: colour("--ram"), paths: bars, points: { show: false } },
      { label: texts.live.computed, stroke: colour("--computed"), width: 2, points: { show: false } },
    ],
    axes: [axis, { ...axis, size: 60, values: (_plot, values) => values.map((value) => count(value)) }],
  };
}
