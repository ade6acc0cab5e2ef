// Renders a model's Markdown. The model is not trusted: HTML is sanitised, images are never loaded,
// links open without telling where they come from, and characters that reorder text are made visible.

import DOMPurify from "dompurify";
import { Marked } from "marked";
import { memo } from "preact/compat";
import { useEffect, useRef } from "preact/hooks";
import { visible } from "./format";
import { texts } from "./texts";

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    image: ({ href, text }) => `<span class="blocked-image">[${escape(text || texts.chat.image)}: ${escape(href)}]</span>`,
    html: ({ text }) => escape(text),
  },
});

const ALLOWED = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
    "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: ["href", "class", "start", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
};

function escape(text: string): string {
  return text.replace(/[&<>"']/g, (each) => `&#${each.charCodeAt(0)};`);
}

function render(text: string): string {
  return DOMPurify.sanitize(marked.parse(visible(text), { async: false }), ALLOWED);
}

export const Markdown = memo(function Markdown({ text }: { text: string }) {
  const element = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const shown = element.current!;
    shown.innerHTML = render(text);
    for (const link of shown.querySelectorAll("a")) {
      link.target = "_blank";
      link.rel = "noopener noreferrer nofollow";
    }
    for (const block of shown.querySelectorAll("pre")) addCopyButton(block);
  }, [text]);
  return <div class="markdown" ref={element} dir="auto" />;
});

function addCopyButton(block: HTMLPreElement): void {
  block.tabIndex = 0;
  const text = block.textContent ?? "";
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = texts.copy;
  button.onclick = () => void copy(text, button);
  block.append(button);
}

export async function copy(text: string, button?: HTMLButtonElement): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea"); // pages without TLS have no clipboard
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  if (!button) return;
  button.textContent = texts.copied;
  setTimeout(() => (button.textContent = texts.copy), 1500);
}
