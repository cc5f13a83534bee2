// The list of conversations, which can be searched, renamed and deleted.
import { $, h, icon } from "./dom.js";

const holds = (chat, wanted) => [chat.title, ...chat.nodes.map(node => node.content)].some(text => text.toLowerCase().includes(wanted));

export const titleOf = chat => chat.title || "New conversation";

// Shows the conversations that match the search; `act` has open(chat), rename(chat, title) and remove(chat).
export function showList(chats, current, act) {
  const wanted = $("search").value.trim().toLowerCase();
  const found = [...chats.values()].filter(chat => chat.nodes.length && (!wanted || holds(chat, wanted))).sort((a, b) => b.changed - a.changed);
  $("no-chats").hidden = found.length > 0;
  $("no-chats").textContent = wanted ? "No conversation has these words." : "Conversations will be listed here.";
  $("chats").replaceChildren(...found.map(chat => item(chat, chat === current, act)));
}

function item(chat, current, act) {
  const title = titleOf(chat), small = (name, label, onclick) =>
    h("button", { type: "button", class: "icon tool", "aria-label": `${label} “${title}”`, title: label, onclick }, icon(name));
  const row = h("li", { class: current && "current" },
    h("button", { type: "button", class: "open", "aria-current": current && "true", onclick: () => act.open(chat) }, title),
    small("rename", "Rename", () => rename(row, chat, act)), small("delete", "Delete", () => act.remove(chat)));
  return row;
}

function rename(row, chat, act) {
  const field = h("input", { "aria-label": "Title of the conversation", maxlength: "80" });
  let over = false;
  const end = keep => {
    if (over) return;
    over = true;
    act.rename(chat, keep && field.value.trim() || chat.title);
  };
  field.value = chat.title;
  field.addEventListener("blur", () => end(true));
  field.addEventListener("keydown", event => {
    if (event.key === "Enter" || event.key === "Escape") { event.stopPropagation(); end(event.key === "Enter"); }
  });
  row.replaceChildren(field);
  field.select();
}
