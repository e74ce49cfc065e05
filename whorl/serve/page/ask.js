// ---- asking

function parsed(name, what) { // a setting that is JSON; undefined: it is empty
  const text = (settings[name] || "").trim(), wrong = $(`${name}-wrong`);
  wrong.hidden = true;
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    wrong.textContent = `The ${what} is not JSON: ${error.message}`;
    wrong.hidden = false;
    throw new Refusal(wrong.textContent, 0);
  }
}

function tools() { // of the field: as the API takes them, or functions alone, one or several
  const given = parsed("tools", "list of tools") ?? [];
  return [given].flat().map((one) => (one.type === "function" && one.function ? one : { type: "function", function: one }));
}

function wish(from = settings) { // what the settings ask for, as it is kept with the answer
  const seed = parseInt(from.seed);
  const asked = { seed: Number.isSafeInteger(seed) ? seed : crypto.getRandomValues(new Uint32Array(1))[0] };
  for (const name of NUMBERS) {
    const value = parseFloat(from[name]);
    if (Number.isFinite(value)) asked[name] = value;
  }
  if (from.reasoning_effort) asked.reasoning_effort = from.reasoning_effort;
  if (about?.adapters.includes(from.adapter)) asked.model = from.adapter;
  const ends = (from.stop || "").split("\n").filter(Boolean);
  if (ends.length) asked.stop = ends;
  const own = tools(), schema = parsed("schema", "schema"), theirs = serverTools(new Set(own.map((one) => one.function?.name)));
  if (own.length + theirs.functions.length) asked.tools = [...own, ...theirs.functions];
  if (from.drafts === false) asked.drafts = false;
  if (schema) asked.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  return { system: talk.system || "", odds: from.odds !== false, asked, mcp: theirs.calls };
}

function message(node) {
  if (node.role === "tool") return { role: "tool", tool_call_id: node.call, content: node.content };
  const files = (node.files || []).map((one) => `${one.name}:\n\`\`\`\n${one.text}\n\`\`\`\n\n`).join("");
  const said = { role: node.role, content: files + node.content };
  if (node.pictures?.length) {
    const kind = (url) => (url.startsWith("data:video/") ? "video_url" : "image_url");
    const shown = node.pictures.map((url) => ({ type: kind(url), [kind(url)]: { url } }));
    said.content = [...shown, ...(said.content ? [{ type: "text", text: said.content }] : [])];
  }
  if (node.reasoning) said.reasoning_content = node.reasoning;
  if (node.calls?.length) said.tool_calls = node.calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
  return said;
}

function before(node) { // the messages that it answers
  const isSaid = (one) => one.role !== "assistant" || one.content || one.calls?.length; // not an answer that failed
  const messages = path(node.parent).filter(isSaid).map(message);
  if (node.wish.system) messages.unshift({ role: "system", content: node.wish.system });
  return messages;
}

function request(node, goesOn = false) { // the same for the same answer, whenever it is asked
  const more = goesOn ? { messages: [...before(node), message(node)], continue_final_message: true } : { messages: before(node) };
  return {
    ...node.wish.asked, ...more, stream: true, stream_options: { include_usage: true },
    token_details: { top: node.wish.odds ? 5 : null, prompt: true },
  };
}

async function answer(parent) {
  try {
    await write(add({ role: "assistant", parent, reasoning: "", calls: [], tokens: [], wish: wish() }), false);
  } catch (error) {
    note(error.message);
    render(); // the message that is not answered
  }
}

async function goOn(node) { // with an answer that was cut; from its beginning if it has only thought so far
  if (running) return;
  Object.assign(node, { error: "", ended: "" });
  if (!node.content) Object.assign(node, { reasoning: "", calls: [], tokens: [], usage: undefined, prompt: undefined });
  else node.continued = true; // another request than the one that began it
  await write(node, Boolean(node.content));
}

