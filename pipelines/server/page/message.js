// A message on the page: its reasoning, tool calls, text and buttons.
import { copyButton, h } from "./dom.js";
import { Markdown } from "./markdown.js";
import { siblings } from "./store.js";

// Notes below an answer, by why it ended.
const NOTES = { length: "cut at its limit", repetition: "stopped where it repeated itself", stopped: "stopped", broken: "broken off" };

const button = (label, onclick, name) => h("button", { type: "button", class: "small", onclick, "aria-label": name }, label);

function pretty(json) {
  try { return JSON.stringify(JSON.parse(json), null, 2); } catch { return json; }
}

export class Message {
  // `act` has edit(index, text), again(index), goOn(index) and choose(index).
  constructor(chat, index, act) {
    this.chat = chat;
    this.index = index;
    this.node = chat.nodes[index];
    this.act = act;
    const mine = this.node.role === "user";
    this.body = h("div", { class: mine ? "body own" : "body" });
    this.above = h("div", { class: "above" });
    this.foot = h("div", { class: "foot" });
    this.element = h("article", { class: `message ${this.node.role}`, "aria-label": mine ? "You" : "Answer" }, this.above, this.body, this.foot);
    if (mine) this.body.textContent = this.node.content;
    else this.markdown = new Markdown(this.body);
  }

  // Draws the node; `busy`: it is being written, `last`: no message follows it.
  paint(busy, last) {
    const { node, element } = this;
    element.classList.toggle("busy", busy);
    element.setAttribute("aria-busy", busy);
    if (this.markdown) {
      this.paintReasoning(busy);
      this.paintCalls();
      this.markdown.update(node.content);
    }
    if (!busy || !this.foot.childElementCount) this.paintFoot(busy, last);
  }

  paintReasoning(busy) {
    const { reasoning, content } = this.node;
    if (!reasoning) return;
    if (!this.reasoning) {
      this.reasoning = h("details", { class: "reasoning" }, h("summary"), h("div"));
      this.reasoningMarkdown = new Markdown(this.reasoning.lastChild);
      this.above.prepend(this.reasoning);
    }
    const thinking = busy && !content;
    if (this.thinking !== thinking) this.reasoning.open = thinking;
    this.thinking = thinking;
    this.reasoning.firstChild.textContent = thinking ? "Thinking …" : "Reasoning";
    this.reasoningMarkdown.update(reasoning);
  }

  paintCalls() {
    this.above.querySelectorAll(".call").forEach(call => call.remove());
    this.above.append(...this.node.calls.map(call => h("details", { class: "call", open: true },
      h("summary", {}, "Calls ", h("code", {}, call.name)), h("pre", { tabindex: "0" }, pretty(call.arguments)))));
  }

  paintFoot(busy, last) {
    const { node, chat, index, act } = this, mine = node.role === "user";
    const all = siblings(chat, index), at = all.indexOf(index), parts = [];
    if (busy) { this.foot.replaceChildren(); return; }
    if (all.length > 1) {
      const turn = (by, label, name) => {
        const found = button(label, () => act.choose(all[at + by]), name);
        found.disabled = all[at + by] === undefined;
        return found;
      };
      const what = mine ? "wording" : "answer";
      parts.push(h("span", { class: "turn" }, turn(-1, "‹", `Previous ${what}`), h("span", {}, `${at + 1} / ${all.length}`), turn(1, "›", `Next ${what}`)));
    }
    parts.push(copyButton(() => node.content));
    if (mine) parts.push(button("Edit", () => this.edit()));
    else parts.push(button("Regenerate", () => act.again(node.parent)));
    if (!mine && last && node.end !== "stop" && node.end !== "tool_calls" && node.content) parts.push(button("Continue", () => act.goOn(index)));
    const notes = [NOTES[node.end], node.stats].filter(Boolean).join(" · ");
    if (notes) parts.push(h("span", { class: "stats" }, notes));
    this.foot.replaceChildren(...parts);
  }

  // Replaces the message by a text field; the edited message becomes another version of this one.
  edit() {
    const area = h("textarea", { rows: "1", "aria-label": "Edit your message" });
    const done = () => {
      form.replaceWith(this.body);
      this.foot.hidden = false;
      this.foot.querySelector("button:not(.turn button)")?.focus();
    };
    const submit = event => {
      event?.preventDefault();
      if (area.value.trim()) this.act.edit(this.index, area.value.trim());
    };
    const form = h("form", { class: "edit", onsubmit: submit, onkeydown: event => {
      if (event.key === "Escape") { event.stopPropagation(); done(); }
      if (event.target === area && event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
    } }, area, h("div", { class: "row" }, button("Cancel", done), h("button", { type: "submit", class: "small main" }, "Send")));
    area.value = this.node.content;
    this.body.replaceWith(form);
    this.foot.hidden = true;
    area.style.height = `${Math.min(area.scrollHeight + 4, 400)}px`;
    area.focus();
  }
}
