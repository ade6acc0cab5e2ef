// Bundles the console into the Python package, with the licences of what is in it and a hash of the
// sources. `make check` compares the hash, so a stale bundle is noticed without npm.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, rmSync, mkdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const target = join(here, "../src/rekindle/front/console");
const bundled = ["preact", "marked", "dompurify", "uplot"];

rmSync(target, { recursive: true, force: true });
mkdirSync(target, { recursive: true });
await build({
  entryPoints: [join(here, "src/console.tsx")],
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  charset: "ascii",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  outdir: target,
});
writeFileSync(join(target, "index.html"), readFileSync(join(here, "src/index.html")));
writeFileSync(join(target, "icon.svg"), readFileSync(join(here, "src/icon.svg")));
writeFileSync(join(target, "NOTICES.txt"), notices());
writeFileSync(join(target, "sources.sha256"), hash() + "\n");

const sizes = readdirSync(target).map((name) => [name, gzipSync(readFileSync(join(target, name))).length]);
console.log(sizes.map(([name, size]) => `${name}: ${(size / 1000).toFixed(1)} kB compressed`).join("\n"));

/** The same hash as tests/front/test_console.py computes. */
function hash() {
  const sum = createHash("sha256");
  const files = ["build.mjs", "package.json", "package-lock.json", "tsconfig.json"];
  const sources = readdirSync(join(here, "src")).map((name) => `src/${name}`);
  for (const name of [...files, ...sources].sort()) {
    sum.update(`${name}\n`).update(readFileSync(join(here, name)));
  }
  return sum.digest("hex");
}

function notices() {
  const parts = bundled.map((name) => {
    const folder = join(here, "node_modules", name);
    const { version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
    const file = readdirSync(folder).find((each) => /^licen[cs]e/i.test(each));
    const text = readFileSync(join(folder, file), "utf8").trim();
    return `${name} ${version} (${license})\n${"-".repeat(60)}\n${text}\n`;
  });
  return `The console contains these packages.\n\n${parts.join("\n\n")}`;
}