async function write(node, goesOn) {
  const mine = running = { node, control: new AbortController(), view: null, times: { sent: performance.now(), tokens: [] } };
  Object.assign(node, { began: 0, owner: tab });
  render();
  busy(true);
  say("Answering");
  try {
    const reply = await ask("/v1/chat/completions", request(node, goesOn), mine.control.signal);
    for await (const event of events(reply)) take(node, event, mine);
  } catch (error) {
    if (error.name === "AbortError") node.ended = STOPPED;
    else {
      node.error = error.number ? `${error.message} (request ${error.number})` : error.message;
      if (error instanceof Gone) setGone(true);
      if (error.status === 401) note(error.message, true);
    }
  }
  if (isLeaving) return; // the page is being left: it goes on when it is back
  running = null;
  busy(false);
  node.seconds = node.began ? (performance.now() - node.began) / 1000 : 0;
  delete node.began;
  delete node.owner;
  timeline(mine, node);
  await store.put("nodes", node);
  views.get(node.id)?.finish();
  countRoom();
  say(node.error || node.content || (node.calls.length ? `Calls ${node.calls.map((call) => call.name).join(", ")}` : "No text"));
}

function take(node, event, mine) {
  if (event.usage) node.usage = event.usage;
  const choice = event.choices[0];
  if (!choice) return;
  const { delta, token_details: details, finish_reason: reason } = choice;
  if (delta.reasoning_content) node.reasoning += delta.reasoning_content;
  if (delta.content) node.content += delta.content;
  for (const part of delta.tool_calls || []) {
    const call = (node.calls[part.index] ??= { id: "", name: "", arguments: "" });
    if (part.id) call.id = part.id;
    if (part.function?.name) call.name = part.function.name;
    call.arguments += part.function?.arguments || "";
  }
  if (details) {
    if (details.prompt) { node.prompt = details.prompt; mine.times.prompt = details.prompt.seconds; }
    if (stats?.roofline?.one) node.limit = stats.roofline.one; // as things stand while it is written
    if (details.tokens.length && !node.began) node.began = performance.now();
    for (const token of details.tokens) {
      node.tokens.push(token);
      mine.times.tokens.push([performance.now(), token.source]);
    }
  }
  if (reason) node.ended = reason === "stop" ? "" : reason;
  mine.view?.soon();
  saveSoon(node);
}

let isLeaving = false;
addEventListener("pagehide", () => { isLeaving = true; if (running) store.put("nodes", running.node); });
addEventListener("pageshow", () => { isLeaving = false; });

function stop() { running?.control.abort(); }

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
  $("log").setAttribute("aria-busy", is);
}

async function send() {
  const text = $("prompt").value;
  if (running || (!text.trim() && !attached.length)) return;
  const parent = editing ? editing.parent : talk.leaf;
  const role = editing ? editing.role : "user";
  const pictures = attached.filter((one) => one.url).map((one) => one.url);
  const files = attached.filter((one) => !one.url).map(({ name, text: inside, tokens: count }) => ({ name, text: inside, tokens: count }));
  if (!editing) { $("prompt").value = ""; keepDraft(); } // while it is still the draft of a new conversation
  const made = add({ role, parent, content: text, pictures, files, call: editing?.call });
  editing = null;
  attached = [];
  $("prompt").value = "";
  showAttached();
  listTalks();
  if (role === "assistant") render(); // an answer put into the model's mouth
  else await answer(made.id);
}

function edit(node) {
  editing = node;
  $("prompt").value = node.content;
  attached = [...(node.pictures || []).map((url, at) => ({ kind: url.slice(5, 10), name: `picture ${at + 1}`, url })), ...(node.files || []).map((one) => ({ kind: "text", ...one }))];
  showAttached();
  $("prompt").focus();
  say("Editing. The message that you send starts another branch.");
}

const idle = () => { if (running) say("An answer is being written."); return !running; };

async function returned(node, call, text) {
  if (!idle()) return;
  const made = add({ role: "tool", parent: talk.leaf, content: text, call: call.id });
  const done = new Set(path(made.id).filter((one) => one.role === "tool").map((one) => one.call));
  if (node.calls.every((one) => done.has(one.id))) await answer(made.id);
  else render();
}
