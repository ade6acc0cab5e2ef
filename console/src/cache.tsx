// The cache: all entries in a table, what sharing and reuse save, and the tree of shared prefixes.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { json, request, type CacheFigures, type Live, type Saved } from "./api";
import { bytes, count, distance, percent, seconds, visible } from "./format";
import { texts } from "./texts";
import { PrefixTrees } from "./tree";

const PAGE = 1000;
const MAX_ENTRIES = 50_000;
const ROW_PX = 36;
const UNDO_MS = 5000;

export interface Entry {
  cache_key: string;
  model: string;
  token_count: number;
  stored_tokens: number;
  tier: string | null;
  size_bytes: number;
  hit_count: number;
  pinned: boolean;
  ttl: number | null;
  created_at: number;
  last_used: number;
  expires_at: number | null;
  names: { kind: string; name: string }[];
  preview: string;
  tenant?: string;
  segments: { type: string; hash: string }[];
}

type Column = "preview" | "token_count" | "size_bytes" | "tier" | "hit_count" | "last_used" | "expires_at";
const COLUMNS: Column[] = ["preview", "token_count", "size_bytes", "tier", "hit_count", "last_used", "expires_at"];

export function CacheView({ live }: { live: Live }) {
  const entries = useEntries();
  return (
    <>
      <Summary live={live} />
      <section aria-labelledby="entries-title">
        <h1 id="entries-title">{texts.cache.title}</h1>
        {entries.problem && <p class="problem" role="alert">{entries.problem}</p>}
        <EntryTable {...entries} />
      </section>
      <PrefixTrees />
    </>
  );
}

// -- figures ----------------------------------------------------------------------------------------

function Summary({ live }: { live: Live }) {
  const models = live.snapshot?.models ?? [];
  const figures = models.flatMap((model) => (model.cache ? [model.cache] : []));
  const sum = (name: keyof CacheFigures) => figures.reduce((total, each) => total + (each[name] as number), 0);
  const saved = addSaved(models.map((model) => model.saved));
  return (
    <section class="figures">
      <Gauge name={texts.cache.ram} tier="ram" used={sum("ram_bytes")} limit={sum("ram_limit_bytes")} />
      <Gauge name={texts.cache.disk} tier="disk" used={sum("disk_bytes")} limit={Math.max(0, ...figures.map((each) => each.disk_limit_bytes))} />
      <Sharing />
      <div class="figure">
        <h2>{texts.cache.saved}</h2>
        <p>{texts.cache.savedTokens(count(saved.tokens))}{saved.seconds > 0 && texts.cache.savedTime(seconds(saved.seconds))}</p>
        {saved.days.length > 0 && (
          <details>
            <summary>{texts.cache.perDay}</summary>
            <table>
              <tbody>
                {saved.days.map(({ day, tokens, seconds: time }) => (
                  <tr key={day}><th scope="row">{day}</th><td>{count(tokens)}</td><td>{seconds(time)}</td></tr>
                ))}
              </tbody>
            </table>
          </details>
        )}
      </div>
    </section>
  );
}

export function addSaved(each: Saved[]): { tokens: number; seconds: number; days: Saved["days"] } {
  const days = new Map<string, { day: string; tokens: number; seconds: number }>();
  for (const { day, tokens, seconds: time } of each.flatMap((saved) => saved.days)) {
    const known = days.get(day) ?? { day, tokens: 0, seconds: 0 };
    days.set(day, { day, tokens: known.tokens + tokens, seconds: known.seconds + time });
  }
  return {
    tokens: each.reduce((total, saved) => total + saved.tokens, 0),
    seconds: each.reduce((total, saved) => total + saved.seconds, 0),
    days: [...days.values()].sort((one, other) => other.day.localeCompare(one.day)),
  };
}

function Gauge({ name, tier, used, limit }: { name: string; tier: string; used: number; limit: number }) {
  const share = limit ? Math.min(1, used / limit) : 0;
  return (
    <div class="figure">
      <h2>{name}</h2>
      <p>{bytes(used)}{limit > 0 && ` / ${bytes(limit)} (${percent(share)})`}</p>
      {limit > 0 && (
        <div class="gauge" role="meter" aria-label={name} aria-valuemin={0} aria-valuemax={limit} aria-valuenow={used} aria-valuetext={`${bytes(used)} / ${bytes(limit)}`}>
          <span class={`tier-${tier}`} style={{ width: `${100 * share}%` }} />
        </div>
      )}
    </div>
  );
}

