// ---- one token, what else was likely, and the way on from there

let chosen = null;
function tell(span) {
  forget();
  const node = nodes.get(span.closest("article")?.dataset.node);
  if (!node?.tokens) return;
  chosen = span;
  span.classList.add("chosen");
  const parts = [make("div", { class: "shows", text: visible(span.textContent.slice(0, 200)) })];
  for (let at = Number(span.dataset.first); at <= Number(span.dataset.last); at += 1) parts.push(...tokenFacts(node, at));
  const box = $("token");
  box.replaceChildren(...parts, button("Close", () => { const back = chosen; forget(); back?.focus(); }));
  box.hidden = false;
  say(parts.map((part) => part.textContent).join(". "));
  const place = span.getBoundingClientRect();
  box.style.left = `${Math.max(4, Math.min(place.left, innerWidth - box.offsetWidth - 8))}px`;
  const below = place.bottom + 6;
  box.style.top = `${Math.max(4, below + box.offsetHeight < innerHeight ? below : place.top - box.offsetHeight - 6)}px`;
}

function tokenFacts(node, at) {
  const token = node.tokens[at];
  const facts = [make("div", { text: `Token ${at + 1}, number ${token.id} in the vocabulary` }), make("div", { class: "source", text: `From ${SOURCES[token.source] || token.source}` })];
  if (token.logprob === undefined) return [...facts, make("div", { class: "hint", text: "There are no probabilities for it; see Settings." })];
  const ways = node.wish && start(node, at) !== null;
  const shown = (one, isOwn) => {
    const text = visible(one.text) || "(part of a character)";
    const can = ways && !isOwn && one.text && !one.text.startsWith("bytes:") && !/^<\|.*\|>$/.test(one.text);
    return can ? button(text, () => branch(node, at, one), { title: "Go on from here with this token" }) : text;
  };
  const row = (one, isOwn) => make("tr", { class: isOwn ? "own" : "" }, make("td", {}, shown(one, isOwn)), make("td", { text: `${(100 * Math.exp(one.logprob)).toPrecision(3)}%` }), make("td", { text: one.logprob.toFixed(4) }));
  const rows = token.top.map((one) => row(one, one.id === token.id));
  if (!token.top.some((one) => one.id === token.id)) rows.push(row(token, true));
  const head = make("tr", {}, ...["Token", "Probability", "Log"].map((text) => make("th", { scope: "col", text })));
  return [...facts, make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)), make("div", { class: "hint", text: "Under the model's own distribution, before temperature and filters. Another token starts a branch that goes on from it." })];
}

function start(node, at) { // the text before a token of the answer; null: it belongs to the reasoning, or to a call
  const texts = node.tokens.map((token) => (token.special ? "" : token.text));
  const whole = texts.join(""), from = node.content ? whole.indexOf(node.content) : 0;
  const text = texts.slice(0, at).join("");
  return from < 0 || text.length < from || (node.reasoning && !from) || node.calls?.length ? null : text.slice(from);
}

async function branch(node, at, token) { // another answer that begins as this one did, up to another token
  if (!idle()) return;
  forget();
  const content = start(node, at) + token.text;
  const same = structuredClone(node.tokens.slice(0, at));
  const taken = { ...token, source: "you", top: node.tokens[at].top };
  const made = add({ role: "assistant", parent: node.parent, reasoning: node.reasoning, calls: [], content, tokens: [...same, taken], wish: structuredClone(node.wish) });
  if (content.trim()) await goOn(made);
  else note("An answer cannot go on from white space alone.");
}

function forget() {
  chosen?.classList.remove("chosen");
  chosen = null;
  $("token").hidden = true;
}

function walk(span, step) { // arrows among the tokens of one answer
  const all = [...span.closest(".said").querySelectorAll(".t")];
  const to = all[all.indexOf(span) + step];
  if (!to) return;
  span.tabIndex = -1;
  to.tabIndex = 0;
  to.focus();
  if (!$("token").hidden) tell(to);
}
