// ---- Markdown: markdown-it reads it, and what it finds is made of elements and text alone

const markdown = globalThis.markdownit({ html: false, linkify: false, breaks: false });
const LINK = new RegExp("^(https?|mailto):", "i");
const MOST_CODE = 100000; // characters of a block that are coloured
const MOST_FORMULA = 2000, MOST_LINES = 100; // characters, lines in which the end of a formula is looked for

function mathInline(state, silent) { // $x$ and \(x\)
  const { src, pos } = state;
  const isDollar = src[pos] === "$", open = isDollar ? (src[pos + 1] === "$" ? "$$" : "$") : src.slice(pos, pos + 2);
  const close = { $: "$", $$: "$$", "\\(": "\\)", "\\[": "\\]" }[open];
  if (!close) return false;
  const start = pos + open.length, size = src.slice(start, start + MOST_FORMULA).indexOf(close), end = start + size;
  const text = src.slice(start, end);
  if (size < 0 || !text.trim()) return false;
  // Not prices: no space inside the marks, no digit behind.
  if (open === "$" && (/^\s|\s$/.test(text) || /\d/.test(src[end + 1] ?? "") || text.includes("\n"))) return false;
  if (!silent) Object.assign(state.push("math", "", 0), { content: text, markup: open });
  state.pos = end + close.length;
  return true;
}

function mathBlock(state, first, last, silent) { // $$ and \[ on lines of their own
  const line = (at) => state.src.slice(state.bMarks[at] + state.tShift[at], state.eMarks[at]);
  const open = line(first).slice(0, 2), close = { $$: "$$", "\\[": "\\]" }[open];
  if (!close) return false;
  const lines = [line(first).slice(2)];
  while (!lines.at(-1).includes(close)) {
    if (first + lines.length >= last || lines.length >= MOST_LINES) return false;
    lines.push(line(first + lines.length));
  }
  const [end, behind] = lines.pop().split(close, 2), at = first + lines.length;
  if (behind.trim()) return false; // a formula within text
  if (silent) return true;
  Object.assign(state.push("math", "", 0), { content: [...lines, end].join("\n"), markup: open, block: true, map: [first, at + 1] });
  state.line = at + 1;
  return true;
}
markdown.inline.ruler.before("escape", "math", mathInline);
markdown.block.ruler.before("fence", "math", mathBlock, { alt: ["paragraph"] });

function formula(text, isBlock) {
  const place = make(isBlock ? "div" : "span", isBlock ? { class: "formula", tabindex: "0", role: "group", "aria-label": "Formula" } : {});
  try {
    temml.render(text, place, { displayMode: isBlock, throwOnError: true, trust: false, maxExpand: 100, maxSize: [20, 20] });
  } catch {
    place.replaceChildren(make("code", { text }));
  }
  return place;
}

function coloured(text, language) { // what highlight.js finds, as elements
  if (!language || !hljs.getLanguage(language) || text.length > MOST_CODE) return [text];
  const build = (node) => (typeof node === "string" ? node : node.scope
    ? make("span", { class: `h-${node.scope.split(".")[0]}` }, ...node.children.map(build)) : wrap(node.children.map(build)));
  const wrap = (parts) => { const all = document.createDocumentFragment(); all.append(...parts); return all; };
  return hljs.highlight(text, { language, ignoreIllegals: true })._emitter.rootNode.children.map(build);
}

function codeBlock(text, info, isOpen) {
  const language = info.trim().split(/\s+/)[0].toLowerCase();
  const code = make("code", {}, ...(isOpen ? laid(text) : coloured(text, language)));
  return make("div", { class: "code" },
    make("div", { class: "bar-of" }, make("span", { text: language || "text" }), button("Copy", () => copy(text), { "aria-label": "Copy this code" })),
    make("pre", { tabindex: "0", role: "region", "aria-label": `Code${language ? `, ${language}` : ""}` }, code));
}

const LEAVES = {
  text: (token) => token.content,
  softbreak: () => "\n",
  hardbreak: () => make("br"),
  hr: () => make("hr"),
  code_inline: (token) => make("code", { text: token.content }),
  fence: (token, isOpen) => codeBlock(token.content, token.info, isOpen),
  code_block: (token) => codeBlock(token.content, "", false),
  math: (token) => formula(token.content, token.block || token.markup === "$$" || token.markup === "\\["),
  // Nothing is fetched for a model: a picture is its name and its address.
  image: (token) => link(token.attrGet("src"), make("span", { text: `[picture: ${token.content || token.attrGet("src")}]` })),
};

function link(address, child) {
  if (!LINK.test(address || "")) return child;
  return make("a", { href: address, rel: "noopener noreferrer nofollow", target: "_blank", title: address }, child);
}

function opened(token) {
  const options = {};
  if (token.tag === "a") {
    const address = token.attrGet("href");
    return LINK.test(address) ? make("a", { href: address, rel: "noopener noreferrer nofollow", target: "_blank", title: address }) : make("span");
  }
  const side = /text-align:(\w+)/.exec(token.attrGet("style") || "")?.[1];
  if (side) options.class = side;
  if (token.tag === "ol" && token.attrGet("start")) options.start = String(token.attrGet("start"));
  return make(token.tag, options);
}

function build(tokens, into, isOpen) {
  const stack = [into];
  tokens.forEach((token, at) => {
    if (token.hidden) return;
    if (token.nesting === 1) {
      const made = opened(token);
      const outer = token.tag === "table" ? make("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, made) : made;
      stack.at(-1).append(outer);
      stack.push(made);
    } else if (token.nesting === -1) stack.pop();
    else if (token.type === "inline") build(token.children, stack.at(-1), false);
    else stack.at(-1).append(LEAVES[token.type]?.(token, isOpen && at === tokens.length - 1) ?? token.content);
  });
}

// An answer that grows: blocks that are over stay as they are, only the last one is made again.
class Formatted {
  constructor(place) {
    this.place = place;
    this.start = 0; // of the text that may still change
    this.numKept = 0; // elements before it
    this.last = "";
  }

  draw(text, isOver) {
    if (text === this.last && !isOver) return;
    this.last = text;
    if (isOver && /^ {0,3}\[[^\]]+\]:/m.test(text)) this.start = this.numKept = 0; // names links, maybe earlier ones
    const tail = text.slice(this.start);
    while (this.place.childNodes.length > this.numKept) this.place.lastChild.remove();
    if (tail.split("\n").some((line) => line.length > MOST_LINE)) { // nothing that is formatted
      this.place.append(...laid(tail));
      return;
    }
    const tokens = markdown.parse(tail, {});
    const starts = tokens.map((token, at) => (token.level === 0 && token.nesting >= 0 ? at : -1)).filter((at) => at >= 0);
    const lastAt = isOver ? tokens.length : starts.at(-1) ?? 0;
    build(tokens.slice(0, lastAt), this.place, false);
    if (!isOver && lastAt < tokens.length && tokens[lastAt].map) {
      this.start += lineStart(tail, tokens[lastAt].map[0]);
      this.numKept = this.place.childNodes.length;
      build(tokens.slice(lastAt), this.place, true);
    }
    this.place.classList.toggle("many", this.place.childNodes.length > 100);
  }
}

function lineStart(text, line) {
  let at = 0;
  for (let i = 0; i < line; i += 1) at = text.indexOf("\n", at) + 1;
  return at;
}
