// Conversations and settings, each an entry of this browser's storage.
//
// A conversation is {id, title, changed, nodes, head, from}: a tree, because editing or answering a message again keeps the
// old version. A node is {role, content, parent}, for an answer with {reasoning, calls, end, stats}; `parent` is the index of
// the message before it, -1 of the first. `head` is the last message shown, `from` the first one that is sent to the model.
// Earlier versions of the page called `reasoning` `thoughts`.
const PREFIX = `castiron ${location.pathname} `;
const CHAT = `${PREFIX}chat `, SETTINGS = `${PREFIX}settings`;
const ROLES = ["user", "assistant"], ENDS = ["", "stop", "length", "repetition", "stopped", "broken", "tool_calls"];
const TITLE = 80;

export const create = () => ({ id: crypto.getRandomValues(new Uint32Array(3)).join("-"), title: "", changed: Date.now(), nodes: [], head: -1, from: -1 });

const text = (value, max = Infinity) => typeof value === "string" && value.length <= max;

// Returns a conversation with exactly its fields, or throws an Error that names what is invalid.
function checked(given) {
  const bad = what => { throw new Error(what); };
  if (!text(given?.id, 60) || !text(given.title, 1000) || !Array.isArray(given.nodes)) bad("a conversation lacks its id, title or nodes");
  const nodes = given.nodes.map((node, index) => {
    if (!ROLES.includes(node?.role) || !text(node.content)) bad(`message ${index + 1} of a conversation has no role or content`);
    const { role, content, parent } = node, above = given.nodes[parent];
    if (!Number.isInteger(parent) || parent < -1 || parent >= index || (above?.role ?? "assistant") === role) bad(`message ${index + 1} of a conversation has an invalid parent`);
    const more = { reasoning: [node.reasoning, node.thoughts].find(one => text(one)) ?? "", end: ENDS.includes(node.end) ? node.end : "", stats: text(node.stats, 300) ? node.stats : "" };
    const calls = [node.calls].flat().filter(call => text(call?.name) && text(call.arguments)).map(call => ({ name: call.name, arguments: call.arguments }));
    return role === "user" ? { role, content, parent } : { role, content, parent, ...more, calls };
  });
  const at = value => (Number.isInteger(value) && value >= -1 && value < nodes.length ? value : nodes.length - 1);
  return { id: given.id, title: given.title.slice(0, TITLE), changed: Number(given.changed) || 0, nodes, head: at(given.head), from: at(given.from ?? -1) };
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
