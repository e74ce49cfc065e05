// What a model writes reaches the document as text nodes alone; the policy that comes with this page forbids the rest.

const $ = (id) => document.getElementById(id);
const MOST_SPANS = 20000; // tokens of an answer that are drawn one by one; what follows is plain text
const MOST_LINE = 20000; // characters of a line that is looked at for formatting
const SLAB = 5000; // characters that are laid out together: a line of a megabyte would take a second each time
const OTHERS = { requests: 3, copies: 4, tokens: 256 }; // what "Ask again" sends beside, at most
const PICTURES = /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]+$/;
const VIDEOS = /^data:video\/(mp4|webm|quicktime|x-matroska);base64,[A-Za-z0-9+/=]+$/;
const NUMBERS = ["temperature", "max_tokens", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"];
const SOURCES = { model: "the model", lookup: "prompt lookup, and the model agreed", draft: "the draft model, and the model agreed", you: "you: the answer went on from it" };
const STOPPED = "stopped by you", CUT = "cut off at the limit", LEFT = "cut off: the page was left";

let key = sessionStorage.getItem("whorl.key") || "";
let about = null; // what the server says of itself
let stats = null; // its latest numbers
let settings = {};
let talk = null; // the conversation that is shown: {id, title, leaf, created, changed, system}
let talks = [];
let nodes = new Map(); // of the conversation, by id
let running = null; // {node, control, view}
let attached = []; // of the message being written: {kind, name, url or text, tokens}
let editing = null; // the node that the next message replaces
let isGone = false, isTroubled = false;

function make(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "on") for (const [event, work] of Object.entries(value)) made.addEventListener(event, work);
    else if (name === "class") made.className = value;
    else if (name === "text") made.textContent = value;
    else if (name in made && typeof value !== "string") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}
const button = (text, work, options = {}) => make("button", { type: "button", text, on: { click: work }, ...options });
const newId = () => Array.from(crypto.getRandomValues(new Uint32Array(4)), (n) => n.toString(16).padStart(8, "0")).join("");
const say = (text) => { $("status").textContent = text.slice(0, 2000); };
const several = (count, name) => `${count.toLocaleString("en")} ${name}${count === 1 ? "" : "s"}`;
const percent = (share) => `${(100 * share).toFixed(share >= 0.0995 ? 0 : 1)}%`;
const visible = (text) => text.replace(/\n/g, "\u23ce").replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);

function laid(text) { // what to append; of a very long line, pieces that are laid out each by itself
  if (text.length <= MOST_LINE) return [text];
  const pieces = [];
  for (let at = 0, end; at < text.length; at = end) {
    end = at + SLAB;
    if ((text.charCodeAt(end) & 0xfc00) === 0xdc00) end += 1; // the second half of a character
    pieces.push(make("span", { class: "slab", text: text.slice(at, end) }));
  }
  return pieces;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    say("Copied");
  } catch { // no secure context, as on another machine without https
    note("This browser does not let the page copy. Select the text instead.");
  }
}

function download(name, value) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(value, null, 1)], { type: "application/json" }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

let toasted = 0;
function offerUndo(text, undo) {
  $("toast").firstChild.textContent = text;
  $("toast").lastChild.onclick = () => { $("toast").hidden = true; undo(); };
  $("toast").hidden = false;
  clearTimeout(toasted);
  toasted = setTimeout(() => { $("toast").hidden = true; }, 10000);
}

// ---- the server

class Refusal extends Error {
  constructor(message, status, code, number) {
    super(message);
    Object.assign(this, { status, code, number });
  }
}
class Gone extends Error {}

async function ask(path, body, signal, at = "") { // at: another server, which gets no key
  const headers = {};
  if (key && !at) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  let reply;
  try {
    reply = await fetch(at + path, { method: body ? "POST" : "GET", headers, signal, cache: "no-store", body: body && JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Gone("The server cannot be reached.");
  }
  if (reply.ok) return reply;
  let problem = null;
  try { problem = (await reply.json()).error; } catch { /* not one of this server's errors */ }
  throw new Refusal(problem?.message || `${reply.status} ${reply.statusText}`, reply.status, problem?.code, reply.headers.get("x-request-id"));
}

async function* events(reply) {
  const reader = reply.body.getReader();
  const decoder = new TextDecoder();
  let held = [], isDone = false; // pieces of an event that is not whole
  while (!isDone) {
    let got;
    try { got = await reader.read(); } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Gone("The connection was lost in the middle of the answer.");
    }
    let text = decoder.decode(got.value || new Uint8Array(), { stream: !got.done });
    if (text.includes("\n") || got.done) {
      text = held.join("") + text;
      const lines = text.split("\n");
      held = [lines.pop()];
      for (const line of lines) {
        if (!line.startsWith("data: ")) continue;
        if (line === "data: [DONE]") return;
        const event = JSON.parse(line.slice(6));
        if (event.error) throw new Refusal(event.error.message, 0, event.error.code, reply.headers.get("x-request-id"));
        yield event;
      }
    } else held.push(text);
    isDone = got.done;
  }
  throw new Gone("The connection was lost in the middle of the answer.");
}

function note(text, wantsKey = false) {
  $("note").hidden = !text && !wantsKey;
  $("note-text").textContent = text;
  $("key-form").hidden = !wantsKey;
  if (wantsKey) $("key").focus();
}

async function meet() { // who is there, and may we ask?
  try {
    about = await (await ask("/page/about")).json();
    setGone(false);
    note("");
    $("model").textContent = about.model;
    $("model").title = `${about.model}, ${about.max_model_len} tokens of context, whorl ${about.version}`;
    showAbout();
    return true;
  } catch (error) {
    about = null;
    trouble(error);
    return false;
  }
}

function trouble(error) {
  if (error instanceof Gone) setGone(true);
  else if (error.status === 401) note(error.message, true);
  else note(error.message);
}

function setGone(is) {
  if (is === isGone) return;
  isGone = is;
  if (is) note("The server cannot be reached. This page tries again by itself.");
  else { note(""); say("The server is back."); }
}

async function poll() {
  let wait = 3000;
  try {
    if (isGone || !about) {
      if (isGone && await meet()) wait = 100;
      else if (isGone) wait = 1000;
    } else if (!document.hidden) {
      draw(await (await ask("/page/stats")).json());
      if (isTroubled) note("");
      isTroubled = false;
      if (running || !$("engine").hidden) wait = 500;
    }
  } catch (error) {
    isTroubled = true;
    trouble(error);
    wait = 1000;
  }
  setTimeout(poll, wait);
}
