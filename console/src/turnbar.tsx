// Shows what a turn reused, computed and generated, what that saved, and why not more was reused.

import type { Report } from "./conversation";
import { count, seconds, visible } from "./format";
import { texts } from "./texts";

export function TurnBar({ report }: { report: Report }) {
  const { promptTokens, reusedTokens, outputTokens, tier } = report;
  const computed = promptTokens - reusedTokens;
  const parts = [
    { kind: `tier-${tier ?? "none"}`, tokens: reusedTokens },
    { kind: "computed", tokens: computed },
    { kind: "generated", tokens: outputTokens },
  ];
  const where = tier ? (texts.tiers[tier] ?? tier) : "";
  return (
    <div class="turn">
      <div class="bar" role="img" aria-label={texts.turn.bar(count(reusedTokens), count(computed), count(outputTokens))}>
        {parts.map((part) => part.tokens > 0 && <span key={part.kind} class={part.kind} style={{ flexGrow: part.tokens }} />)}
      </div>
      <p>
        <span class={`key tier-${tier ?? "none"}`}>{reusedTokens ? texts.turn.reused(count(reusedTokens), where) : texts.turn.notReused}</span>
        <span class="key computed">{texts.turn.computed(count(computed))}</span>
        <span class="key generated">{texts.turn.generated(count(outputTokens))}</span>
        <span>
          {texts.turn.first(seconds(report.firstTokenS))}
          {reusedTokens > 0 && report.coldS !== null && `, ${texts.turn.cold(seconds(report.coldS))}`}
        </span>
        {report.tokensPerS !== null && <span>{texts.turn.rate(report.tokensPerS.toFixed(0))}</span>}
      </p>
      {report.status !== "hit" && <Why report={report} />}
    </div>
  );
}

function Why({ report }: { report: Report }) {
  const { diverged } = report;
  return (
    <details class="why">
      <summary>{texts.turn.why}</summary>
      <p>{texts.reasons[report.reason] ?? report.reason}</p>
      {diverged && (
        <dl>
          <dt>{texts.turn.stored}</dt>
          <dd><Difference text={diverged.stored} other={diverged.sent} /></dd>
          <dt>{texts.turn.sent}</dt>
          <dd><Difference text={diverged.sent} other={diverged.stored} /></dd>
        </dl>
      )}
    </details>
  );
}

/** Marks the part of a text after what both sides have in common. */
function Difference({ text, other }: { text: string; other: string }) {
  let same = 0;
  while (same < text.length && text[same] === other[same]) same += 1;
  return (
    <q dir="auto">
      {visible(text.slice(0, same))}
      <mark>{visible(text.slice(same)) || "∅"}</mark>
    </q>
  );
}
