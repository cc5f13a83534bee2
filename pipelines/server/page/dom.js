// Make elements from tags, attributes and text; no text is ever read as HTML.

export const $ = id => document.getElementById(id);

// Makes an element. An attribute "on..." is a listener; true sets an empty attribute, false and null set none.
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

// Makes an icon, one of the symbols at the top of the page.
export function icon(name) {
  const space = "http://www.w3.org/2000/svg", svg = document.createElementNS(space, "svg"), use = document.createElementNS(space, "use");
  use.setAttribute("href", `#i-${name}`);
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

// Copies text; without https or localhost, a page can only copy its selection.
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = h("textarea", { class: "unseen", readonly: true, "aria-hidden": "true" });
  area.value = text;
  const before = document.activeElement;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  before?.focus();
}

// Makes a button that copies the result of `text`.
export function copyButton(text) {
  const button = h("button", { type: "button", class: "small", onclick: async () => {
    await copy(text());
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  } }, "Copy");
  return button;
}
