// Choices on the page, kept in the page's address, so that a link shows others the same.

const chosen = new URLSearchParams(location.search);

/** Returns the choice called `name` from the address. */
export function remembered(name, otherwise = "") {
  return chosen.get(name) ?? otherwise;
}

/** Puts a choice into the address. The usual choice is left out. */
export function remember(name, value, usual = "") {
  if (value === usual) chosen.delete(name);
  else chosen.set(name, value);
  const text = chosen.toString();
  const address = text === "" ? location.pathname : `${location.pathname}?${text}`;
  if (address !== location.pathname + location.search) history.replaceState(null, "", address + location.hash);
}
