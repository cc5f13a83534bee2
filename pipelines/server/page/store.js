// Conversations and settings, each an entry of this browser's storage.
//
// A conversation is {id, title, changed, nodes, head, from}: a tree, because editing or answering a message again keeps the
// old version. A node is {role, content, parent}, for an answer with {reasoning, calls, end, stats}; `parent` is the index of
// the message before it, -1 of the first. `head` is the last message shown, `from` the first one that is sent to the model.
// Earlier versions of the page called `reasoning` `thoughts`.
const PREFIX = `castiron ${location.pathname} `;
const CHAT = `${PREFIX}chat `, SETTINGS = `${PREFIX}settings`;
const ROLES = ["user", "assistant"];
const TITLE = 80;

export const create = () => ({ id: crypto.getRandomValues(new Uint32Array(3)).join("-"), title: "", changed: Date.now(), nodes: [], head: -1, from: -1 });

// Returns a stored conversation; throws an Error if it is damaged.
function checked({ id, title, changed, nodes, head, from }) {
  const made = nodes.map((node, index) => {
    const { role, content, parent, end = "", stats = "", calls = [] } = node, reasoning = node.reasoning ?? node.thoughts ?? "";
    const texts = [title, role, content, end, stats, reasoning, ...calls.flatMap(call => [call.name, call.arguments])];
    if (!ROLES.includes(role) || texts.some(text => typeof text !== "string") || !(parent === -1 || (parent < index && nodes[parent]))) throw new Error("damaged");
    return role === "user" ? { role, content, parent } : { role, content, parent, reasoning, calls, end, stats };
  });
  const at = value => (made[value] ? value : -1);
  return { id, title, changed, nodes: made, head: at(head ?? made.length - 1), from: at(from) };
}

function read(key) {
  try { return JSON.parse(localStorage.getItem(key)); } catch { return null; }
}

// Returns all valid conversations by id.
export function load() {
  const chats = new Map();
  let keys = [];
  try { keys = Object.keys(localStorage).filter(key => key.startsWith(CHAT)); } catch { /* The browser has no storage. */ }
  for (const key of keys) {
    try { chats.set(key.slice(CHAT.length), checked(read(key))); } catch { /* The entry is damaged. */ }
  }
  return chats;
}

// Returns whether the value fits in the storage.
function write(key, value) {
  try { localStorage.setItem(key, JSON.stringify(value)); return true; } catch { return false; }
}

export const save = chat => write(CHAT + chat.id, chat);
export const idOf = key => (key?.startsWith(CHAT) ? key.slice(CHAT.length) : null);
export const loadSettings = () => read(SETTINGS) ?? {};
export const saveSettings = values => write(SETTINGS, values);

export function remove(id) {
  try { localStorage.removeItem(CHAT + id); } catch { /* The browser has no storage. */ }
}

export function forget() {
  try { Object.keys(localStorage).filter(key => key.startsWith(PREFIX)).forEach(key => localStorage.removeItem(key)); } catch { /* The browser has no storage. */ }
}

// Returns the indexes of the messages shown, first to last.
export function path(chat) {
  const found = [];
  for (let index = chat.head; index >= 0; index = chat.nodes[index].parent) found.unshift(index);
  return found;
}

// Returns the indexes of all versions of a message.
export const siblings = (chat, index) => chat.nodes.flatMap((node, other) => (node.parent === chat.nodes[index].parent ? [other] : []));

// Shows a message, and the newest messages after it.
export function choose(chat, index) {
  for (let next = index; next >= 0; next = chat.nodes.findLastIndex(node => node.parent === next)) chat.head = next;
}

// Adds a message after `parent`, and shows it.
export function add(chat, role, content, parent) {
  const node = { role, content, parent, ...(role === "assistant" && { reasoning: "", calls: [], end: "", stats: "" }) };
  chat.head = chat.nodes.push(node) - 1;
  if (!chat.title && role === "user") chat.title = content.trim().split("\n")[0].slice(0, TITLE);
  return node;
}