function Sharing() {
  const [stats, setStats] = useState<{ unique_bytes: number; logical_bytes: number } | null>(null);
  useEffect(() => {
    let isShown = true;
    const ask = () => json<{ unique_bytes: number; logical_bytes: number }>("/v1/cache/stats")
      .then((found) => isShown && setStats(found), () => undefined);
    void ask();
    const timer = setInterval(ask, 15_000);
    return () => {
      isShown = false;
      clearInterval(timer);
    };
  }, []);
  const saved = stats ? Math.max(0, stats.logical_bytes - stats.unique_bytes) : 0;
  return (
    <div class="figure">
      <h2>{texts.cache.sharing}</h2>
      <p>{bytes(saved)}</p>
    </div>
  );
}

// -- entries ----------------------------------------------------------------------------------------

interface Entries {
  entries: Entry[] | null;
  problem: string;
  leaving: Set<string>;
  reload: () => void;
  pin: (entry: Entry) => void;
  remove: (entry: Entry) => void;
  keep: (entry: Entry) => void;
}

function useEntries(): Entries {
  const [entries, setEntries] = useState<Entry[] | null>(null);
  const [problem, setProblem] = useState("");
  const [leaving, setLeaving] = useState(new Set<string>());
  const timers = useRef(new Map<string, number>());
  const guard = async (action: Promise<void>) => {
    try {
      await action;
      setProblem("");
    } catch (error) {
      setProblem(error instanceof Error ? error.message : texts.unknownError);
    }
  };
  const reload = () => void guard(readAll(setEntries));
  useEffect(() => {
    reload();
    return () => timers.current.forEach((timer) => clearTimeout(timer)); // what was not deleted yet stays
  }, []);
  const keep = ({ cache_key: key }: Entry) => {
    clearTimeout(timers.current.get(key));
    timers.current.delete(key);
    setLeaving(new Set(timers.current.keys()));
  };
  const path = (entry: Entry) => `/v1/cache/${encodeURIComponent(entry.cache_key)}`;
  const remove = (entry: Entry) => {
    timers.current.set(entry.cache_key, setTimeout(() => {
      keep(entry);
      void guard(request(path(entry), { method: "DELETE" }).then(() =>
        setEntries((before) => before?.filter((each) => each.cache_key !== entry.cache_key) ?? null)));
    }, UNDO_MS));
    setLeaving(new Set(timers.current.keys()));
  };
  const pin = (entry: Entry) =>
    void guard(json<Entry>(`${path(entry)}/${entry.pinned ? "unpin" : "pin"}`, { method: "POST" }).then((changed) =>
      setEntries((before) => before?.map((each) => (each.cache_key === entry.cache_key ? { ...each, ...changed } : each)) ?? null)));
  return { entries, problem, leaving, reload, pin, remove, keep };
}

/** Read all pages, and show each page as it comes. */
async function readAll(show: (entries: Entry[]) => void): Promise<void> {
  let all: Entry[] = [];
  let after = "";
  do {
    const page = await json<{ entries: Entry[]; has_more: boolean; next: string | null }>(`/v1/cache?limit=${PAGE}${after}`);
    all = [...all, ...page.entries];
    show(all);
    after = page.has_more ? `&after=${encodeURIComponent(page.next!)}` : "";
  } while (after && all.length < MAX_ENTRIES);
}

