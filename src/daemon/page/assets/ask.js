// The query box.
import { counted, make } from "./text.js";
import { doubted, holderTable } from "./atlas.js";

/** Maximum length of a request target. The listener takes 16 KiB of head, with the browser's own headers. */
const TARGET_LENGTH_MAX = 14000;

export class Ask {
  #namespace = "";
  #form = document.getElementById("ask-form");
  #of = document.getElementById("ask-form-of");
  #text = document.getElementById("ask-text");
  #lora = document.getElementById("ask-lora");
  #salt = document.getElementById("ask-salt");
  #answer = document.getElementById("answer");

  constructor() {
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
    this.#text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.#ask();
    });
    this.#of.addEventListener("change", () => {
      const areTokens = this.#of.value === "tokens";
      this.#lora.disabled = this.#salt.disabled = !areTokens;
    });
  }

  setNamespace(namespace) {
    this.#namespace = namespace;
    this.#answer.replaceChildren();
  }

  #query() {
    const form = this.#of.value;
    const words = this.#text.value.split(/[\s,;[\]"']+/).filter((word) => word !== "");
    if (words.length === 0) throw new Error("Give at least one number or hash.");
    if (form !== "tokens") return { [form]: words };
    const tokens = words.map((word) => {
      if (!/^\d+$/.test(word) || Number(word) > 0xffffffff) throw new Error(`“${word.slice(0, 40)}” is no token: tokens are whole numbers.`);
      return Number(word);
    });
    const query = { tokens };
    if (this.#lora.value !== "") query.lora_name = this.#lora.value;
    if (this.#salt.value !== "") query.cache_salt = this.#salt.value;
    return query;
  }

  async #ask() {
    try {
      const query = encodeURIComponent(JSON.stringify(this.#query())).replaceAll("%2C", ",");
      const target = `/page/ask?namespace=${encodeURIComponent(this.#namespace)}&query=${query}`;
      if (target.length > TARGET_LENGTH_MAX) throw new Error("This prompt is too long for the page: ask with kvatlas query --tokens-file.");
      const response = await fetch(target);
      const reply = await response.json();
      if (!response.ok) throw new Error(reply.error);
      this.#answer.replaceChildren(...show(reply));
    } catch (error) {
      this.#answer.replaceChildren(make("p", { className: "trouble", role: "alert", textContent: error.message }));
    }
  }
}

function show(reply) {
  const heading = make("h3", { textContent: `${counted(reply.query_blocks, "block", "blocks")} asked for; ${counted(reply.holders_total, "holder has", "holders have")} a beginning of it` });
  const foreign = reply.foreign_holders > 0
    ? [make("p", { className: "trouble", textContent: `${counted(reply.foreign_holders, "holder", "holders")} cannot be found in this form: their engines' hashes are not the contract's.` })] : [];
  const unsure = [...foreign, ...doubted(reply.doubtful_holders)];
  if (reply.holders.length === 0) return [heading, ...unsure];
  const holders = reply.holders.map((holder) => ({
    worker: holder.worker, rank: holder.rank, blocks: holder.matched_blocks, usable: holder.usable_blocks ?? holder.matched_blocks, limit: holder.limited_by, of: reply.query_blocks, degraded: holder.degraded ?? [], address: holder.address,
    dropped: holder.dropped_out && { position: holder.dropped_out.position, others: holder.dropped_out.other_holders },
  }));
  return [heading, ...unsure, holderTable(holders, reply.holders_total)];
}
