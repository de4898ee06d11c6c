// One holder: its numbers, what to do, and how its state has changed.
import { clock, copied, count, counted, make, mendOf, percent, say, svg, time } from "./text.js";
import { shade } from "./matrix.js";

/** Maximum number of changes in the list. The picture shows all changes. */
const CHANGES_MAX = 20;
/** Time between two requests about the shown holder, in milliseconds. */
const ASK_MS = 5000;
const WIDTH = 600;
const HEIGHT = 14;
/** Longest time that the picture covers. */
const DAY_US = 86.4e9;

const STATES = { unwatched: "no daemon was there to look", gone: "removed" };

export class Detail {
  #shown = null;
  #bits = -1;
  #asked = 0;
  #askedAt = 0;
  #mends = new Map();
  #section = document.getElementById("detail");
  #heading = document.getElementById("holder");
  #mend = document.getElementById("holder-mend");
  #numbers = document.getElementById("numbers");
  #picture = document.getElementById("timeline");
  #list = document.getElementById("changes");

  setMends(mends) {
    this.#mends = new Map(mends);
  }

  /** Shows a holder from a frame. `words` are its reasons for doubt. Hides the section if there is no holder. */
  apply(holder, words) {
    this.#section.hidden = !holder;
    const isOther = holder?.key !== this.#shown;
    this.#shown = holder?.key ?? null;
    if (!holder) return;
    const begun = holder.since > 0 ? ` since ${clock(holder.since)}` : "";
    const state = words.length === 0 ? "exact" : `degraded: ${words.join(", ")}${begun}`;
    say(this.#heading, `${holder.worker}/${holder.rank} of ${holder.namespace}: ${state}`);
    if (isOther || this.#bits !== holder.bits) this.#advise(holder, words);
    if (isOther) for (const part of [this.#numbers, this.#picture, this.#list]) part.replaceChildren();
    if (isOther || this.#bits !== holder.bits || performance.now() - this.#askedAt > ASK_MS) this.#ask(holder);
    this.#bits = holder.bits;
  }

  #advise(holder, words) {
    const advice = words.map((word) => [word, mendOf(this.#mends.get(word) ?? "", holder)]).filter(([, { text }]) => text !== "");
    this.#mend.replaceChildren(...advice.map(([word, { text, commands }]) =>
      make("li", {}, make("b", { textContent: word }), ` ${text}. `, ...commands.flatMap(copied), ...copied(`kvatlas explain ${word}`))));
  }

  /** Asks the daemon for everything that it knows about the holder. */
  async #ask(holder) {
    this.#askedAt = performance.now();
    const asked = (this.#asked += 1);
    const parameters = new URLSearchParams({ namespace: holder.namespace, worker: holder.worker, changes: "true" });
    const answer = await fetch(`/workers?${parameters}`).catch(() => null);
    if (!answer?.ok) return;
    const { holders } = await answer.json();
    const found = holders.find(({ rank }) => rank === holder.rank);
    // Another holder may have been chosen while the answer was on its way.
    if (asked !== this.#asked || this.#shown !== holder.key || !found) return;
    this.#tell(holder, found);
    this.#draw(found.changes ?? []);
  }

  #tell(holder, found) {
    const outcomes = found.outcomes;
    const kept = outcomes && percent(outcomes.promised_blocks - outcomes.missing_blocks, outcomes.promised_blocks);
    const facts = [
      ["What is known", found.detail],
      ["Cost", found.cost?.text],
      ["Blocks", count(found.blocks)],
      ["Usable share", kept && `${kept} of the promised blocks were found by ${counted(outcomes.requests, "request", "requests")} lately`],
      ["Last batch", found.applied_at_us > 0 ? `${clock(found.applied_at_us)}, ${time(found.lag_us)} old when it was applied` : "none"],
      ["Epoch and number", `${found.epoch} / ${count(found.seq)}`],
      ["Waiting for a parent", counted(found.parked_events, "event", "events")],
      ["Time of its lane", time(found.worker_lane_us)],
      ["Address", holder.address],
      ["Labels", holder.labels],
    ];
    const shown = facts.filter(([, text]) => text);
    this.#numbers.replaceChildren(...shown.map(([name, text]) => make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: text }))));
  }

  #draw(changes) {
    const list = changes.slice(-CHANGES_MAX).reverse().map(({ at_us: at, state, degraded }) =>
      make("li", { textContent: `${clock(at)} ${STATES[state] ?? state}${degraded ? `: ${degraded.join(", ")}` : ""}` }));
    this.#list.replaceChildren(...list);
    this.#list.hidden = list.length === 0;
    this.#picture.replaceChildren();
    if (changes.length === 0) return;
    const now = Math.max(Date.now() * 1e3, changes.at(-1).at_us + 1);
    const begun = Math.max(changes[0].at_us, now - DAY_US);
    const x = (at) => WIDTH * Math.max(0, at - begun) / (now - begun);
    const strip = svg("svg", { class: "timeline", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `its states since ${clock(begun)}` });
    changes.forEach(({ at_us: at, state, degraded }, index) => {
      const [from, to] = [x(at), x(changes[index + 1]?.at_us ?? now)];
      const kind = state === "gone" || state === "unwatched" ? "unknown" : shade(degraded ?? []);
      // A short state still gets a visible width.
      strip.append(svg("rect", { class: kind, x: from.toFixed(1), width: Math.max(1, to - from).toFixed(1), height: HEIGHT }));
    });
    this.#picture.append(strip, make("div", { className: "ends small quiet" }, make("span", { textContent: clock(begun) }), make("span", { textContent: "now" })));
  }
}
