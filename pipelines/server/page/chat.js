// The page: shows a conversation, sends messages and handles keys.
import { write } from "./answer.js";
import { $, h } from "./dom.js";
import { showList, titleOf } from "./list.js";
import { Message } from "./message.js";
import { models as askModels } from "./server.js";
import * as settings from "./settings.js";
import * as store from "./store.js";

const FULL = "The browser's storage is full: this conversation is not stored. Delete others.";
// Milliseconds between two redraws, and between two saves, of an answer that grows.
const PICTURE = 50, SAVING = 1000;
// Max characters of an answer that a screen reader announces.
const SPOKEN = 1500;
const narrow = matchMedia("(max-width: 56rem)");

let chats = store.load();
let chat = store.create();
let models = [], model = null;
// The answer that is being written: {chat, node, control}.
let running = null;
let messages = [];
// The last error of each conversation: {text, retry}.
const problems = new Map();

const shown = () => store.path(chat);
const plain = () => model && !model.chat_template;

function toast(text) {
  clearTimeout(toast.timer);
  $("toast").textContent = text;
  $("toast").hidden = !text;
  toast.timer = setTimeout(() => { $("toast").hidden = true; }, 10_000);
}

function keep(one) {
  if (!one.nodes.length) return;
  chats.set(one.id, one);
  if (!store.save(one)) toast(FULL);
}

function list() {
  showList(chats, chat, { open: show, rename, remove });
  $("title").textContent = titleOf(chat);
  document.title = chat.title ? `${chat.title} · castiron` : "castiron";
}

// Scrolls to the end of the text, unless the reader has scrolled up.
function follow(always) {
  const box = $("scroll");
  if (always || box.scrollHeight - box.scrollTop - box.clientHeight < 90) box.scrollTop = box.scrollHeight;
}

const act = { edit, again: index => answer(index), goOn: index => answer(index), choose: index => { if (!running) { store.choose(chat, index); keep(chat); draw(); } } };

// Draws the current conversation.
function draw() {
  const indexes = shown();
  messages = indexes.map(index => new Message(chat, index, act));
  $("log").replaceChildren(...messages.map(message => message.element));
  messages.forEach((message, at) => message.paint(message.node === running?.node, at === messages.length - 1));
  $("empty").hidden = messages.length > 0;
  mark();
  trouble();
  list();
  follow(true);
}

// Marks the messages that are no longer sent to the model.
function mark() {
  document.querySelector(".note")?.remove();
  const from = messages.findIndex(message => message.index === chat.from);
  messages.forEach((message, at) => message.element.classList.toggle("gone", at < from));
  if (from > 0) messages[from].element.before(h("div", { class: "note" }, "The context is full: the model no longer sees the messages above."));
}

// Shows the last error, or that a question has no answer yet.
function trouble() {
  document.querySelector(".problem")?.remove();
  const problem = problems.get(chat.id), last = messages.at(-1);
  if (running?.chat === chat || (!problem && last?.node.role !== "user")) return;
  const text = problem?.text ?? "This message has no answer yet.";
  const retry = problem?.retry ?? (() => answer(last.index));
  $("log").append(h("div", { class: problem ? "problem error" : "problem", role: problem ? "alert" : null }, h("span", {}, text),
    h("button", { type: "button", class: "small", onclick: retry }, problem ? "Retry" : "Ask")));
}

function show(one, focus = true) {
  chat = one;
  draw();
  $("status").textContent = "";
  if (narrow.matches) side(false);
  if (focus) $("input").focus();
}

function busy() {
  $("send").hidden = Boolean(running);
  $("stop").hidden = !running;
}

