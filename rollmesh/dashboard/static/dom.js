// Builds elements. Text becomes text nodes only: what a rollout said can never become markup.

/** An element with attributes and children; strings become text, null is left out. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) continue;
    if (name.startsWith("--")) made.style.setProperty(name, value);
    else if (name === "onclick") made.addEventListener("click", value);
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null).map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

export const byId = (id) => document.getElementById(id);

/** A table's body of rows; a cell is text, or [text, class]. */
export function fillTable(table, headings, rows) {
  const cell = (value, tag) => {
    const [text, style] = Array.isArray(value) ? value : [value, null];
    return element(tag, { class: style, scope: tag === "th" ? "col" : null }, text);
  };
  const head = element("thead", {}, element("tr", {}, ...headings.map((heading) => cell(heading, "th"))));
  const body = element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((value) => cell(value, "td")))));
  const caption = table.querySelector("caption");
  table.replaceChildren(...(caption ? [caption] : []), head, body);
}
