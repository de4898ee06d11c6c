// Blocks that exact answers promised, compared with the blocks that requests found, by holder. Worst holders come
// first.
import { count, counted, make, percent, say } from "./text.js";

/** Titles of the columns, each with whether the column has numbers. */
const COLUMNS = [["Holder", false], ["Promised", true], ["Found", true], ["Not found", true], ["Share found", false], ["Found besides", true], ["Requests", true]];

export class Promises {
  #section = document.getElementById("promises");
  #note = document.getElementById("promises-note");
  #body = make("tbody");
  #drawn = "";

  constructor() {
    const heads = COLUMNS.map(([title, isNumber]) => make("th", { scope: "col", className: isNumber ? "number" : "", textContent: title }));
    document.getElementById("promised").append(make("table", { className: "promised" }, make("thead", {}, make("tr", {}, ...heads)), this.#body));
  }

  /** Shows the promises of the chosen namespace, as a frame has it. Hides the section if there are none. */
  apply(namespace) {
    const promises = namespace?.promises;
    this.#section.hidden = !promises;
    if (!promises) return;
    const { holders, worst } = promises;
    const shown = holders > worst.length ? `${count(worst.length)} of ${counted(holders, "holder", "holders")}` : counted(holders, "holder", "holders");
    say(this.#note, `${shown} of ${namespace.name}, blocks of the last one to two minutes`);
    const broken = new Set((namespace.broken_promises ?? []).map(nameOf));
    const drawn = JSON.stringify([worst, [...broken]]);
    if (this.#drawn === drawn) return;
    this.#drawn = drawn;
    this.#body.replaceChildren(...worst.map((one) => row(one, broken.has(nameOf(one)))));
  }
}

const nameOf = ({ worker, rank }) => `${worker}/${rank}`;

function row(one, isBroken) {
  const { requests, promised_blocks: promised, missing_blocks: missing, unpromised_blocks: besides } = one;
  const found = promised - missing;
  const number = (text) => make("td", { className: "number", textContent: text });
  const share = make("td", { className: isBroken ? "number state-degraded" : "number", textContent: percent(missing, promised) });
  const meter = make("meter", { min: 0, max: Math.max(1, promised), value: found, "aria-label": `share of what was promised of ${nameOf(one)} that was found` });
  return make("tr", {}, make("th", { scope: "row", className: "name", textContent: nameOf(one) }), number(count(promised)), number(count(found)), share, make("td", {}, meter),
    number(besides > 0 ? count(besides) : ""), number(count(requests)));
}
