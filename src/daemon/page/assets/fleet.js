// The fleet: a matrix, and a table that has elements for the visible rows only.
import { Detail } from "./holder.js";
import { Matrix } from "./matrix.js";
import { count, counted, make, say, since, time } from "./text.js";
import { remember, remembered } from "./url.js";

/** The label in which a publisher says what keeps its holder from being exact. */
const TROUBLE_LABEL = "kvatlas/trouble";
const NARROW = matchMedia("(max-width: 40rem)");
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
  /** Keys of the holder that the keyboard is at, and of the holder whose details are shown. */
  #currentKey = null;
  #told = null;
  /** Holder that the page's address names. Empty once the holder has been shown. */
  #wanted = remembered("holder");
  #sort = { key: "state", down: true };
  #rows = [];
  #rowHeight = 28;
  #now = 0;
  #totals = { shown: 0, total: 0 };
  #grid = document.getElementById("grid");
  #body = document.getElementById("grid-body");
  #name = document.getElementById("filter-name");
  #state = document.getElementById("filter-state");
  #detail = new Detail();
  #matrix = new Matrix((key) => this.#choose(key));

  constructor() {
    const [key, way] = remembered("sort").split("-");
    if (COLUMNS.some((column) => column.key === key)) this.#sort = { key, down: way === "down" };
    this.#name.value = remembered("name");
    const head = document.getElementById("grid-head");
    COLUMNS.forEach((column, index) => {
      const button = make("button", { type: "button", tabIndex: -1, textContent: column.title });
      button.addEventListener("click", () => this.#sortBy(column.key));
      const cell = make("div", { role: "columnheader", "aria-colindex": index + 1 }, button);
      if (column.right) cell.dataset.side = "right";
      column.cell = cell;
      // Keyboard: only the first header is in the tab order, and arrow keys move to the other headers.
      button.tabIndex = index === 0 ? 0 : -1;
      button.addEventListener("keydown", (event) => this.#moveInHead(event, index));
      head.append(cell);
    });
    this.#name.addEventListener("input", () => {
      remember("name", this.#name.value);
      this.#refilter();
    });
    this.#state.addEventListener("change", () => {
      remember("state", this.#state.value);
      this.#refilter();
    });
    document.getElementById("detail-close").addEventListener("click", () => this.#choose(null));
    NARROW.addEventListener("change", () => this.#refilter());
    this.#grid.addEventListener("scroll", () => this.#draw(), { passive: true });
    this.#grid.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.#draw()).observe(this.#grid);
  }

  /** Stores the words for the bits of a holder's reasons, and the advice for each word. */
  setReasons(reasons, mends) {
    this.#reasons = reasons;
    this.#detail.setMends(mends ?? []);
    const known = new Set([...this.#state.options].map((option) => option.value));
    for (const [, word] of reasons) {
      if (!known.has(word)) this.#state.append(make("option", { value: word, textContent: `degraded: ${word}` }));
    }
    this.#state.value = remembered("state");
    if (this.#state.selectedIndex < 0) this.#state.value = "";
  }

  setNamespace(namespace) {
    this.#namespace = namespace;
    this.#refilter();
  }

  /** Numbers the holders in the order of their names, so that sorting by name compares numbers, which is fast. */
  #rank() {
    const all = [...this.#holders.values()];
    all.sort((one, other) => BY_NAME(one.worker, other.worker) || one.rank - other.rank || one.number - other.number);
    all.forEach((holder, place) => { holder.place = place; });
  }

  /** Applies the changes of a frame. Another process gives other numbers to the same holders, so all else refers to holders by their keys. */
  apply(change, nowUs) {
    if (change.whole) this.#holders.clear();
    for (const [number, namespace, worker, rank] of change.added) {
      if (!this.#holders.has(number)) this.#holders.set(number, { number, key: keyOf(namespace, worker, rank), namespace, worker, rank, blocks: 0, bits: 0, lag: 0, applied: 0, parked: 0, since: 0, place: 0, address: "", labels: "", trouble: "", low: worker.toLowerCase() });
    }
    for (const [number, address, labels] of change.profiles ?? []) {
      const holder = this.#holders.get(number);
      if (!holder) continue;
      const { [TROUBLE_LABEL]: trouble = "", ...own } = labels;
      const named = Object.entries(own).map(([key, value]) => `${key}=${value}`).join(", ");
      Object.assign(holder, { address, labels: named, trouble, low: `${holder.worker} ${address} ${named}`.toLowerCase() });
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

  /** Returns the holders of all namespaces. */
  holders() {
    return this.#holders.values();
  }

  #words(bits) {
    return this.#reasons.filter(([bit]) => (bits & bit) !== 0).map(([, word]) => word);
  }

  #sortBy(key) {
    const down = this.#sort.key === key ? !this.#sort.down : key !== "worker";
    this.#sort = { key, down };
    remember("sort", `${key}-${down ? "down" : "up"}`, "state-down");
    this.#refilter();
  }

  #refilter() {
    this.#grid.scrollTop = 0;
    this.#current = 0;
    this.#currentKey = null;
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
    if (this.#currentKey !== null) {
      const place = this.#shown.findIndex((holder) => holder.key === this.#currentKey);
      if (place >= 0) this.#current = place;
    }
    const all = this.#totals.total > this.#totals.shown ? ` (${count(this.#totals.shown)} of ${count(this.#totals.total)} are shown, degraded ones first)` : "";
    say(document.getElementById("fleet-count"), `${counted(this.#shown.length, "holder", "holders")}${all}`);
    this.#grid.setAttribute("aria-rowcount", this.#shown.length + 1);
    // Reasons are never cut off: the column is as wide as the longest text.
    const longest = [...new Set(this.#shown.map(({ bits }) => bits))].reduce((most, bits) => Math.max(most, this.#describe(bits).length), 0);
    this.#grid.style.setProperty("--state", `${Math.max(10, longest)}ch`);
    // On a narrow screen, the state is below the other cells, on lines of its own.
    this.#rowHeight = NARROW.matches ? 32 + 20 * Math.ceil(longest / 36) : 28;
    this.#grid.style.setProperty("--row", `${this.#rowHeight}px`);
    this.#body.style.height = `${this.#shown.length * this.#rowHeight}px`;
    this.#find();
    const told = this.#holder(this.#told);
    this.#detail.apply(told, told ? this.#words(told.bits) : []);
    const byName = [...this.#shown].sort((one, other) => one.place - other.place);
    this.#matrix.apply(byName, (bits) => this.#words(bits), this.#told);
    this.#draw();
  }

  /** Shows the holder that the page's address names, once a frame has brought it. */
  #find() {
    if (this.#wanted === "") return;
    const found = this.#shown.find(({ worker, rank }) => `${worker}/${rank}` === this.#wanted);
    if (!found) return;
    this.#told = found.key;
    this.#wanted = "";
  }

  /** Returns a holder's state in words. */
  #describe(bits) {
    return bits === 0 ? "exact" : `degraded: ${this.#words(bits).join(", ")}`;
  }

  #draw() {
    const visible = Math.ceil(this.#grid.clientHeight / this.#rowHeight) + 4;
    while (this.#rows.length < visible) this.#rows.push(this.#makeRow());
    const first = Math.max(0, Math.floor(this.#grid.scrollTop / this.#rowHeight) - 2);
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
      this.#chooseCurrent();
    });
    this.#body.append(element);
    return row;
  }

  #fill(row, holder, place) {
    row.place = place;
    row.element.style.top = `${place * this.#rowHeight}px`;
    row.element.setAttribute("aria-rowindex", place + 2);
    row.element.setAttribute("aria-selected", String(place === this.#current));
    row.element.classList.toggle("current", place === this.#current);
    const state = this.#describe(holder.bits);
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
    this.#currentKey = this.#shown[this.#current]?.key ?? null;
    const [top, height] = [this.#current * this.#rowHeight, this.#grid.clientHeight - this.#rowHeight];
    // The head covers the first row's height.
    if (top < this.#grid.scrollTop) this.#grid.scrollTop = top;
    else if (top + this.#rowHeight > this.#grid.scrollTop + height) this.#grid.scrollTop = top + this.#rowHeight - height;
    this.#draw();
  }

  #key(event) {
    if (event.target !== this.#grid) return;
    const page = Math.max(1, Math.floor(this.#grid.clientHeight / this.#rowHeight) - 2);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key in steps) this.#moveTo(this.#current + steps[event.key]);
    else if (event.key === "Enter" || event.key === " ") this.#chooseCurrent();
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

  #chooseCurrent() {
    this.#choose(this.#shown[this.#current]?.key ?? null);
  }

  /** Returns the holder with this key. */
  #holder(key) {
    if (key === null) return undefined;
    for (const holder of this.#holders.values()) if (holder.key === key) return holder;
    return undefined;
  }

  /** Shows the details of the holder with this key, or hides the details if there is no such holder. */
  #choose(key) {
    this.#told = key;
    this.#wanted = "";
    const holder = this.#holder(key);
    remember("holder", holder ? `${holder.worker}/${holder.rank}` : "");
    this.#refresh();
  }
}

/** Returns the key of a holder, which stays the same over restarts of the daemon. */
function keyOf(namespace, worker, rank) {
  return `${namespace}\n${worker}\n${rank}`;
}
