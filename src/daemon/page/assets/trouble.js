// Troubles, with culprit, time and advice. They stand first on the page, and are hidden while there are none.
import { copied, count, counted, make, mendOf, percent, say, since, time } from "./text.js";

/** Maximum number of rows, and maximum number of names in a row. */
const ROWS_MAX = 8;
const NAMES_MAX = 4;
/** Reasons for doubt that follow from a silent NATS server: nothing can be done about single holders then. */
const OF_SILENCE = new Set(["behind", "stale"]);

export class Trouble {
  #section = document.getElementById("trouble");
  #list = document.getElementById("troubles");
  /** Time at which this page first saw each trouble, in microseconds, by the trouble's key. */
  #since = new Map();
  #rows = new Map();
  #rest = make("span");
  #more = make("li", { className: "quiet", hidden: true }, this.#rest, ...copied("kvatlas doctor"));
  #mends = new Map();
  #dropMends = new Map();
  #words = [];

  /** Stores the words for the bits of a holder's reasons, the advice for each word, and that for each reason of drops. */
  setReasons(reasons, mends, dropMends) {
    this.#words = reasons;
    this.#mends = new Map(mends);
    this.#dropMends = new Map(dropMends);
  }

  /** Shows the troubles of a frame and of all holders. */
  apply(frame, holders) {
    const costs = new Map(frame.costs ?? []);
    const all = [...this.#notReady(frame), ...this.#silence(frame), ...this.#outage(frame), ...this.#shards(frame), ...this.#strays(frame), ...this.#dropped(frame), ...this.#snapshots(frame),
      ...this.#uploads(frame), ...this.#doubts(frame, holders, costs), ...this.#promises(frame), ...this.#clocks(frame)];
    const found = all.slice(0, ROWS_MAX);
    const keys = new Set(found.map(({ key }) => key));
    for (const key of this.#since.keys()) if (!keys.has(key)) this.#since.delete(key);
    for (const { key } of found) if (!this.#since.has(key)) this.#since.set(key, frame.now_us);
    for (const [key, row] of this.#rows) {
      if (keys.has(key)) continue;
      row.element.remove();
      this.#rows.delete(key);
    }
    found.forEach((one, place) => this.#show(one, place, frame.now_us));
    this.#tellRest(all.slice(ROWS_MAX));
    this.#section.hidden = found.length === 0;
  }

  #mend(word) {
    return this.#mends.get(word) ?? "";
  }

  #notReady({ ready, reasons, awaited }) {
    if (ready) return [];
    return [{ key: "ready", what: "not ready", who: reasons.join("; "), mend: awaited ? this.#mend(awaited) : "nothing: it is stopping", word: "KvatlasNotReady" }];
  }

  #silence({ broker_silent_us: silent, stream_trouble: stream, now_us: now }) {
    if (!silent) return [];
    if (stream) {
      return [{ key: "silence", what: "stream silent", word: "behind", who: `${stream}; all holders are behind`,
        mend: "correct what it names; otherwise see whether the NATS servers run and answer others: more than half of those that have the stream must", since: now - silent }];
    }
    return [{ key: "silence", what: "NATS server silent", word: "behind", who: "nothing comes from it, not even the daemon's own messages; all holders are behind",
      mend: "see whether the NATS server runs and answers others, and the network to it", since: now - silent }];
  }

  #shards(frame) {
    const word = "KvatlasShardMissing";
    return (frame.missing_shards ?? []).map(({ shard, shards, since_us: begun, namespace, refusal }) => {
      const who = `shard ${shard}/${shards}`;
      if (!namespace) return { key: `shard ${shard}`, what: "shard missing", word, who, mend: this.#mend(word), since: begun };
      return { key: `shard ${shard} ${namespace}`, what: "shard refuses", word, who: `${who} about ${namespace}: ${refusal}`,
        mend: "mend what the shard says; kvatlas status at its admin listener says more", since: begun };
    });
  }

  #outage({ shard_outage: outage }) {
    const word = "KvatlasShardMissing";
    return outage ? [{ key: "outage", what: "no answers", word, who: outage.error, mend: this.#mend(word), since: outage.since_us }] : [];
  }

  #snapshots({ snapshots }) {
    const word = "KvatlasSnapshotsFail";
    return snapshots ? [{ key: "snapshots", what: "snapshots fail", word, who: snapshots.error, mend: this.#mend(word), since: snapshots.since_us }] : [];
  }

  #uploads({ uploads }) {
    const word = "KvatlasSnapshotUploadsFail";
    return uploads ? [{ key: "uploads", what: "snapshots are not sent", word, who: uploads.error, mend: this.#mend(word), since: uploads.since_us }] : [];
  }

  /** Returns a row for each namespace and reason. Rows with the most holders come first. */
  #doubts({ fleet, namespaces, broker_silent_us: silent }, holders, costs) {
    const found = new Map();
    const degraded = namespaces.reduce((sum, namespace) => sum + namespace.degraded, 0);
    const least = fleet.shown < degraded ? "at least " : "";
    for (const holder of holders) {
      if (holder.bits === 0) continue;
      for (const [bit, word] of this.#words) {
        if ((holder.bits & bit) === 0 || (silent && OF_SILENCE.has(word))) continue;
        const key = `${word} ${holder.namespace}`;
        const row = found.get(key) ?? { key, what: word, word, namespace: holder.namespace, holders: [] };
        row.holders.push(holder);
        found.set(key, row);
      }
    }
    const rows = [...found.values()].sort((one, other) => other.holders.length - one.holders.length || (one.key < other.key ? -1 : 1));
    for (const row of rows) {
      // The names are in their order.
      const first = row.holders.sort((one, other) => one.place - other.place).slice(0, NAMES_MAX);
      const unnamed = row.holders.length - first.length;
      const more = unnamed > 0 ? ` and ${least}${counted(unnamed, "other", "others")}` : "";
      // For a publisher's own doubt, the row has the publisher's own explanation.
      const why = row.word.startsWith("upstream_") ? first.map(({ trouble }) => trouble).find((text) => text !== "") : undefined;
      row.who = `${first.map(({ worker, rank }) => `${worker}/${rank}`).join(", ")}${more} of ${row.namespace}${why ? `: ${why}` : ""}`;
      // The advice is about the first holder, and the cost is that of the most expensive one.
      Object.assign(row, advice(this.#mends, row.word, first[0]));
      row.cost = this.#dearest(row.holders, costs);
      // The daemon knows the start of a doubt, unless it has only just begun to look.
      row.since = Math.min(...row.holders.map(({ since }) => since || Infinity));
    }
    return rows;
  }

  /** Returns the cost of the holder whose doubt costs most among `holders`. */
  #dearest(holders, costs) {
    const numbers = new Set(holders.map(({ number }) => number));
    // The most expensive holder comes first in `costs`.
    for (const [number, text] of costs) {
      if (!numbers.has(number)) continue;
      const { worker, rank } = holders.find((holder) => holder.number === number);
      return holders.length > 1 ? `${text} (${worker}/${rank})` : text;
    }
    return "";
  }

  /** Returns a row for each namespace that does not exist although events for it come. */
  #strays(frame) {
    return (frame.strays ?? []).map(({ namespace, worker, reason, detail, since_us: begun }) => ({ key: `stray ${namespace}`, what: "nothing is taken", word: reason,
      who: `of namespace ${namespace}, lastly from ${worker} (${reason}): ${detail}`, since: begun, ...advice(this.#dropMends, reason, { namespace, worker }) }));
  }

  /** Returns a row for each namespace and reason for which publishers without a holder are refused. */
  #dropped(frame) {
    const rows = new Map();
    for (const { name, refused, cost } of frame.namespaces) {
      for (const { worker, reason, since_us: begun } of refused ?? []) {
        const key = `dropped ${reason} ${name}`;
        const row = rows.get(key) ?? { key, what: "all batches dropped", word: reason, cost: cost?.text ?? "", names: [], since: Infinity,
          ...advice(this.#dropMends, reason, { namespace: name, worker }) };
        row.names.push(worker);
        row.who = `${named(row.names)} (${reason}) of ${name}`;
        row.since = Math.min(row.since, begun || Infinity);
        rows.set(key, row);
      }
    }
    return [...rows.values()];
  }

  /** Returns the rows about clocks that run ahead. */
  #clocks(frame) {
    const word = "KvatlasClockAhead";
    const troubled = frame.namespaces.filter(({ ahead }) => ahead?.length);
    return troubled.map(({ name, ahead, ahead_since_us: begun }) => ({ key: `ahead ${name}`, what: "clock ahead", word,
      who: `${named(ahead)} of ${name}`, mend: this.#mend(word), since: begun }));
  }

  #promises(frame) {
    const word = "KvatlasPromisesBroken";
    return frame.namespaces.flatMap(({ name, broken_promises: broken }) => (broken ?? []).map(({ worker, rank, promised_blocks: promised, missing_blocks: missing }) => ({
      key: `promise ${name} ${worker}/${rank}`, what: "promises broken", word,
      who: `${percent(missing, promised)} of what exact answers promise of ${worker}/${rank} of ${name} is not found`,
      ...advice(this.#mends, word, { namespace: name, worker, rank }) })));
  }

  /** Shows the number and kinds of the rows for which there is no room. */
  #tellRest(rest) {
    this.#more.hidden = rest.length === 0;
    const kinds = [...new Set(rest.map(({ what }) => what))];
    say(this.#rest, `and ${count(rest.length)} more: ${kinds.join(", ")} `);
    if (this.#list.lastChild !== this.#more) this.#list.append(this.#more);
  }

  #show({ key, what, who, mend, word, since: begun, cost = "", commands = [] }, place, nowUs) {
    let row = this.#rows.get(key);
    if (!row) {
      row = { who: make("span"), age: make("span", { className: "quiet" }), cost: make("span"), mend: make("span"), own: make("span"), commands: "" };
      row.element = make("li", {}, make("b", { textContent: what }), " ", row.who, " ", row.age, row.cost, make("br"), row.mend, row.own,
        ...copied(`kvatlas explain ${word}`));
      this.#rows.set(key, row);
    }
    // Rows are in the order of the findings. A row that is moved without need would lose the keyboard's focus.
    if (this.#list.children[place] !== row.element) this.#list.insertBefore(row.element, this.#list.children[place] ?? null);
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

/** Returns the advice for a word, with the commands about a culprit. */
function advice(mends, word, culprit) {
  const { text, commands } = mendOf(mends.get(word) ?? "", culprit);
  return { mend: text, commands };
}

/** Returns the first names of a list as text. Of many names, the daemon sends only some. */
function named(names) {
  return names.slice(0, NAMES_MAX).join(", ") + (names.length > NAMES_MAX ? " and others" : "");
}
