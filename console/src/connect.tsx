// How to connect a client, with the address and the model of this server filled in.

import { useState } from "preact/hooks";
import { hasKey, type Live } from "./api";
import { copy } from "./markdown";
import { texts } from "./texts";

interface Client {
  name: string;
  where?: string;
  text: (server: string, model: string, key: string) => string;
}

const CLIENTS: Client[] = [
  {
    name: "Claude Code",
    text: (server, model, key) => `export ANTHROPIC_BASE_URL=${server}\nexport ANTHROPIC_AUTH_TOKEN=${key}\nclaude --model ${model}`,
  },
  {
    name: "Codex",
    where: "~/.codex/config.toml",
    text: (server, model) =>
      `model = "${model}"\nmodel_provider = "rekindle"\nmodel_providers.rekindle = { name = "rekindle", base_url = "${server}/v1", wire_api = "responses" }`,
  },
  {
    name: "opencode",
    where: "opencode.json",
    text: (server, model, key) =>
      JSON.stringify({
        provider: {
          rekindle: { npm: "@ai-sdk/openai-compatible", models: { [model]: {} }, options: { baseURL: `${server}/v1`, apiKey: key } },
        },
      }, null, 2),
  },
  {
    name: "Copilot CLI",
    text: (server, model, key) =>
      `export COPILOT_PROVIDER_BASE_URL=${server}/v1 COPILOT_OFFLINE=true\nexport COPILOT_MODEL=${model} COPILOT_PROVIDER_API_KEY=${key}\ncopilot`,
  },
  {
    name: "Open WebUI",
    text: (server, _model, key) => `export OPENAI_API_BASE_URL=${server}/v1\nexport OPENAI_API_KEY=${key}\nopen-webui serve`,
  },
  {
    name: "aider",
    text: (server, model, key) => `export OPENAI_API_BASE=${server}/v1\nexport OPENAI_API_KEY=${key}\naider --model openai/${model}`,
  },
  {
    name: "Python (openai)",
    text: (server, model, key) =>
      `from openai import OpenAI\n\nclient = OpenAI(base_url="${server}/v1", api_key="${key}")\nreply = client.chat.completions.create(\n    model="${model}", messages=[{"role": "user", "content": "Say hello."}]\n)\nprint(reply.choices[0].message.content)`,
  },
  {
    name: "Python (anthropic)",
    text: (server, model, key) =>
      `from anthropic import Anthropic\n\nclient = Anthropic(base_url="${server}", api_key="${key}")\nreply = client.messages.create(\n    model="${model}", max_tokens=200, messages=[{"role": "user", "content": "Say hello."}]\n)\nprint(reply.content[0].text)`,
  },
  {
    name: "JavaScript (openai)",
    text: (server, model, key) =>
      `import OpenAI from "openai";\n\nconst client = new OpenAI({ baseURL: "${server}/v1", apiKey: "${key}" });\nconst reply = await client.chat.completions.create({\n  model: "${model}",\n  messages: [{ role: "user", content: "Say hello." }],\n});\nconsole.log(reply.choices[0].message.content);`,
  },
  {
    name: "curl",
    text: (server, model, key) =>
      `curl -s ${server}/v1/chat/completions -H 'Content-Type: application/json' -H 'Authorization: Bearer ${key}' -d '{\n  "model": "${model}",\n  "messages": [{"role": "user", "content": "Say hello."}]\n}'`,
  },
];

export function ConnectView({ live }: { live: Live }) {
  const models = (live.snapshot?.models ?? []).filter((model) => model.generates).map((model) => model.id);
  const [chosen, setChosen] = useState("");
  const model = chosen || models[0] || "default";
  const key = hasKey() ? "KEY" : "none";
  return (
    <section>
      <h1>{texts.connect.title}</h1>
      <p>{texts.connect.text} {hasKey() && texts.connect.key}</p>
      <p class="toolbar">
        <label>
          {texts.connect.model}{" "}
          <select value={model} onChange={(event) => setChosen(event.currentTarget.value)}>
            {models.map((each) => <option key={each}>{each}</option>)}
          </select>
        </label>
      </p>
      <div class="clients">
        {CLIENTS.map(({ name, where, text }) => {
          const shown = text(location.origin, model, key);
          return (
            <section key={name} class="client">
              <h2>{name}{where && <small> {where}</small>}</h2>
              <pre tabIndex={0}>{shown}<button type="button" class="copy" aria-label={`${texts.copy}: ${name}`} onClick={(event) => void copy(shown, event.currentTarget)}>{texts.copy}</button></pre>
            </section>
          );
        })}
      </div>
    </section>
  );
}
