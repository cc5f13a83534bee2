// The settings dialog; the next request uses the values of its fields.
import { $, h } from "./dom.js";
import { efforts, switches } from "./request.js";
import { loadSettings, saveSettings } from "./store.js";

const fields = () => [...$("fields").elements].filter(field => field.name);

export const values = () => Object.fromEntries(fields().map(field => [field.name, field.value]));

function colours() {
  const { theme } = values();
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

// Shows the defaults of the chosen model, and the options of its template.
export function describe(model) {
  for (const name of ["temperature", "top_p", "top_k", "min_p"]) $("fields").elements[name].placeholder = model.sampling[name] ?? "";
  const select = $("fields").elements.thinking, chosen = select.value || loadSettings().thinking || "";
  const choices = switches(model).length ? ["on", "off"] : efforts(model) ? ["low", "medium", "high"] : [];
  $("thinking").hidden = !choices.length;
  select.replaceChildren(...["", ...choices].map(value => h("option", { value }, value || "as the model has it")));
  select.value = choices.includes(chosen) ? chosen : "";
}

export function clear() {
  fields().forEach(field => { field.value = ""; });
  colours();
}

// Fills the fields with the stored settings; each change is stored if there is space.
export function open() {
  const stored = loadSettings();
  for (const field of fields()) if (typeof stored[field.name] === "string") field.value = stored[field.name];
  colours();
  $("fields").addEventListener("input", () => {
    colours();
    saveSettings({ ...loadSettings(), ...values() });
  });
}
