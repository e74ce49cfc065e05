// ---- showing

const views = new Map(); // by node id
const NAMES = { user: "You", assistant: "Model", tool: "Tool" };
const ENDS = { length: CUT, tool_calls: "waits for a tool" };

function render(isMoved = true) {
  views.clear();
  const shown = path().map((node) => {
    const view = new View(node);
    views.set(node.id, view);
    return view.element;
  });
  const welcome = make("p", { class: "empty", text: "Write a message below. Under Tokens each token says where it came from and how likely it was." });
  $("log").replaceChildren(...(shown.length ? shown : [welcome]));
  $("legend").hidden = !settings.coloured;
  follow(isMoved);
}

let isStuck = true; // to the end of the conversation, until the reader scrolls up
function follow(always = false) {
  if (always) isStuck = true;
  if (isStuck) $("log").scrollTop = $("log").scrollHeight;
  $("newest").hidden = isStuck;
}

function onScroll() {
  const log = $("log");
  isStuck = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  $("newest").hidden = isStuck;
}

class View {
  constructor(node) {
    this.node = node;
    this.numDrawn = 0; // tokens
    this.isQueued = this.isThinking = false;
    this.slowest = 0; // milliseconds that drawing took
    this.thought = make("div", { class: "said", dir: "auto" });
    this.said = make("div", { class: "said", dir: "auto" });
    this.fold = make("details", { class: "thinking", hidden: true }, make("summary", { text: "Reasoning" }), this.thought);
    this.prompt = make("details", { class: "asked", hidden: true, on: { toggle: () => this.drawPrompt() } }, make("summary"), make("div", { class: "said", dir: "auto" }));
    this.calls = make("div");
    this.problem = make("p", { class: "error", role: "alert", hidden: true });
    this.foot = make("div", { class: "foot" });
    this.again = make("div", { class: "again", hidden: true });
    const who = NAMES[node.role];
    const media = make("div", { class: "pictures" }, ...(node.pictures || []).map((url) => make("figure", {}, shownMedia(url, "attached"))), ...(node.files || []).map(shownFile));
    this.element = make("article", { class: node.role, "aria-label": who, "data-node": node.id },
      make("div", { class: "who", text: who }), media, this.fold, this.said, this.calls, this.problem, this.foot, this.prompt, this.again);
    if (running?.node === node) {
      running.view = this;
      this.draw();
    } else this.finish();
  }

  get isColoured() { return settings.coloured && this.node.tokens?.length > 0; }

  soon() { // once a frame, and less often where drawing takes long
    if (this.isQueued) return;
    this.isQueued = true;
    const work = () => { this.isQueued = false; if (running?.view === this) this.draw(); };
    if (document.hidden || this.slowest > 12) setTimeout(work, Math.max(document.hidden ? 200 : 0, 3 * this.slowest));
    else requestAnimationFrame(work);
  }

  draw() { // what is new
    const began = performance.now(), { node } = this;
    if (node.reasoning) {
      this.fold.hidden = false;
      this.isThinking ||= this.numDrawn === 0;
    }
    if (this.isColoured) this.drawTokens();
    else this.drawText(false);
    this.drawCalls();
    this.drawFoot();
    this.slowest = 0.5 * this.slowest + 0.5 * (performance.now() - began);
    follow();
  }

  drawTokens() {
    const { node } = this, parts = [document.createDocumentFragment(), document.createDocumentFragment()];
    let first = this.first ?? this.numDrawn; // tokens with a part of a character wait for the rest of it
    for (; this.numDrawn < node.tokens.length; this.numDrawn += 1) {
      const at = this.numDrawn, token = node.tokens[at];
      if (token.text === "<think>") this.isThinking = true;
      const isBlank = !this.hasSaid && !token.text.trim();
      const part = this.isThinking || (isBlank && node.reasoning) ? 0 : 1;
      if (part) this.hasSaid = true;
      if (token.text === "</think>") this.isThinking = false;
      if (!token.text) { this.first = first; continue; }
      parts[part].append(...(at < MOST_SPANS ? [tokenSpan(token, first, at)] : laid(token.text)));
      first = at + 1;
      this.first = undefined;
    }
    this.thought.append(parts[0]);
    this.said.append(parts[1]);
  }

  drawText(isOver) {
    const { node } = this;
    if ((node.reasoning || "") !== this.thought.textContent) this.thought.replaceChildren(...laid(node.reasoning || ""));
    if (node.role !== "assistant") { this.said.replaceChildren(...laid(node.content)); return; }
    this.said.classList.add("formatted");
    this.formatted ??= new Formatted(this.said);
    this.formatted.draw(node.content, isOver);
  }

  finish() {
    const { node } = this;
    this.fold.hidden = !node.reasoning;
    if (this.isColoured || this.said.firstChild?.classList?.contains("t")) {
      this.thought.replaceChildren();
      this.said.replaceChildren();
      this.numDrawn = 0;
      this.first = this.formatted = undefined;
      this.hasSaid = false;
      this.isThinking = Boolean(node.reasoning);
    }
    if (this.isColoured) {
      this.said.classList.remove("formatted", "many");
      this.drawTokens();
      const start = this.said.querySelector(".t");
      if (start) start.tabIndex = 0; // one stop for all: arrows go on
    } else this.drawText(true);
    this.problem.hidden = !node.error;
    this.problem.textContent = node.error || "";
    this.drawCalls(true);
    this.drawFoot(true);
    this.again.hidden = !node.again;
    if (node.again) this.again.replaceChildren(...verdict(node.again));
    follow();
  }

