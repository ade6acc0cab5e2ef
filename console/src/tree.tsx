// Draws the tree of stored prefixes: from left to right by position, so a shared part is drawn once.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { json } from "./api";
import { count, visible } from "./format";
import { texts } from "./texts";

const WIDTH = 1000;
const MAX_ROW = 26;
const MAX_HEIGHT = 420;
const MIN_WIDTH = 2;

interface Branch {
  key: string;
  parent: number | null;
  start: number;
  tokens: number;
  size_bytes: number;
  tier: string;
  conversations: number;
}

interface Tree {
  model: string;
  branches: Branch[];
  is_complete: boolean;
}

interface Placed extends Branch {
  place: number;
  top: number;
  rows: number;
  below: number[];
}

export function PrefixTrees() {
  const [trees, setTrees] = useState<Tree[] | null>(null);
  useEffect(() => {
    void json<{ trees: Tree[] }>("/v1/cache/tree").then((found) => setTrees(found.trees), () => setTrees([]));
  }, []);
  return (
    <section aria-labelledby="tree-title">
      <h1 id="tree-title">{texts.cache.tree}</h1>
      <p>{texts.cache.treeText}</p>
      {!trees && <p class="loading">{texts.loading}</p>}
      {trees?.map((tree) => <PrefixTree key={tree.model} tree={tree} />)}
    </section>
  );
}

function PrefixTree({ tree }: { tree: Tree }) {
  const placed = useMemo(() => place(tree.branches), [tree]);
  const [chosen, setChosen] = useState<Placed | null>(null);
  const [focused, setFocused] = useState(0);
  const drawing = useRef<SVGSVGElement>(null);
  if (!placed.length) return <p class="note">{tree.model}: {texts.cache.treeEmpty}</p>;
  const end = Math.max(...placed.map((each) => each.start + each.tokens));
  const rows = placed.filter((each) => each.parent === null).reduce((sum, each) => sum + each.rows, 0);
  const row = Math.min(MAX_ROW, MAX_HEIGHT / rows);
  const move = (event: KeyboardEvent, from: Placed) => {
    const target = neighbour(placed, from, event.key);
    if (event.key === "Enter" || event.key === " ") setChosen(from);
    else if (target === undefined) return;
    else {
      setFocused(target);
      drawing.current?.querySelector<SVGElement>(`[data-place="${target}"]`)?.focus();
    }
    event.preventDefault();
  };
  return (
    <figure class="tree">
      <figcaption>{tree.model}{!tree.is_complete && ` – ${texts.cache.treeCut}`}</figcaption>
      <svg ref={drawing} viewBox={`0 0 ${WIDTH} ${rows * row}`} preserveAspectRatio="none" role="group" aria-label={texts.cache.tree}>
        {placed.map((each) => {
          const x = (each.start / end) * WIDTH;
          const width = Math.max(MIN_WIDTH, (each.tokens / end) * WIDTH);
          const name = texts.cache.branch(count(each.tokens), texts.cache.conversations(each.conversations), texts.tiers[each.tier] ?? each.tier);
          return (
            <rect
              key={each.key}
              class={`branch tier-${each.tier}${chosen?.key === each.key ? " chosen" : ""}`}
              data-place={each.place}
              x={x}
              y={each.top * row}
              width={width}
              height={each.rows * row}
              role="button"
              tabindex={each.place === focused ? 0 : -1}
              aria-label={name}
              onClick={() => (setChosen(each), setFocused(each.place))}
              onKeyDown={(event) => move(event, each)}
            >
              <title>{name}</title>
            </rect>
          );
        })}
      </svg>
      {chosen && <BranchText key={chosen.key} model={tree.model} branch={chosen} />}
    </figure>
  );
}

/** Give each branch as many rows as it has ends, and put its children next to it. */
function place(branches: Branch[]): Placed[] {
  const placed = branches.map((branch, at): Placed => ({ ...branch, place: at, top: 0, rows: 0, below: [] }));
  for (const each of placed) if (each.parent !== null) placed[each.parent].below.push(each.place);
  for (const each of [...placed].reverse()) { // children come after their parents
    each.rows = Math.max(1, each.below.reduce((sum, child) => sum + placed[child].rows, 0));
  }
  let top = 0;
  for (const each of placed) {
    if (each.parent === null) {
      each.top = top;
      top += each.rows;
    }
    let next = each.top;
    for (const child of each.below) {
      placed[child].top = next;
      next += placed[child].rows;
    }
  }
  return placed;
}

function neighbour(placed: Placed[], from: Placed, key: string): number | undefined {
  const siblings = placed.filter((each) => each.parent === from.parent).map((each) => each.place);
  const at = siblings.indexOf(from.place);
  switch (key) {
    case "ArrowRight":
      return from.below[0];
    case "ArrowLeft":
      return from.parent ?? undefined;
    case "ArrowDown":
      return siblings[at + 1];
    case "ArrowUp":
      return siblings[at - 1];
  }
  return undefined;
}

function BranchText({ model, branch }: { model: string; branch: Branch }) {
  const [found, setFound] = useState<{ text: string; is_complete: boolean } | null>(null);
  const [isHidden, setHidden] = useState(false);
  useEffect(() => {
    void json<{ text: string; is_complete: boolean }>(`/v1/cache/tree/${branch.key}?model=${encodeURIComponent(model)}`)
      .then(setFound, () => setHidden(true));
  }, []);
  return (
    <div role="status">
      <h2>{texts.cache.branchText}</h2>
      <p>{texts.cache.branch(count(branch.tokens), texts.cache.conversations(branch.conversations), texts.tiers[branch.tier] ?? branch.tier)}</p>
      {isHidden && <p class="note">{texts.cache.branchHidden}</p>}
      {found && <pre tabIndex={0} dir="auto">{visible(found.text)}</pre>}
      {found && !found.is_complete && <p class="note">{texts.cache.cutText}</p>}
    </div>
  );
}