// Requests an answer to a question, or more of an answer.
async function answer(index) {
  if (running) return;
  const one = chat;
  if (!model) {
    draw();
    document.querySelector(".problem")?.remove();
    if (!await findModels()) problems.set(one.id, { text: $("status").textContent, retry: () => answer(index) });
    // Meanwhile the user may have requested another answer.
    if (!model || running || chat !== one) { draw(); return; }
  }
  const before = one.head, going = one.nodes[index].role === "assistant";
  const node = going ? one.nodes[index] : store.add(one, "assistant", "", index), had = node.content.length;
  const control = new AbortController();
  problems.delete(one.id);
  running = { chat: one, node, control };
  let pictured = 0, saved = performance.now(), timer = 0;
  const picture = () => {
    timer = 0;
    pictured = performance.now();
    if (chat === one) { messages.find(message => message.node === node)?.paint(running?.node === node, true); follow(); }
    if (pictured - saved > SAVING && filled(node)) { saved = pictured; keep(one); }
  };
  const painted = state => {
    if ($("status").textContent !== state) $("status").textContent = state;
    timer ||= setTimeout(picture, Math.max(0, PICTURE - (performance.now() - pictured)));
  };
  draw();
  busy();
  $("announce").textContent = "The model is answering.";
  try {
    await write(node, one, index, settings.values(), model, control.signal, painted, () => { if (chat === one) { mark(); follow(); } });
  } catch (error) {
    if (error.name !== "AbortError") problems.set(one.id, { text: error.message, retry: () => answer(index) });
    if (error.code === "invalid_api_key") askForKey();
  }
  clearTimeout(timer);
  if (!filled(node)) {
    // The answer is empty, so the conversation is restored.
    one.nodes.pop();
    one.head = before;
  }
  running = null;
  one.changed = Date.now();
  if (chats.has(one.id)) keep(one);
  $("status").textContent = "";
  $("announce").textContent = problems.has(one.id) ? "" : node.content.slice(had, had + SPOKEN) || "No answer.";
  busy();
  if (chat === one) finish(node); else list();
  if (document.activeElement === document.body && matchMedia("(hover: hover)").matches) $("input").focus();
}

const filled = node => node.content || node.reasoning || node.calls.length;

// Draws a finished answer; an answer that failed or is empty changes the messages around it too.
function finish(node) {
  const message = messages.find(one => one.node === node);
  if (!filled(node) || problems.has(chat.id) || !message) { draw(); return; }
  message.paint(false, true);
  list();
  follow();
}

// Adds a question after the message `parent`, and requests its answer.
function ask(text, parent) {
  store.add(chat, "user", text, parent);
  chat.changed = Date.now();
  keep(chat);
  answer(chat.head);
}

function edit(index, text) {
  if (!running) ask(text, chat.nodes[index].parent);
}

function send(event) {
  event?.preventDefault();
  const text = plain() ? $("input").value : $("input").value.trim();
  if (!text.trim() || running) return;
  const last = chat.nodes[chat.head];
  $("input").value = "";
  grow();
  // The new question replaces a question without an answer.
  ask(text, last?.role === "user" ? last.parent : chat.head);
}

function grow() {
  $("input").style.height = "auto";
  $("input").style.height = `${$("input").scrollHeight + 2}px`;
}

function rename(one, title) {
  one.title = title;
  keep(one);
  list();
}

function remove(one) {
  if (running?.chat === one) running.control.abort();
  chats.delete(one.id);
  problems.delete(one.id);
  store.remove(one.id);
  if (one === chat) show(store.create()); else list();
  toast(`“${titleOf(one).slice(0, 40)}” is deleted.`);
}

function fresh() {
  if (chat.nodes.length) chat = store.create();
  show(chat);
}

// Shows or hides the list, which covers the conversation on a narrow screen and is beside it on a wide one.
function side(open) {
  document.body.classList.toggle("side", open);
  document.body.classList.toggle("no-side", !open);
  $("menu").setAttribute("aria-expanded", open);
  $("scrim").hidden = !(open && narrow.matches);
  $("room").inert = open && narrow.matches;
  if (open && narrow.matches) $("close-side").focus();
  else if (narrow.matches) $("menu").focus();
}