  drawPrompt() {
    const { prompt } = this.node, place = this.prompt.lastChild;
    if (!this.prompt.open || place.firstChild || !prompt) return;
    if (prompt.first) place.append(`(${prompt.first} tokens before)`);
    place.append(...prompt.texts.map((text, at) => make("span", { class: prompt.first + at < prompt.num_cached ? "cache" : "", text })));
  }

  drawCalls(isOver = false) {
    const { node } = this, size = JSON.stringify(node.calls ?? []).length;
    if (!node.calls?.length || (!isOver && this.size === size)) return;
    this.size = size;
    const all = path(), behind = all.slice(all.indexOf(node) + 1);
    const isOpen = isOver && behind.every((one) => one.role === "tool");
    const answered = new Set(behind.map((one) => one.call));
    this.calls.replaceChildren(...node.calls.map((call) => {
      const box = make("div", { class: "call", role: "group", "aria-label": `Call of ${call.name}` }, make("strong", { text: `Call: ${call.name}` }), make("pre", { text: pretty(call.arguments) }));
      if (isOpen && !answered.has(call.id)) {
        const field = make("textarea", { rows: "2", "aria-label": `What ${call.name} returned`, placeholder: `What ${call.name} returned` });
        box.append(...callButtons(node, call, box), field, button("Return this", () => returned(node, call, field.value)));
      }
      return box;
    }));
  }

  facts(isOver) {
    const { node } = this, { prompt, usage } = node, facts = [];
    const count = usage?.completion_tokens && !node.continued ? usage.completion_tokens : node.tokens?.length ?? 0;
    const seconds = node.began ? (performance.now() - node.began) / 1000 : node.seconds;
    if (prompt) {
      this.prompt.hidden = false;
      this.prompt.firstChild.textContent = `Prompt: ${prompt.num_tokens} tokens, ${prompt.num_cached} from the cache`;
    }
    if (count) facts.push(several(count, "token"));
    if (count > 1 && seconds > 0 && !node.continued) {
      const speed = (count - 1) / seconds, limit = isOver ? node.limit : stats?.roofline?.one;
      facts.push(`${speed.toFixed(1)} tok/s${limit ? `, ${percent(speed / limit)} of the roofline (${limit.toFixed(1)})` : ""}`);
    }
    const drafted = usage?.completion_tokens_details;
    if (drafted && drafted.accepted_prediction_tokens + drafted.rejected_prediction_tokens) {
      facts.push(`${drafted.accepted_prediction_tokens} of ${drafted.accepted_prediction_tokens + drafted.rejected_prediction_tokens} drafted accepted`);
    }
    if (isOver && node.began !== undefined) facts.push(node.owner === tab ? LEFT : "another tab writes it");
    else if (isOver && node.ended) facts.push(ENDS[node.ended] || node.ended);
    return facts.join(" \u00b7 ");
  }

  drawFoot(isOver = false) {
    const text = this.node.role === "assistant" ? this.facts(isOver) : "";
    if (isOver) this.drawButtons(text);
    else this.foot.textContent = text;
  }

  drawButtons(facts) {
    const { node } = this, all = children(node.parent), at = all.indexOf(node);
    const parts = facts ? [make("span", { class: "facts", text: facts })] : [];
    if (node.bits) parts.push(make("span", { class: node.bits.at === node.bits.count ? "badge" : "error", text: bitsText(node.bits) }));
    if (all.length > 1) {
      parts.push(button("\u2039", () => show(node, -1), { disabled: at === 0, "aria-label": "Branch before" }),
        make("span", { class: "branch", text: `${at + 1}/${all.length}` }),
        button("\u203a", () => show(node, 1), { disabled: at === all.length - 1, "aria-label": "Branch behind" }));
    }
    parts.push(button("Copy", () => copy(node.content)), button("Edit", () => idle() && edit(node)));
    if (node.role === "assistant") parts.push(...this.answerButtons());
    this.foot.replaceChildren(...parts);
  }

  answerButtons() {
    const { node } = this;
    const parts = [button("Regenerate", () => idle() && answer(node.parent))];
    const isCut = node.error || node.ended === "length" || node.ended === STOPPED || node.began !== undefined;
    if (isCut && node.wish && path().at(-1) === node) parts.push(button("Continue", () => idle() && goOn(node)));
    if (!(node.tokens?.length > 0 && node.wish) || node.error || node.continued) return parts;
    const hasPictures = path(node.parent).some((one) => one.pictures?.length);
    if (node.wish.odds && !hasPictures && node.prompt) parts.push(button("Same bits?", () => recompute(node), { title: "Computes the answer again, as a prompt, and compares every log-probability bit by bit" }));
    parts.push(button("Ask again among others", () => { this.again.hidden = false; askAgain(node, this.again); }, {
      title: `The same request beside up to ${OTHERS.requests * OTHERS.copies} others, and a comparison bit by bit`,
    }));
    return parts;
  }
}

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

function tokenSpan(token, first, last) {
  const kind = { model: "", lookup: " lookup", you: " you" }[token.source] ?? " draft";
  const span = make("span", { class: `t${kind}${token.special ? " special" : ""}`, tabindex: "-1" }, ...laid(token.text));
  if (/^[\p{Cf}\p{Cc}]+$/u.test(token.text) && !/[\n\t]/.test(token.text)) span.dataset.mark = visible(token.text); // else unseen
  span.dataset.first = first;
  span.dataset.last = last;
  return span;
}
