// Elements and words. Text from outside becomes text nodes only, never markup.

/** An element with properties and children; a string becomes a text node. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

/** An element of a picture, with attributes. */
export function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** A command with a button that copies it. */
export function copied(command) {
  const button = make("button", { type: "button", className: "copy", textContent: "copy", "aria-label": `copy the command ${command}` });
  button.addEventListener("click", () => { navigator.clipboard?.writeText(command).then(() => say(button, "copied"), () => {}); });
  return [make("code", { textContent: command }), " ", button, " "];
}

/** What to do about a culprit: the runbook's text, and the commands in it that are about one. Without a rank it is all of a worker. */
export function mendOf(text, { namespace, worker, rank = "" }) {
  const culprit = `${namespace} ${worker} ${rank}`.trim();
  // A function: names may hold what a replacement would take for a sign.
  const own = text.replaceAll("NAMESPACE WORKER RANK", () => culprit);
  const commands = [...text.matchAll(/kvatlas admin \w+ (?=NAMESPACE WORKER RANK)/g)].map(([command]) => command + culprit);
  return { text: own, commands };
}

/** Sets the text of an element if it is another one: what is read aloud must not be repeated. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const count = (number) => whole.format(number);
export const compact = (number) => short.format(number);
export const percent = (part, all) => (all > 0 ? `${Math.round((100 * part) / all)} %` : "–");
export const counted = (number, one, several) => `${count(number)} ${number === 1 ? one : several}`;

/** A time in microseconds. */
export function time(us) {
  if (us === null || us === undefined) return "–";
  if (us < 1000) return `${Math.round(us)} µs`;
  if (us < 1e6) return `${(us / 1e3).toPrecision(3)} ms`;
  if (us < 6e7) return `${(us / 1e6).toPrecision(3)} s`;
  if (us < 3.6e9) return `${Math.round(us / 6e7)} min`;
  return `${Math.round(us / 3.6e9)} h`;
}

/** A moment in microseconds since the Unix epoch, as a clock says it, and how long ago it was. */
export function since(us, nowUs) {
  return `since ${clock(us)} (${time(Math.max(0, nowUs - us))})`;
}

/** The time of day of a moment, with the date where that is another one than today. */
export function clock(us) {
  const at = new Date(us / 1e3);
  const day = at.toDateString() === new Date().toDateString() ? "" : `${at.toLocaleDateString("en-CA")} `;
  return `${day}${at.toLocaleTimeString("en-GB")}`;
}

/** The hour and minute of a moment. */
export function moment(us) {
  return new Date(us / 1e3).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
}

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) { number /= 1024; unit += 1; }
  return `${number.toPrecision(number < 1000 ? 3 : 4)} ${units[unit]}`;
}