function askForKey() {
  $("status").textContent = "This server asks for an API key.";
  if (!$("panel").open) $("panel").showModal();
  $("fields").elements.key.focus();
}

// Reads the server's models; returns whether one can answer.
async function findModels() {
  try { models = await askModels(settings.values().key); } catch (error) {
    if (error.code === "invalid_api_key") askForKey(); else $("status").textContent = error.message;
    return false;
  }
  if (!models.length) { $("status").textContent = "This server has no model that generates text."; return false; }
  choose(models.find(one => one.id === store.loadSettings().model) ?? models[0]);
  $("model").replaceChildren(...models.map(({ id }) => h("option", { value: id }, id)));
  $("model").value = model.id;
  $("model").hidden = models.length < 2;
  $("only-model").textContent = models.length < 2 ? model.id : "";
  $("status").textContent = "";
  return true;
}

function choose(one) {
  model = one;
  settings.describe(model);
  $("input").placeholder = plain() ? "Text" : "Message";
  $("empty-text").textContent = plain() ? "This model has no chat template: it continues your text as it is." : "Enter sends, Shift+Enter starts a new line.";
}

$("form").addEventListener("submit", send);
$("stop").addEventListener("click", () => running?.control.abort());
$("input").addEventListener("input", grow);
$("input").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  if (event.key === "ArrowUp" && !event.target.value && !running) {
    event.preventDefault();
    messages.findLast(message => message.node.role === "user")?.edit();
  }
});
$("fresh").addEventListener("click", fresh);
$("search").addEventListener("input", list);
$("menu").addEventListener("click", () => side(!document.body.classList.contains("side")));
$("close-side").addEventListener("click", () => side(false));
$("scrim").addEventListener("click", () => side(false));
$("settings").addEventListener("click", () => $("panel").showModal());
$("help").addEventListener("click", () => $("keys").showModal());
$("model").addEventListener("change", () => {
  choose(models.find(({ id }) => id === $("model").value));
  store.saveSettings({ ...store.loadSettings(), model: model.id });
});
$("fields").elements.key.addEventListener("change", findModels);
$("forget").addEventListener("click", () => {
  running?.control.abort();
  chats.clear();
  problems.clear();
  store.forget();
  settings.clear();
  $("panel").close();
  show(store.create());
  toast("Everything is forgotten.");
});
addEventListener("keydown", event => {
  const command = event.ctrlKey || event.metaKey, key = event.key.toLowerCase(), dialog = document.querySelector("dialog[open]");
  const typing = event.target.matches?.("input, textarea, select");
  const found = command && event.shiftKey && key === "o" ? fresh
    : command && key === "k" ? () => { side(true); $("search").select(); }
    : command && key === "," ? () => $("panel").showModal()
    : (command && key === "/") || (key === "?" && !typing) ? () => $("keys").showModal() : null;
  if (found && !dialog) { event.preventDefault(); found(); }
  if (event.key !== "Escape" || dialog) return;
  if (document.body.classList.contains("side") && narrow.matches) side(false);
  else running?.control.abort();
});
addEventListener("pagehide", () => { if (running && filled(running.node)) store.save(running.chat); });
// Another page of this browser has changed the storage.
addEventListener("storage", event => {
  const id = store.idOf(event.key);
  if (!id || running?.chat.id === id) return;
  chats = new Map([...store.load(), ...(running ? [[running.chat.id, running.chat]] : [])]);
  const again = chats.get(chat.id);
  if (id === chat.id && again) { chat = again; draw(); } else list();
});
narrow.addEventListener("change", () => side(!narrow.matches));

settings.open();
side(!narrow.matches);
const newest = [...chats.values()].sort((a, b) => b.changed - a.changed)[0];
show(newest ?? chat, matchMedia("(hover: hover)").matches);
findModels();