function EntryTable({ entries, leaving, reload, pin, remove, keep }: Entries) {
  const [search, setSearch] = useState("");
  const [order, setOrder] = useState<{ column: Column; isDown: boolean }>({ column: "last_used", isDown: true });
  const [opened, setOpened] = useState<Entry | null>(null);
  const [top, setTop] = useState(0);
  const shown = useMemo(() => sorted(matching(entries ?? [], search), order.column, order.isDown), [entries, search, order]);
  if (!entries) return <p class="loading">{texts.loading}</p>;
  const height = 12;
  const first = Math.max(0, Math.min(shown.length - height, Math.floor(top / ROW_PX) - 4));
  const visibleRows = shown.slice(first, first + height + 8);
  return (
    <>
      <p class="toolbar">
        <label>
          {texts.cache.search} <input type="search" value={search} placeholder={texts.cache.searchHint} onInput={(event) => (setSearch(event.currentTarget.value), setTop(0))} />
        </label>
        <span role="status">{texts.cache.count(count(shown.length), count(entries.length))}</span>
        <button type="button" onClick={reload}>{texts.cache.reload}</button>
      </p>
      {entries.length === 0 && <p class="note">{texts.cache.empty}</p>}
      <div class="rows" tabIndex={0} role="region" aria-label={texts.cache.title} onScroll={(event) => setTop(event.currentTarget.scrollTop)}>
        <table aria-rowcount={shown.length + 1}>
          <thead>
            <tr>
              {COLUMNS.map((column) => (
                <th key={column} scope="col" aria-sort={order.column === column ? (order.isDown ? "descending" : "ascending") : undefined}>
                  <button type="button" onClick={() => setOrder({ column, isDown: order.column === column ? !order.isDown : true })}>
                    {texts.cache.columns[column]}{order.column === column && (order.isDown ? " ↓" : " ↑")}
                  </button>
                </th>
              ))}
              <th scope="col">{texts.cache.columns.actions}</th>
            </tr>
          </thead>
          <tbody>
            {first > 0 && <tr aria-hidden="true" style={{ height: `${first * ROW_PX}px` }} />}
            {visibleRows.map((entry, place) => (
              <tr key={entry.cache_key} aria-rowindex={first + place + 2} class={leaving.has(entry.cache_key) ? "leaving" : ""}>
                <td class="preview" title={visible(entry.preview)}>{title(entry)}</td>
                <td>{count(entry.token_count)}</td>
                <td>{bytes(entry.size_bytes)}</td>
                <td><span class={`key tier-${entry.tier ?? "none"}`}>{entry.tier ? texts.tiers[entry.tier] ?? entry.tier : texts.none}</span></td>
                <td>{count(entry.hit_count)}</td>
                <td>{distance(entry.last_used)}</td>
                <td>{entry.expires_at === null ? texts.cache.never : distance(entry.expires_at)}</td>
                <td class="buttons">
                  {leaving.has(entry.cache_key) ? (
                    <>
                      <span role="status">{texts.cache.removing}</span>
                      <button type="button" class="small" onClick={() => keep(entry)}>{texts.cache.undo}</button>
                    </>
                  ) : (
                    <>
                      <button type="button" class="small" onClick={() => setOpened(entry)}>{texts.cache.explain}</button>
                      <button type="button" class="small" onClick={() => pin(entry)}>{entry.pinned ? texts.cache.unpin : texts.cache.pin}</button>
                      <button type="button" class="small" onClick={() => remove(entry)}>{texts.cache.remove}</button>
                    </>
                  )}
                </td>
              </tr>
            ))}
            {shown.length > first + visibleRows.length && (
              <tr aria-hidden="true" style={{ height: `${(shown.length - first - visibleRows.length) * ROW_PX}px` }} />
            )}
          </tbody>
        </table>
      </div>
      {opened && <Details entry={opened} onClose={() => setOpened(null)} />}
    </>
  );
}

const title = (entry: Entry): string =>
  visible(entry.preview) || entry.names.map(({ name }) => visible(name)).join(", ") || (entry.tenant ? texts.cache.hidden : texts.cache.noText);

function matching(entries: Entry[], search: string): Entry[] {
  const wanted = search.trim().toLowerCase();
  if (!wanted) return entries;
  return entries.filter((entry) =>
    [entry.preview, entry.cache_key, entry.model, ...entry.names.map(({ name }) => name)].some((text) => text.toLowerCase().includes(wanted)));
}

function sorted(entries: Entry[], column: Column, isDown: boolean): Entry[] {
  const sign = isDown ? -1 : 1;
  return [...entries].sort((one, other) => {
    const [left, right] = [one[column] ?? Infinity, other[column] ?? Infinity];
    return sign * (typeof left === "string" || typeof right === "string" ? String(left).localeCompare(String(right)) : left - right);
  });
}

function Details({ entry, onClose }: { entry: Entry; onClose: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => dialog.current?.showModal(), []);
  const rows: [string, string][] = [
    [texts.chat.model, entry.model],
    ["cache_key", entry.cache_key],
    [texts.cache.columns.preview, title(entry)],
    [texts.cache.columns.names, entry.names.map(({ kind, name }) => `${kind}: ${visible(name)}`).join(", ") || texts.none],
    [texts.cache.columns.token_count, `${count(entry.token_count)} (${count(entry.stored_tokens)} survive a restart)`],
    [texts.cache.columns.size_bytes, bytes(entry.size_bytes)],
    [texts.cache.columns.tier, entry.tier ? texts.tiers[entry.tier] ?? entry.tier : texts.none],
    [texts.cache.columns.hit_count, count(entry.hit_count)],
    [texts.cache.columns.expires_at, entry.expires_at === null ? texts.cache.never : distance(entry.expires_at)],
    ["segments", entry.segments.map(({ type, hash }) => `${type} ${hash}`).join(", ") || texts.none],
  ];
  return (
    <dialog ref={dialog} aria-label={texts.cache.details} onClose={onClose}>
      <h2>{texts.cache.details}</h2>
      <dl>{rows.map(([name, value]) => <><dt>{name}</dt><dd dir="auto">{value}</dd></>)}</dl>
      <form method="dialog"><button class="primary">{texts.close}</button></form>
    </dialog>
  );
}
