// Puts the parts together, and keeps the streams open.
import { Ask } from "./ask.js";
import { Atlas } from "./atlas.js";
import { Fleet } from "./fleet.js";
import { Namespaces } from "./namespaces.js";
import { Plots } from "./plots.js";
import { Promises } from "./promises.js";
import { Trouble } from "./trouble.js";
import { bytes, compact, count, make, percent, say, time } from "./text.js";
import { remember, remembered } from "./url.js";

const RETRY_MS = 5000;
/** Time after which a stream counts as lost. A stream that ends by its age is open again sooner. */
const LOST_MS = 2000;
/** Time without a message after which the stream of frames counts as lost: a frame comes every second. */
const SILENCE_MS = 5000;

/**
 * Stream of server-sent events, which is opened again whenever it has ended, or nothing has come for `silence` milliseconds. `onLost` is called with the
 * reason if the daemon refuses the stream, and without one otherwise.
 */
class Stream {
  #source = null;
  #timer = 0;
  #lost = 0;
  #silent = 0;

  constructor(handlers, onLost = () => {}, silence = 0) {
    this.handlers = handlers;
    this.onLost = onLost;
    this.silence = silence;
  }

  open(target) {
    this.close();
    const source = new EventSource(target);
    this.#source = source;
    this.#listen(target);
    for (const [name, handle] of Object.entries(this.handlers)) {
      source.addEventListener(name, (event) => {
        this.#listen(target);
        handle(JSON.parse(event.data));
      });
    }
    source.addEventListener("open", () => {
      clearTimeout(this.#lost);
      this.#lost = 0;
    });
    source.addEventListener("error", () => {
      this.#lost ||= setTimeout(this.onLost, LOST_MS);
      // While the source is connecting, the browser tries again by itself.
      if (source.readyState !== EventSource.CLOSED) return;
      clearTimeout(this.#silent);
      this.#timer = setTimeout(() => this.open(target), RETRY_MS);
      this.#tellRefusal(target, source);
    });
  }

  /** Asks why the daemon has refused a stream: the browser keeps that from an event source. */
  async #tellRefusal(target, source) {
    const asking = new AbortController();
    const answer = await fetch(target, { signal: asking.signal }).catch(() => null);
    const refusal = answer && !answer.ok ? await answer.json().catch(() => null) : null;
    asking.abort();
    if (!refusal?.error || this.#source !== source) return;
    clearTimeout(this.#lost);
    this.onLost(refusal.error);
  }

  /** Waits for the next message. A daemon that hangs sends none, and its connections stay open. */
  #listen(target) {
    clearTimeout(this.#silent);
    if (this.silence === 0) return;
    this.#silent = setTimeout(() => {
      this.onLost();
      this.open(target);
    }, this.silence);
  }

  close() {
    clearTimeout(this.#timer);
    clearTimeout(this.#lost);
    clearTimeout(this.#silent);
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
const promises = new Promises();
const trouble = new Trouble();
const atlas = new Atlas(openAtlas);
const ask = new Ask();
const overview = new Namespaces((name) => {
  namespaces.value = name;
  changeNamespace();
});
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

/** Lists the names of all namespaces, which come worst first. Chooses the worst if none has been chosen. */
function setNamespaces(sorted) {
  const names = [...sorted].sort();
  const known = [...namespaces.options].map((option) => option.value);
  if (names.join("/") === known.join("/")) return;
  const before = chosen() || remembered("namespace");
  namespaces.replaceChildren(...names.map((name) => make("option", { value: name, textContent: name })));
  namespaces.value = names.includes(before) ? before : sorted[0] ?? "";
  showNamespace();
}

let shown = "";
function showNamespace() {
  if (chosen() === shown) return;
  shown = chosen();
  for (const part of [overview, fleet, atlas, ask]) part.setNamespace(shown);
  openAtlas();
}

function changeNamespace() {
  remember("namespace", chosen());
  showNamespace();
}
namespaces.addEventListener("change", changeNamespace);

function onFrame(frame) {
  fleet.apply(frame.fleet, frame.now_us);
  setNamespaces(overview.apply(frame));
  plots.apply(frame.rates, frame.now_us);
  trouble.apply(frame, fleet.holders());
  if (frame.ready) setReadiness("ready", true);
  else setReadiness("not ready", false, frame.reasons.join("; "));
  const sizes = frame.namespaces.find(({ name }) => name === chosen());
  const { exact, degraded } = sizes ?? { exact: 0, degraded: 0 };
  atlas.setHolders(exact + degraded);
  promises.apply(sizes);
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
    fleet.setReasons(hello.reasons, hello.mends);
    trouble.setReasons(hello.reasons, hello.mends, hello.drop_mends);
  },
  past: (past) => plots.setPast(past),
  sparks: (sparks) => overview.setSparks(sparks),
  frame: onFrame,
}, (why) => setReadiness(why ? `no connection: ${why}` : "no connection", false), SILENCE_MS);

const atlases = new Stream({
  atlas: (found) => atlas.apply(found),
  trouble: (text) => say(document.getElementById("atlas-note"), text),
}, (why) => { if (why) say(document.getElementById("atlas-note"), why); });

function openAtlas() {
  if (chosen() === "") return;
  atlases.open(`/page/atlas?${new URLSearchParams({ namespace: chosen(), lens: atlas.lens })}`);
}

// The number of streams is limited, so a hidden page closes its streams.
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
