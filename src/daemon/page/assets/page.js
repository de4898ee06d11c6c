// Puts the parts together, and keeps the streams open.
import { Ask } from "./ask.js";
import { Atlas } from "./atlas.js";
import { Fleet } from "./fleet.js";
import { Plots } from "./plots.js";
import { Trouble } from "./trouble.js";
import { bytes, compact, count, make, percent, say, time } from "./text.js";

const RETRY_MS = 5000;
/** A stream that ends by its age is open again sooner than that. */
const LOST_MS = 2000;

/** A stream of server-sent events that is opened again when it has ended. */
class Stream {
  #source = null;
  #timer = 0;
  #lost = 0;

  constructor(handlers, onLost = () => {}) {
    this.handlers = handlers;
    this.onLost = onLost;
  }

  open(target) {
    this.close();
    const source = new EventSource(target);
    this.#source = source;
    for (const [name, handle] of Object.entries(this.handlers)) {
      source.addEventListener(name, (event) => handle(JSON.parse(event.data)));
    }
    source.addEventListener("open", () => {
      clearTimeout(this.#lost);
      this.#lost = 0;
    });
    source.addEventListener("error", () => {
      this.#lost ||= setTimeout(this.onLost, LOST_MS);
      // While it is connecting, the browser tries again by itself.
      if (source.readyState === EventSource.CLOSED) this.#timer = setTimeout(() => this.open(target), RETRY_MS);
    });
  }

  close() {
    clearTimeout(this.#timer);
    clearTimeout(this.#lost);
    this.#lost = 0;
    this.#source?.close();
    this.#source = null;
  }
}

const theme = document.getElementById("theme");
function setTheme(name) {
  theme.value = name;
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
}
theme.addEventListener("change", () => {
  setTheme(theme.value);
  try { localStorage.setItem("kvatlas-theme", theme.value); } catch { /* Storage may be forbidden. */ }
});
try { setTheme(localStorage.getItem("kvatlas-theme") ?? "auto"); } catch { setTheme("auto"); }

const fleet = new Fleet();
const plots = new Plots();
const trouble = new Trouble();
const atlas = new Atlas(openAtlas);
const ask = new Ask();
const namespaces = document.getElementById("namespace");
const readiness = document.getElementById("readiness");
const summary = document.getElementById("summary");
const tiles = new Map();

function tile(title, text, isBad = false) {
  let known = tiles.get(title);
  if (!known) {
    known = { element: make("div", { className: "tile" }), value: make("b") };
    known.element.append(known.value, make("span", { className: "quiet", textContent: title }));
    summary.append(known.element);
    tiles.set(title, known);
  }
  say(known.value, text);
  known.element.classList.toggle("bad", isBad);
}

function setReadiness(text, isGood, why = "") {
  say(readiness, text);
  readiness.classList.toggle("good", isGood);
  readiness.title = why;
}

function chosen() {
  return namespaces.value;
}

function setNamespaces(list) {
  const names = list.map(({ name }) => name);
  const known = [...namespaces.options].map((option) => option.value);
  if (names.join("/") === known.join("/")) return;
  const before = chosen();
  namespaces.replaceChildren(...names.map((name) => make("option", { value: name, textContent: name })));
  namespaces.value = names.includes(before) ? before : names[0] ?? "";
  if (chosen() !== before) changeNamespace();
}

function changeNamespace() {
  for (const part of [fleet, atlas, ask]) part.setNamespace(chosen());
  openAtlas();
}
namespaces.addEventListener("change", changeNamespace);

function onFrame(frame) {
  setNamespaces(frame.namespaces);
  fleet.apply(frame.fleet, frame.now_us);
  plots.apply(frame.rates, frame.now_us);
  trouble.apply(frame, fleet.holders());
  if (frame.ready) setReadiness("ready", true);
  else setReadiness("not ready", false, frame.reasons.join("; "));
  const sizes = frame.namespaces.find(({ name }) => name === chosen());
  const { exact, degraded } = fleet.counts();
  atlas.setHolders(exact + degraded);
  const rates = frame.rates;
  tile("exact holders", count(exact));
  tile("degraded holders", count(degraded), degraded > 0);
  tile("different blocks", sizes ? compact(sizes.distinct_blocks) : "–");
  tile("copies held", sizes ? compact(sizes.held_blocks) : "–");
  tile("index memory", sizes ? bytes(sizes.bytes) : "–");
  tile("queries a second", rates ? compact(rates.queries) : "–");
  tile("query latency p99", time(rates?.query_p99_us));
  const answers = rates ? rates.exact + rates.degraded : 0;
  tile("answers exact", rates && answers > 0 ? percent(rates.exact, answers) : "–", answers > 0 && rates.degraded > 0);
}

const frames = new Stream({
  hello(hello) {
    say(document.getElementById("version"), `${hello.version} (${hello.commit})`);
    fleet.setReasons(hello.reasons);
    trouble.setReasons(hello.reasons, hello.mends);
  },
  frame: onFrame,
}, () => setReadiness("no connection", false));

const atlases = new Stream({
  atlas: (found) => atlas.apply(found),
  trouble: (text) => say(document.getElementById("atlas-note"), text),
});

function openAtlas() {
  if (chosen() === "") return;
  atlases.open(`/page/atlas?${new URLSearchParams({ namespace: chosen(), lens: atlas.lens })}`);
}

// Streams are few: a page that nobody sees gives its own back.
function follow() {
  if (document.hidden) {
    frames.close();
    atlases.close();
  } else {
    frames.open("/page/frames");
    openAtlas();
  }
}
document.addEventListener("visibilitychange", follow);
follow();
