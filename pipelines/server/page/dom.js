// Elements, made of tags, attributes and text; nothing here or elsewhere is ever read as HTML.

export const $ = id => document.getElementById(id);

// An element; an attribute that begins with "on" is a listener, true is there and empty, false or null is left out.
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

// One of the drawings at the top of the page.
export function icon(name) {
  const space = "http://www.w3.org/2000/svg", svg = document.createElementNS(space, "svg"), use = document.createElementNS(space, "use");
  use.setAttribute("href", `#i-${name}`);
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

// Copies text; pages that did not come by https or from this machine have no clipboard but the selection's.
export async function copy(text) {
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

// A button that copies what `text` gives, and says so for a moment.
export function copyButton(text, label = "Copy") {
  const button = h("button", { type: "button", class: "small", onclick: async () => {
    await copy(text());
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = label; }, 1500);
  } }, label);
  return button;
}
