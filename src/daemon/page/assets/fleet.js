// The fleet: a table of which only the visible rows exist.
import { clock, count, counted, make, say, since, time } from "./text.js";

/** Changes of a holder's state that are listed at most. */
const CHANGES_MAX = 20;

const ROW_HEIGHT = 28;
const COLUMNS = [
  { key: "worker", title: "Worker" },
  { key: "rank", title: "Rank", right: true },
  { key: "state", title: "State" },
  { key: "address", title: "Address" },
  { key: "blocks", title: "Blocks", right: true },
  { key: "lag", title: "Lag", right: true },
  { key: "age", title: "Last batch", right: true },
];
const BY_NAME = new Intl.Collator("en", { numeric: true }).compare;

export class Fleet {
  #holders = new Map();
  #namespace = "";
  #reasons = [];
  #shown = [];
  #current = 0;
  #currentNumber = null;
  #told = null;
  #sort = { key: "state", down: true };
  #rows = [];
  #now = 0;
  #totals = { shown: 0, total: 0 };
  #grid = document.getElementById("grid");
  #body = document.getElementById("grid-body");
  #name = document.getElementById("filter-name");
  #state = document.getElementById("filter-state");

  constructor() {
    const head = document.getElementById("grid-head");
    COLUMNS.forEach((column, index) => {
      const button = make("button", { type: "button", tabIndex: -1, textContent: column.title });
      button.addEventListener("click", () => this.#sortBy(column.key));
      const cell = make("div", { role: "columnheader", "aria-colindex": index + 1 }, button);
      if (column.right) cell.dataset.side = "right";
      column.cell = cell;
      // Sorting by the keyboard: the first header is in the tab order, arrows go on from it.
      button.tabIndex = index === 0 ? 0 : -1;
      button.addEventListener("keydown", (event) => this.#moveInHead(event, index));
      head.append(cell);
    });
    this.#name.addEventListener("input", () => this.#refilter());
    this.#state.addEventListener("change", () => this.#refilter());
    this.#grid.addEventListener("scroll", () => this.#draw(), { passive: true });
    this.#grid.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.#draw()).observe(this.#grid);
  }

  /** The words for the bits of a holder's reasons. */
  setReasons(reasons) {
    this.#reasons = reasons;
    const known = new Set([...this.#state.options].map((option) => option.value));
    for (const [, word] of reasons) {
      if (!known.has(word)) this.#state.append(make("option", { value: word, textContent: `degraded: ${word}` }));
    }
  }

  setNamespace(namespace) {
    this.#namespace = namespace;
    this.#refilter();
  }

  /** Gives each holder its place by name: comparing words thousands of times a second would be felt. */
  #rank() {
    const all = [...this.#holders.values()];
    all.sort((one, other) => BY_NAME(one.worker, other.worker) || one.rank - other.rank || one.number - other.number);
    all.forEach((holder, place) => { holder.place = place; });
  }

  /** Takes in what has changed. */
  apply(change, nowUs) {
    if (change.whole) this.#holders.clear();
    for (const [number, namespace, worker, rank] of change.added) {
      if (!this.#holders.has(number)) this.#holders.set(number, { number, namespace, worker, rank, blocks: 0, bits: 0, lag: 0, applied: 0, parked: 0, since: 0, place: 0, address: "", labels: "", low: worker.toLowerCase() });
    }
    for (const [number, address, labels] of change.profiles ?? []) {
      const holder = this.#holders.get(number);
      if (!holder) continue;
      const named = Object.entries(labels).map(([key, value]) => `${key}=${value}`).join(", ");
      Object.assign(holder, { address, labels: named, low: `${holder.worker} ${address} ${named}`.toLowerCase() });
    }
    for (const [number, since] of change.since ?? []) {
      const holder = this.#holders.get(number);
      if (holder) holder.since = since;
    }
    for (const [number, blocks, bits, lag, applied, parked] of change.facts) {
      const holder = this.#holders.get(number);
      if (holder) Object.assign(holder, { blocks, bits, lag, applied, parked });
    }
    for (const number of change.gone) this.#holders.delete(number);
    if (change.whole || change.added.length > 0) this.#rank();
    this.#now = nowUs;
    this.#totals = change;
    this.#refresh();
  }

  /** All holders, of every namespace. */
  holders() {
    return this.#holders.values();
  }

  /** How many holders of the namespace, or of all, are exact and degraded. */
  counts() {
    let [exact, degraded, blocks] = [0, 0, 0];
    for (const holder of this.#holders.values()) {
      if (this.#namespace && holder.namespace !== this.#namespace) continue;
      if (holder.bits === 0) exact += 1; else degraded += 1;
      blocks += holder.blocks;
    }
    return { exact, degraded, blocks };
  }

  #words(bits) {
    return this.#reasons.filter(([bit]) => (bits & bit) !== 0).map(([, word]) => word);
  }

  #sortBy(key) {
    const down = this.#sort.key === key ? !this.#sort.down : key !== "worker";
    this.#sort = { key, down };
    this.#refilter();
  }

  #refilter() {
    this.#grid.scrollTop = 0;
    this.#current = 0;
    this.#currentNumber = null;
    this.#refresh();
  }

  #refresh() {
    const wanted = this.#name.value.trim().toLowerCase();
    const state = this.#state.value;
    const reason = this.#reasons.find(([, word]) => word === state);
    const isWanted = (holder) => {
      if (this.#namespace && holder.namespace !== this.#namespace) return false;
      if (state === "exact" && holder.bits !== 0) return false;
      if (state === "degraded" && holder.bits === 0) return false;
      if (reason && (holder.bits & reason[0]) === 0) return false;
      return wanted === "" || holder.low.includes(wanted);
    };
    this.#shown = [...this.#holders.values()].filter(isWanted);
    const sign = this.#sort.down ? -1 : 1;
    const by = {
      worker: () => 0,
      rank: (one, other) => one.rank - other.rank,
      state: (one, other) => Number(one.bits !== 0) - Number(other.bits !== 0),
      address: (one, other) => BY_NAME(one.address, other.address),
      blocks: (one, other) => one.blocks - other.blocks,
      lag: (one, other) => one.lag - other.lag,
      age: (one, other) => other.applied - one.applied,
    }[this.#sort.key];
    const nameSign = this.#sort.key === "worker" ? sign : 1;
    this.#shown.sort((one, other) => sign * by(one, other) || nameSign * (one.place - other.place));
    for (const column of COLUMNS) {
      const order = column.key !== this.#sort.key ? "none" : this.#sort.down ? "descending" : "ascending";
      column.cell.setAttribute("aria-sort", order);
    }
    if (this.#currentNumber !== null) {
      const place = this.#shown.findIndex((holder) => holder.number === this.#currentNumber);
      if (place >= 0) this.#current = place;
    }
    const all = this.#totals.total > this.#totals.shown ? ` (the first ${count(this.#totals.shown)} of ${count(this.#totals.total)})` : "";
    say(document.getElementById("fleet-count"), `${counted(this.#shown.length, "holder", "holders")}${all}`);
    this.#grid.setAttribute("aria-rowcount", this.#shown.length + 1);
    this.#body.style.height = `${this.#shown.length * ROW_HEIGHT}px`;
    this.#tell();
    this.#draw();
  }

  #draw() {
    const visible = Math.ceil(this.#grid.clientHeight / ROW_HEIGHT) + 4;
    while (this.#rows.length < visible) this.#rows.push(this.#makeRow());
    const first = Math.max(0, Math.floor(this.#grid.scrollTop / ROW_HEIGHT) - 2);
    this.#rows.forEach((row, index) => {
      const place = first + index;
      const holder = index < visible ? this.#shown[place] : undefined;
      row.element.hidden = !holder;
      if (holder) this.#fill(row, holder, place);
    });
    const current = this.#rows.find((row) => !row.element.hidden && row.place === this.#current);
    if (current) this.#grid.setAttribute("aria-activedescendant", current.element.id);
    else this.#grid.removeAttribute("aria-activedescendant");
  }

  #makeRow() {
    const cells = COLUMNS.map((column, index) => {
      const cell = make("div", { role: "gridcell", "aria-colindex": index + 1 });
      if (column.right) cell.dataset.side = "right";
      return cell;
    });
    cells[0].className = "name";
    const element = make("div", { className: "row", role: "row", id: `holder-row-${this.#rows.length}` }, ...cells);
    const row = { element, cells, place: -1 };
    element.addEventListener("click", () => {
      this.#moveTo(row.place);
      this.#choose();
    });
    this.#body.append(element);
    return row;
  }

  #fill(row, holder, place) {
    row.place = place;
    row.element.style.top = `${place * ROW_HEIGHT}px`;
    row.element.setAttribute("aria-rowindex", place + 2);
    row.element.setAttribute("aria-selected", String(place === this.#current));
    row.element.classList.toggle("current", place === this.#current);
    const words = this.#words(holder.bits);
    const state = holder.bits === 0 ? "exact" : `degraded: ${words.join(", ")}`;
    const age = holder.applied === 0 ? "never" : time(Math.max(0, this.#now - holder.applied));
    const texts = [holder.worker, String(holder.rank), state, holder.address || "–", count(holder.blocks), time(holder.lag), age];
    row.cells.forEach((cell, index) => say(cell, texts[index]));
    row.cells[0].title = holder.worker;
    row.cells[2].title = holder.since > 0 ? `${state} ${since(holder.since, this.#now)}` : state;
    row.cells[3].title = holder.labels;
    row.cells[2].className = holder.bits === 0 ? "state-exact" : "state-degraded";
  }

  #moveTo(place) {
    this.#current = Math.min(Math.max(0, place), Math.max(0, this.#shown.length - 1));
    this.#currentNumber = this.#shown[this.#current]?.number ?? null;
    const [top, height] = [this.#current * ROW_HEIGHT, this.#grid.clientHeight - ROW_HEIGHT];
    // The head covers the first row's height.
    if (top < this.#grid.scrollTop) this.#grid.scrollTop = top;
    else if (top + ROW_HEIGHT > this.#grid.scrollTop + height) this.#grid.scrollTop = top + ROW_HEIGHT - height;
    this.#draw();
  }

  #key(event) {
    if (event.target !== this.#grid) return;
    const page = Math.max(1, Math.floor(this.#grid.clientHeight / ROW_HEIGHT) - 2);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key in steps) this.#moveTo(this.#current + steps[event.key]);
    else if (event.key === "Enter" || event.key === " ") this.#choose();
    else return;
    event.preventDefault();
  }

  #moveInHead(event, index) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = step && COLUMNS[index + step];
    if (!next) return;
    for (const column of COLUMNS) column.cell.firstChild.tabIndex = column === next ? 0 : -1;
    next.cell.firstChild.focus();
    event.preventDefault();
  }

  #choose() {
    this.#told = this.#shown[this.#current]?.number ?? null;
    this.#tell();
    this.#list();
  }

  /** Lists how the state of the chosen holder has changed, the newest first. */
  async #list() {
    const list = document.getElementById("changes");
    list.replaceChildren();
    list.hidden = true;
    const holder = this.#holders.get(this.#told);
    if (!holder) return;
    const asked = new URLSearchParams({ namespace: holder.namespace, worker: holder.worker, changes: "true" });
    const answer = await fetch(`/workers?${asked}`).catch(() => null);
    if (!answer?.ok) return;
    const { holders } = await answer.json();
    const changes = holders.find(({ rank }) => rank === holder.rank)?.changes ?? [];
    // Another one may have been chosen meanwhile.
    if (this.#told !== holder.number) return;
    for (const { at_us: at, state, degraded } of changes.slice(-CHANGES_MAX).reverse()) {
      const words = { unwatched: "no daemon was there to look", gone: "removed" }[state] ?? state;
      list.append(make("li", { textContent: `${clock(at)} ${words}${degraded ? `: ${degraded.join(", ")}` : ""}` }));
    }
    list.hidden = list.childElementCount === 0;
  }

  #tell() {
    const element = document.getElementById("holder");
    const holder = this.#holders.get(this.#told);
    element.hidden = !holder;
    if (!holder) return;
    const words = this.#words(holder.bits);
    const begun = holder.since > 0 ? ` ${since(holder.since, this.#now)}` : "";
    const state = words.length === 0 ? "exact" : `degraded: ${words.join(", ")}${begun}`;
    const where = holder.address ? ` at ${holder.address}` : "";
    const labels = holder.labels ? `; ${holder.labels}` : "";
    say(element, `${holder.worker}${where}, rank ${holder.rank}, namespace ${holder.namespace}: ${state}${labels}; ` +
      `${counted(holder.blocks, "block", "blocks")}; the last batch was ${time(holder.lag)} old when it was applied; ` +
      `${counted(holder.parked, "event waits", "events wait")} for a parent.`);
  }
}
