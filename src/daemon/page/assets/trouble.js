// What is wrong, who it is, since when, and what to do: the first thing on the page, and absent while all is well.
import { copied, counted, make, mendOf, say, since, time } from "./text.js";

/** Rows that are shown, and names in a row, at most. */
const ROWS_MAX = 8;
const NAMES_MAX = 4;

export class Trouble {
  #section = document.getElementById("trouble");
  #list = document.getElementById("troubles");
  /** By what is wrong: when this page has seen it first, in microseconds. */
  #since = new Map();
  #rows = new Map();
  #mends = new Map();
  #words = [];

  /** The words for the bits of a holder's reasons, and what to do about each. */
  setReasons(reasons, mends) {
    this.#words = reasons;
    this.#mends = new Map(mends);
  }

  /** Takes in a frame and all holders. */
  apply(frame, holders) {
    const costs = new Map(frame.costs ?? []);
    const found = [...this.#notReady(frame), ...this.#shards(frame), ...this.#doubts(holders, costs), ...this.#publishers(frame), ...this.#promises(frame)].slice(0, ROWS_MAX);
    const keys = new Set(found.map(({ key }) => key));
    for (const key of this.#since.keys()) if (!keys.has(key)) this.#since.delete(key);
    for (const { key } of found) if (!this.#since.has(key)) this.#since.set(key, frame.now_us);
    for (const [key, row] of this.#rows) {
      if (keys.has(key)) continue;
      row.element.remove();
      this.#rows.delete(key);
    }
    for (const one of found) this.#show(one, frame.now_us);
    this.#section.hidden = found.length === 0;
  }

  #notReady(frame) {
    if (frame.ready) return [];
    return [{ key: "ready", what: "not ready", who: frame.reasons.join("; "), mend: "", word: "KvatlasNotReady" }];
  }

  #shards(frame) {
    return (frame.missing_shards ?? []).map(({ shard, shards, since_us: begun }) => ({ key: `shard ${shard}`, what: "shard missing", who: `shard ${shard}/${shards}: answers lack its workers`,
      mend: "start a daemon with that sharding.shard, or see why it is not ready", word: "KvatlasShardMissing", since: begun }));
  }

  /** A row for each namespace and reason, those of most holders first. */
  #doubts(holders, costs) {
    const found = new Map();
    for (const holder of holders) {
      if (holder.bits === 0) continue;
      for (const [bit, word] of this.#words) {
        if ((holder.bits & bit) === 0) continue;
        const key = `${word} ${holder.namespace}`;
        const row = found.get(key) ?? { key, what: word, word, namespace: holder.namespace, holders: [] };
        row.holders.push(holder);
        found.set(key, row);
      }
    }
    const rows = [...found.values()].sort((one, other) => other.holders.length - one.holders.length || (one.key < other.key ? -1 : 1));
    for (const row of rows) {
      // In the order of their names.
      const named = row.holders.sort((one, other) => one.place - other.place).slice(0, NAMES_MAX);
      const unnamed = row.holders.length - named.length;
      const more = unnamed > 0 ? ` and ${counted(unnamed, "other", "others")}` : "";
      // The publisher's own words, for its own doubts.
      const why = row.word.startsWith("upstream_") ? named.map(({ trouble }) => trouble).find((text) => text !== "") : undefined;
      row.who = `${named.map(({ worker, rank }) => `${worker}/${rank}`).join(", ")}${more} of ${row.namespace}${why ? `: ${why}` : ""}`;
      // The first is told what to do about, and the dearest what it costs.
      const { text, commands } = mendOf(this.#mends.get(row.word) ?? "", named[0]);
      [row.mend, row.commands] = [text, commands];
      row.cost = this.#dearest(row.holders, costs);
      // The daemon knows, unless it has just begun to look.
      row.since = Math.min(...row.holders.map(({ since }) => since || Infinity));
    }
    return rows;
  }

  /** What the doubt of one of these holders costs at most. */
  #dearest(holders, costs) {
    const numbers = new Set(holders.map(({ number }) => number));
    // They stand in that order.
    for (const [number, text] of costs) {
      if (!numbers.has(number)) continue;
      const { worker, rank } = holders.find((holder) => holder.number === number);
      return holders.length > 1 ? `${text} (${worker}/${rank})` : text;
    }
    return "";
  }

  /** Publishers that have no holder, and clocks that run ahead. */
  #publishers(frame) {
    const rows = [];
    const named = (names) => names.slice(0, NAMES_MAX).join(", ") + (names.length > NAMES_MAX ? " and others" : "");
    for (const { name, refused_publishers: names, refused, ahead, cost } of frame.namespaces) {
      if (names?.length) {
        const reasons = new Map((refused ?? []).map(({ worker, reason }) => [worker, reason]));
        const told = names.map((worker) => (reasons.has(worker) ? `${worker} (${reasons.get(worker)})` : worker));
        rows.push({ key: `refused ${name}`, what: "all batches dropped", word: reasons.get(names[0]) ?? "KvatlasBatchesDropped",
          who: `${named(told)} of ${name}`, cost: cost?.text ?? "", mend: "" });
      }
      if (ahead?.length) {
        rows.push({ key: `ahead ${name}`, what: "clock ahead", word: "KvatlasClockAhead", who: `${named(ahead)} of ${name}`,
          mend: "run an NTP client where the workers run, and restart those that are ahead" });
      }
    }
    return rows;
  }

  #promises(frame) {
    const rows = [];
    for (const { name, broken_promises: broken } of frame.namespaces) {
      for (const { worker, rank, promised_blocks: promised, missing_blocks: missing } of broken ?? []) {
        const share = Math.floor((100 * missing) / promised);
        rows.push({ key: `promise ${name} ${worker}/${rank}`, what: "promises broken", word: "KvatlasPromisesBroken", mend: "",
          who: `exact answers promise ${share} % more than ${worker}/${rank} of ${name} has` });
      }
    }
    return rows;
  }

  #show({ key, what, who, mend, word, since: begun, cost = "", commands = [] }, nowUs) {
    let row = this.#rows.get(key);
    if (!row) {
      row = { who: make("span"), age: make("span", { className: "quiet" }), cost: make("span"), mend: make("span"), own: make("span"), commands: "" };
      row.element = make("li", {}, make("b", { textContent: what }), " ", row.who, " ", row.age, row.cost, make("br"), row.mend, row.own,
        ...copied(`kvatlas explain ${word}`));
      this.#rows.set(key, row);
    }
    // In the order of what is found.
    this.#list.append(row.element);
    say(row.who, who);
    const age = nowUs - this.#since.get(key);
    const seen = age < 1e6 ? "" : `for at least ${time(age)}`;
    say(row.age, Number.isFinite(begun) ? since(begun, nowUs) : seen);
    say(row.cost, cost === "" ? "" : ` Cost: ${cost}.`);
    if (row.commands !== commands.join("\n")) {
      row.commands = commands.join("\n");
      row.own.replaceChildren(...commands.flatMap(copied));
    }
    say(row.mend, mend === "" ? "" : `What to do: ${mend}. `);
  }
}
