// The page: sign-in, navigation, and one view at a time.

import { render } from "preact";
import { useCallback, useEffect, useState } from "preact/hooks";
import { ApiError, hasKey, json, setKey, useLive, type Live } from "./api";
import { CacheView } from "./cache";
import { ChatView } from "./chat";
import { ConnectView } from "./connect";
import { LiveView } from "./live";
import { ModelsView } from "./models";
import { texts } from "./texts";
import "./style.css";

type View = keyof typeof texts.views;
const VIEWS = Object.keys(texts.views) as View[];

const currentView = (): View => VIEWS.find((view) => `#${view}` === location.hash) ?? "chat";

function Console() {
  const [needsKey, setNeedsKey] = useState<boolean | null>(null);
  const check = useCallback(async () => {
    try {
      await json("/v1/models");
      setNeedsKey(false);
    } catch (error) {
      setNeedsKey(error instanceof ApiError && error.status === 401);
    }
  }, []);
  useEffect(() => void check(), []);
  if (needsKey === null) return <p class="loading">{texts.loading}</p>;
  if (needsKey) return <SignIn onDone={() => setNeedsKey(false)} />;
  return <Page onSignedOut={() => setNeedsKey(true)} />;
}

function SignIn({ onDone }: { onDone: () => void }) {
  const [key, setTyped] = useState("");
  const [remember, setRemember] = useState(false);
  const [problem, setProblem] = useState("");
  const submit = async (event: Event) => {
    event.preventDefault();
    setKey(key.trim(), remember);
    try {
      await json("/v1/models");
      onDone();
    } catch (error) {
      setKey("", false);
      const isWrong = error instanceof ApiError && error.status === 401;
      setProblem(isWrong ? texts.signIn.wrong : error instanceof Error ? error.message : texts.unknownError);
    }
  };
  return (
    <main class="sign-in">
      <form onSubmit={submit}>
        <h1>Rekindle</h1>
        <p>{texts.signIn.text}</p>
        <label>
          {texts.signIn.key}
          <input
            type="password"
            required
            autocomplete="current-password"
            value={key}
            onInput={(event) => setTyped(event.currentTarget.value)}
          />
        </label>
        <label class="check">
          <input type="checkbox" checked={remember} onChange={(event) => setRemember(event.currentTarget.checked)} />
          {texts.signIn.remember}
        </label>
        <button class="primary">{texts.signIn.button}</button>
        <p role="alert" class="problem">{problem}</p>
      </form>
    </main>
  );
}

function Page({ onSignedOut }: { onSignedOut: () => void }) {
  const [view, setView] = useState(currentView);
  const signOut = () => {
    setKey("", false);
    onSignedOut();
  };
  const live = useLive(signOut);
  useEffect(() => {
    const follow = () => setView(currentView());
    addEventListener("hashchange", follow);
    follow(); // the address may have changed before this page listened
    return () => removeEventListener("hashchange", follow);
  }, []);
  useEffect(() => {
    document.title = `${texts.views[view]} · Rekindle`;
  }, [view]);
  return (
    <>
      <a class="skip" href="#content" onClick={(event) => (event.preventDefault(), document.getElementById("content")?.focus())}>
        {texts.skip}
      </a>
      <header>
        <span class="brand"><img src="/console/icon.svg" alt="" width="20" height="20" /> Rekindle</span>
        <nav aria-label="Rekindle">
          {VIEWS.map((each) => (
            <a key={each} href={`#${each}`} aria-current={each === view ? "page" : undefined}>{texts.views[each]}</a>
          ))}
        </nav>
        <span class="aside">
          <a href="/docs">{texts.docs}</a>
          {hasKey() && <button type="button" onClick={signOut}>{texts.signIn.out}</button>}
        </span>
      </header>
      <div role="status" class={live.isConnected ? "offline" : "offline shown"}>
        {live.isConnected ? "" : texts.disconnected}
      </div>
      <main id="content" tabIndex={-1} class={view}>
        <Shown view={view} live={live} />
      </main>
    </>
  );
}

function Shown({ view, live }: { view: View; live: Live }) {
  switch (view) {
    case "chat":
      return <ChatView live={live} />;
    case "cache":
      return <CacheView live={live} />;
    case "live":
      return <LiveView live={live} />;
    case "models":
      return <ModelsView live={live} />;
    case "connect":
      return <ConnectView live={live} />;
  }
}

render(<Console />, document.getElementById("console")!);
