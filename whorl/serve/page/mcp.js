// ---- tools of MCP servers: this page's server calls them, and only when the person has seen the call

const LOCAL = /^https?:\/\/(localhost|127(\.\d{1,3}){3})(:\d{1,5})?(\/|$)/;
const connected = new Map(); // by URL: {version, session, tools, left_out}, or {problem}

const hostOf = (url) => url.split("/")[2];
const isAllowed = (url) => Boolean(about) && (about.mcp.urls.includes(url) || (about.mcp.loopback && LOCAL.test(url)));
const usedServers = () => (settings.mcp || []).filter(isAllowed);

async function connect(url) {
  connected.set(url, { waits: true });
  showServers();
  try {
    connected.set(url, await (await ask("/page/mcp/tools", { url })).json());
  } catch (error) {
    connected.set(url, { problem: error.message });
  }
  showServers();
}

function serverTools(taken) { // as the API takes them, and whom a call of which name is for
  const functions = [], calls = {};
  for (const url of usedServers()) {
    for (const { name, ...about } of connected.get(url)?.tools || []) {
      const plain = name.replace(/[^a-zA-Z0-9_.-]/g, "_").slice(0, 120) || "tool";
      let free = plain;
      for (let at = 2; taken.has(free); at += 1) free = `${plain}_${at}`;
      taken.add(free);
      functions.push({ type: "function", function: { name: free, ...about } });
      calls[free] = { url, name };
    }
  }
  return { functions, calls };
}

function showServers() {
  const { urls, loopback } = about.mcp, added = (settings.mcpAdded || []).filter((url) => isAllowed(url) && !urls.includes(url));
  const parts = [...urls, ...added].map((url) => serverRow(url, added.includes(url)));
  if (!urls.length && !loopback) parts.push(make("p", { class: "hint", text: "Off. Start the server with --mcp-server URL, or --mcp-server loopback for those of its machine." }));
  else if (!about.tools) parts.push(make("p", { class: "hint", text: "The template of this model has no place for tools: it will not see them." }));
  $("servers").replaceChildren(...parts);
  $("server-form").hidden = !loopback;
}

function serverRow(url, isAdded) {
  const isUsed = usedServers().includes(url), server = isUsed ? connected.get(url) : null;
  const box = make("input", { type: "checkbox", checked: isUsed, on: { change: () => useServer(url, box.checked) } });
  const row = make("div", { class: "server" }, make("div", { class: "row" }, make("label", { class: "grow" }, box, ` ${url}`)));
  if (isAdded) row.firstChild.append(button("\u00d7", () => removeServer(url), { class: "small", "aria-label": `Remove ${url}` }));
  if (server?.waits) row.append(make("p", { class: "hint", text: "Asking for its tools ..." }));
  if (server?.problem) row.append(make("p", { class: "error", role: "alert", text: server.problem }), button("Try again", () => connect(url)));
  if (server?.tools) {
    const about = server.tools.map((tool) => make("li", {}, make("strong", { text: tool.name }), ` ${(tool.description || "").slice(0, 300)}`));
    row.append(make("details", {}, make("summary", { text: several(server.tools.length, "tool") }), make("ul", {}, ...about)));
    if (server.left_out.length) row.append(make("p", { class: "hint", text: `Not from here, as they want headers of their own: ${server.left_out.join(", ")}` }));
  }
  return row;
}

function useServer(url, is) {
  settings.mcp = [...(settings.mcp || []).filter((one) => one !== url), ...(is ? [url] : [])];
  keepSettings();
  if (is) connect(url);
  else { connected.delete(url); showServers(); }
}

function addServer() {
  const text = $("server-url").value.trim(), url = text.includes("://") ? text : `${location.protocol}//${text}`;
  if (!isAllowed(url)) { note(`${url} is not on this machine. Others are listed when the server starts: --mcp-server URL.`); return; }
  note("");
  settings.mcpAdded = [...new Set([...(settings.mcpAdded || []), url])];
  $("server-url").value = "";
  useServer(url, true);
}

function removeServer(url) {
  settings.mcpAdded = settings.mcpAdded.filter((one) => one !== url);
  useServer(url, false);
}

// ---- a call: seen, run or refused, answered

function callButtons(node, call, box) { // of a call that an MCP server can answer
  const to = node.wish?.mcp?.[call.name];
  if (!to || !usedServers().includes(to.url)) return [];
  return [
    button(`Run at ${hostOf(to.url)}`, () => runCall(node, call, to, box), { class: "primary" }),
    button("Refuse", () => returned(node, call, "The person refused this call.")),
  ];
}

async function runCall(node, call, to, box) {
  const mine = talk.id, control = new AbortController(), fields = [...box.querySelectorAll("button, textarea")];
  const state = make("p", { class: "hint", role: "status", text: `Running at ${hostOf(to.url)} ...` });
  const cancel = button("Cancel", () => control.abort());
  const enable = (is) => { for (const field of fields) field.disabled = !is; };
  box.querySelector("p")?.remove();
  enable(false);
  box.append(state, cancel);
  try {
    const result = await callTool(to, JSON.parse(call.arguments || "{}"), control.signal);
    const behind = mine === talk.id ? path().slice(path().indexOf(nodes.get(node.id)) + 1) : [null];
    if (running || !nodes.has(node.id) || behind.some((one) => one?.role !== "tool")) throw new Error("The conversation went on meanwhile: what the tool returned is not sent.");
    await returned(node, call, result.is_error ? `Error: ${result.text}` : result.text);
  } catch (error) {
    const text = error instanceof SyntaxError ? `Nothing was called: the arguments are not JSON (${error.message}).` : error.message;
    state.textContent = error.name === "AbortError" ? "Cancelled. The server may have done some of it." : text;
    if (error.name !== "AbortError") state.className = "error";
    if (!box.isConnected) note(`${call.name}: ${state.textContent}`);
  }
  cancel.remove();
  enable(true);
}

async function callTool(to, given, signal) {
  for (let isNew = false; ; isNew = true) {
    if (!connected.get(to.url)?.version) await connect(to.url);
    const { version, session, problem } = connected.get(to.url);
    if (problem) throw new Error(problem);
    try {
      return await (await ask("/page/mcp/call", { url: to.url, name: to.name, arguments: given, version, session }, signal)).json();
    } catch (error) {
      if (error.code !== "mcp_session_lost" || isNew) throw error;
      connected.delete(to.url); // it has not run: once more, in a new session
    }
  }
}
