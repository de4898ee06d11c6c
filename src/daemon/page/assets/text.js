// Elements and words. Text from outside becomes text nodes only, never markup.

/** Makes an element with properties and children. A string becomes a text node. */
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

/** Makes an SVG element with attributes. */
export function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** Returns elements with a command, and with a button that copies the command. */
export function copied(command) {
  const button = make("button", { type: "button", className: "copy", textContent: "copy", "aria-label": `copy the command ${command}` });
  button.addEventListener("click", () => { navigator.clipboard?.writeText(command).then(() => say(button, "copied"), () => {}); });
  return [make("code", { textContent: command }), " ", button, " "];
}

/** Returns the runbook's advice and its commands, for one culprit. Without a rank, they are about all ranks. */
export function mendOf(text, { namespace, worker, rank = "" }) {
  const culprit = `${namespace} ${worker} ${rank}`.trim();
  // Passed as a function, because names may have characters with a meaning in a replacement, such as `$`.
  const own = text.replaceAll("NAMESPACE WORKER RANK", () => culprit);
  const commands = [...text.matchAll(/kvatlas admin \w+ (?=NAMESPACE WORKER RANK)/g)].map(([command]) => command + culprit);
  return { text: own, commands };
}

/** Sets an element's text only if the text changes, so that a screen reader does not repeat it. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const count = (number) => whole.format(number);
export const compact = (number) => short.format(number);
export const counted = (number, one, several) => `${count(number)} ${number === 1 ? one : several}`;

/** Returns a share in percent, rounded down: a share that is nearly whole is not 100 %, and a small one is not 0 %. */
export function percent(part, all) {
  if (!(all > 0)) return "–";
  const whole = Math.floor((100 * part) / all);
  return whole === 0 && part > 0 ? "under 1 %" : `${whole} %`;
}

/** Returns a duration in microseconds as text. */
export function time(us) {
  if (us === null || us === undefined) return "–";
  if (us < 1000) return `${Math.round(us)} µs`;
  if (us < 1e6) return `${(us / 1e3).toPrecision(3)} ms`;
  if (us < 6e7) return `${(us / 1e6).toPrecision(3)} s`;
  if (us < 3.6e9) return `${Math.round(us / 6e7)} min`;
  return `${Math.round(us / 3.6e9)} h`;
}

/** Returns a time in microseconds since the Unix epoch as a clock time, with its age. */
export function since(us, nowUs) {
  return `since ${clock(us)} (${time(Math.max(0, nowUs - us))})`;
}

/** Returns the time of day, with the date if the date is not today's. */
export function clock(us) {
  const at = new Date(us / 1e3);
  const day = at.toDateString() === new Date().toDateString() ? "" : `${at.toLocaleDateString("en-CA")} `;
  return `${day}${at.toLocaleTimeString("en-GB")}`;
}

/** Returns the hour and minute of a time. */
export function moment(us) {
  return new Date(us / 1e3).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
}

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) { number /= 1024; unit += 1; }
  return `${number.toPrecision(number < 1000 ? 3 : 4)} ${units[unit]}`;
}
