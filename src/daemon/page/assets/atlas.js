// The atlas: an icicle plot of the hottest prefixes. A node's width is its weight. Deeper nodes are lower.
import { count, counted, make, percent, say } from "./text.js";
import { remember, remembered } from "./url.js";

const LEVEL_HEIGHT = 34;

export class Atlas {
  #nodes = [];
  #elements = new Map();
  #atlas = null;
  #current = null;
  #chosen = null;
  #root = null;
  #namespace = "";
  #asked = 0;
  #holders = 0;
  #tree = document.getElementById("icicle");
  #lens = document.getElementById("lens");
  #zoomOut = document.getElementById("zoom-out");
  #explained = document.getElementById("explained");

  /** Makes the atlas. `restart` is called when another atlas must be requested. */
  constructor(restart) {
    this.#lens.value = remembered("lens", "asked");
    if (this.#lens.selectedIndex < 0) this.#lens.value = "asked";
    this.#lens.addEventListener("change", () => {
      remember("lens", this.lens, "asked");
      this.#forget();
      restart();
    });
    this.#zoomOut.addEventListener("click", () => this.#zoom(null));
    this.#tree.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.#draw()).observe(this.#tree);
  }

  get lens() {
    return this.#lens.value;
  }

  setNamespace(namespace) {
    this.#namespace = namespace;
    this.#forget();
  }

  /** Stores the number of holders of the namespace. */
  setHolders(count) {
    this.#holders = count;
  }

  apply(atlas) {
    this.#atlas = atlas;
    this.#nodes = atlas.nodes.map((node, index) => ({ ...node, index, children: [] }));
    for (const node of this.#nodes) if (node.parent !== null) this.#nodes[node.parent].children.push(node);
    for (const node of this.#nodes) node.children.sort((one, other) => other.weight - one.weight || one.index - other.index);
    const what = this.lens === "asked"
      ? `${counted(atlas.total, "sampled query", "sampled queries")} over ${atlas.seconds} s`
      : `${counted(atlas.total, "copy of a block", "copies of blocks")}${atlas.partial ? ", counted in part" : ""}`;
    const left = atlas.left_out > 0 ? `; ${count(atlas.left_out)} lighter ones are not drawn` : "";
    say(document.getElementById("atlas-note"), atlas.nodes.length === 0 ? this.#emptyNote() : `${what}${left}`);
    this.#draw();
  }

  #emptyNote() {
    return this.lens === "asked" ? "no queries have come for this namespace yet" : "nothing is held yet";
  }

  #forget() {
    this.#nodes = [];
    this.#current = this.#chosen = this.#root = this.#atlas = null;
    this.#draw();
    this.#explained.replaceChildren(make("p", { className: "quiet", textContent: "Choose a prefix to see who holds it, where each drops out, and what its loss would cost." }));
  }

  /** Returns the nodes with their places: the level from the top, and the share of the width. */
  #layout() {
    const root = this.#nodes.find((node) => node.block === this.#root);
    const roots = root ? [root] : this.#nodes.filter((node) => node.parent === null).sort((one, other) => other.weight - one.weight || one.index - other.index);
    const total = root ? root.weight : Math.max(1, this.#atlas?.total ?? 1);
    const placed = [];
    const place = (nodes, left, level) => {
      for (const node of nodes) {
        placed.push({ node, left, width: node.weight / total, level });
        place(node.children, left, level + 1);
        left += node.weight / total;
      }
    };
    place(roots, 0, 0);
    return placed;
  }

  #draw() {
    const width = this.#tree.clientWidth;
    const placed = this.#layout().filter(({ width: share }) => share * width >= 1.5);
    this.#zoomOut.disabled = this.#root === null;
    const kept = new Set();
    let levels = 0;
    for (const { node, left, width: share, level } of placed) {
      kept.add(node.block);
      levels = Math.max(levels, level + 1);
      const element = this.#elements.get(node.block) ?? this.#makeNode(node.block);
      element.style.left = `${100 * left}%`;
      element.style.width = `${100 * share}%`;
      element.style.top = `${level * LEVEL_HEIGHT}px`;
      element.className = `node ${coverage(node, this.#holders)}`;
      element.classList.toggle("current", node.block === this.#current);
      element.classList.toggle("chosen", node.block === this.#chosen);
      element.setAttribute("aria-level", level + 1);
      element.setAttribute("aria-selected", String(node.block === this.#chosen));
      element.setAttribute("aria-label", this.#describe(node));
      element.title = this.#describe(node);
      say(element, label(node, share * width));
    }
    for (const [block, element] of this.#elements) {
      if (!kept.has(block)) {
        element.remove();
        this.#elements.delete(block);
      }
    }
    this.#tree.style.height = `${Math.max(6, levels) * LEVEL_HEIGHT}px`;
    if (!kept.has(this.#current)) this.#current = placed[0]?.node.block ?? null;
    const current = this.#elements.get(this.#current);
    if (current) this.#tree.setAttribute("aria-activedescendant", current.id);
    else this.#tree.removeAttribute("aria-activedescendant");
  }

  #makeNode(block) {
    const element = make("div", { role: "treeitem", id: `prefix-${block}` });
    element.addEventListener("click", () => this.#choose(block));
    element.addEventListener("dblclick", () => this.#zoom(block));
    this.#elements.set(block, element);
    this.#tree.append(element);
    return element;
  }

  #describe(node) {
    const share = percent(node.weight, this.#atlas.total);
    const what = this.lens === "asked" ? `asked for by ${share} of the sampled queries` : `${share} of the copies`;
    const names = node.names.length === 0 ? "" : `: ${node.names.join(", ")}${node.all > node.names.length ? ", …" : ""}`;
    return `blocks ${node.start} to ${node.end - 1}, ${what}; ${counted(node.all, "holder has", "holders have")} all of it${names}; ${node.exact} exact${node.usable < node.all ? `; a request can reuse it from ${node.usable}` : ""}`;
  }

  #key(event) {
    const node = this.#nodes.find((known) => known.block === this.#current);
    if (!node) return;
    const visible = (candidate) => candidate && this.#elements.has(candidate.block);
    const siblings = (node.parent === null ? this.#nodes.filter((known) => known.parent === null).sort((one, other) => other.weight - one.weight || one.index - other.index) : this.#nodes[node.parent].children).filter(visible);
    const place = siblings.indexOf(node);
    const next = {
      ArrowDown: node.children.find(visible),
      ArrowUp: node.parent === null ? undefined : this.#nodes[node.parent],
      ArrowLeft: siblings[place - 1],
      ArrowRight: siblings[place + 1],
      Home: this.#layout()[0]?.node,
    };
    if (event.key in next) {
      if (visible(next[event.key])) this.#current = next[event.key].block;
      this.#draw();
      this.#elements.get(this.#current)?.scrollIntoView({ block: "nearest" });
    } else if (event.key === "Enter" || event.key === " ") this.#choose(this.#current);
    else if (event.key === "+") this.#zoom(this.#current);
    else if (event.key === "-" || event.key === "Escape") this.#zoom(null);
    else return;
    event.preventDefault();
  }

  #zoom(block) {
    this.#root = block;
    this.#current = block;
    this.#draw();
  }

  async #choose(block) {
    this.#current = this.#chosen = block;
    this.#draw();
    const asked = (this.#asked += 1);
    const parameters = new URLSearchParams({ namespace: this.#namespace, lens: this.lens, block });
    let shown;
    try {
      const response = await fetch(`/page/explain?${parameters}`);
      const found = await response.json();
      shown = response.ok ? this.#explain(block, found) : [make("p", { className: "trouble", textContent: found.error })];
    } catch {
      shown = [make("p", { className: "trouble", textContent: "the daemon did not answer" })];
    }
    // Answers can come out of order: only the answer for the latest choice is shown.
    if (asked === this.#asked) this.#explained.replaceChildren(...shown);
  }

  #explain(block, found) {
    const tokens = found.end * found.block_size;
    const zoom = make("button", { type: "button", textContent: "Zoom in" });
    zoom.addEventListener("click", () => this.#zoom(block));
    return [
      make("div", { className: "bar" },
        make("h3", { textContent: `${counted(found.end, "block", "blocks")} deep, ${counted(tokens, "token", "tokens")}` }), zoom),
      make("p", { className: "hash", textContent: block }),
      make("p", { textContent: `${counted(found.complete, "holder has", "holders have")} all of it, of ${count(found.holders_total)} that have its beginning.` }),
      ...doubted(found.doubtful),
      make("h3", { textContent: "What its loss would cost" }),
      loss(found),
      make("h3", { textContent: "Who holds it, and where each drops out" }),
      holderTable(found.holders.map((holder) => ({
        ...holder, of: found.end, dropped: holder.dropped_out && { position: holder.dropped_out[0], others: holder.dropped_out[1] },
      })), found.holders_total),
    ];
  }
}

function label(node, width) {
  if (width >= 190) return `${counted(node.end, "block", "blocks")} · ${counted(node.all, "holder", "holders")}`;
  if (width >= 120) return `${node.end} blocks · ${node.all}`;
  return width >= 60 ? `${node.end} · ${node.all}` : "";
}

function coverage(node, holders) {
  const doubt = node.all > 0 && node.exact === 0 ? " doubt" : "";
  const unusable = node.all > 0 && node.usable === 0 ? " unusable" : "";
  if (node.all === 0) return "none";
  if (node.all === 1) return `one${doubt}${unusable}`;
  if (node.all <= 3) return `few${doubt}${unusable}`;
  return (2 * node.all >= holders ? "most" : "many") + doubt + unusable;
}

function loss(found) {
  const { below, asking, compared, sampled, seconds, tokens } = found.loss;
  const list = make("ul", { className: "plain" });
  const add = (text) => list.append(make("li", { textContent: text }));
  // Holders are listed by the blocks that a request can reuse, so one that has all of it may come later, or not at all.
  const last = found.holders.find(({ blocks }) => blocks >= found.end);
  if (found.complete === 1) add(`One loss away: only ${last ? `${last.worker} rank ${last.rank}` : "one holder"} has all of it.`);
  else if (found.complete === 0) add("Nobody has all of it: it is lost already.");
  else add(`${counted(found.complete, "holder", "holders")} would have to lose it.`);
  add(`${counted(below.blocks, "block", "blocks")} at and below it, in ${counted(below.copies, "copy", "copies")}${below.partial ? " or more" : ""}, could no longer be found.`);
  if (sampled > 0) {
    // The sample keeps the first blocks of a query only.
    const what = compared < found.end ? `its first ${counted(compared, "block", "blocks")}.` : `all of it; each would compute ${counted(tokens, "token", "tokens")} again.`;
    add(`${count(asking)} of ${counted(sampled, "sampled query", "sampled queries")} in ${seconds} s (${percent(asking, sampled)}) ask for ${what}`);
  }
  return list;
}

const LIMITS = { full_attention: "full attention", window: "a sliding window", state: "a recurrent state", window_or_state: "a window or a state", last_token: "the last token" };

/** Returns a line about the holders that an answer does not list, and that may have more than is known; nothing if there are none. */
export function doubted(holders) {
  return holders > 0 ? [make("p", { className: "trouble", textContent: `${counted(holders, "holder", "holders")} not in this list may hold more than is known.` })] : [];
}

/** Returns a table of holders, with a bar for each holder's depth. */
export function holderTable(holders, total) {
  const head = make("tr", {}, ...["Worker", "Blocks", "Usable", "Depth", "State", "Limited by", "Drops out", "Address"].map((title, index) =>
    make("th", { textContent: title, scope: "col", className: index === 1 || index === 2 ? "number" : "" })));
  const rows = holders.map((holder) => {
    const state = holder.degraded.length === 0 ? "exact" : `degraded: ${holder.degraded.join(", ")}`;
    const dropped = holder.dropped ? `at block ${count(holder.dropped.position)}, which ${counted(holder.dropped.others, "other has", "others have")}` : "–";
    const depth = make("meter", { className: "depth", min: 0, max: Math.max(1, holder.of), value: holder.blocks, "aria-label": `${holder.blocks} of ${holder.of} blocks` });
    return make("tr", {},
      make("td", { className: "name", textContent: `${holder.worker} ${holder.rank}` }),
      make("td", { className: "number", textContent: count(holder.blocks) }),
      make("td", { className: "number", textContent: count(holder.usable) }),
      make("td", {}, depth),
      make("td", { className: holder.degraded.length === 0 ? "state-exact" : "state-degraded", textContent: state }),
      make("td", { textContent: LIMITS[holder.limit] ?? "–" }),
      make("td", { textContent: dropped }),
      make("td", { textContent: holder.address ?? "–" }));
  });
  const table = make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows));
  const more = total > holders.length ? [make("p", { className: "quiet", textContent: `and ${count(total - holders.length)} more` })] : [];
  // The table may be wider than the screen, and scrolls then.
  return make("div", { className: "scrolls", role: "group", "aria-label": "holders", tabIndex: 0 }, table, ...more);
}
