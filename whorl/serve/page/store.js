// ---- what is kept in this browser; other tabs are told of every change

const tab = sessionStorage.getItem("whorl.tab") || newId(); // the same after a reload: an answer belongs to its tab
sessionStorage.setItem("whorl.tab", tab);
const channel = globalThis.BroadcastChannel ? new BroadcastChannel("whorl") : null;

const store = {
  db: null,
  async open() {
    if (!globalThis.indexedDB) return;
    try {
      this.db = await new Promise((done, fail) => {
        const asked = indexedDB.open("whorl", 1);
        asked.onupgradeneeded = () => {
          asked.result.createObjectStore("talks", { keyPath: "id" });
          asked.result.createObjectStore("nodes", { keyPath: "id" }).createIndex("talk", "talk");
        };
        asked.onsuccess = () => done(asked.result);
        asked.onerror = () => fail(asked.error);
      });
    } catch (error) {
      note(`Conversations are not kept: ${error.message}`);
    }
  },
  run(name, mode, work) {
    if (!this.db) return Promise.resolve([]);
    return new Promise((done, fail) => {
      const change = this.db.transaction(name, mode);
      const asked = work(change.objectStore(name));
      change.oncomplete = () => done(asked?.result);
      change.onabort = change.onerror = () => fail(change.error);
    });
  },
  async put(name, value) {
    try {
      await this.run(name, "readwrite", (all) => all.put(value));
      channel?.postMessage({ tab, talk: name === "talks" ? value.id : value.talk });
    } catch (error) {
      note(`This is not kept: ${error.message}`);
    }
  },
  talks() { return this.run("talks", "readonly", (all) => all.getAll()); },
  nodes(id) { return this.run("nodes", "readonly", (all) => all.index("talk").getAll(id)); },
  every() { return this.run("nodes", "readonly", (all) => all.getAll()); },
  async remove(id) { // and return what was removed, to be put back
    const gone = await this.nodes(id) || [];
    await this.run("nodes", "readwrite", (all) => { for (const node of gone) all.delete(node.id); });
    await this.run("talks", "readwrite", (all) => all.delete(id));
    channel?.postMessage({ tab, talk: id });
    return gone;
  },
};

let saved = 0;
function saveSoon(node) { // a partial answer is kept, too
  if (performance.now() - saved < 1000) return;
  saved = performance.now();
  store.put("nodes", node);
}

let reading = 0;
function onOtherTab({ data }) {
  if (data.tab === tab) return;
  clearTimeout(reading);
  reading = setTimeout(async () => {
    const kept = await store.talks() || [];
    talks = [...kept, ...talks.filter((one) => !one.leaf && !kept.some((other) => other.id === one.id))];
    const same = talks.find((one) => one.id === talk.id);
    if (!same) await (talks.length ? openTalk(newest()) : newTalk());
    else if (data.talk === talk.id && !running) {
      talk = same;
      nodes = new Map((await store.nodes(talk.id)).map((node) => [node.id, node]));
      render(false);
    }
    listTalks();
  }, 100);
}

// ---- the list of conversations

const newest = () => talks.reduce((last, one) => (changed(one) > changed(last) ? one : last));
const changed = (one) => one.changed || one.created;

function day(time) {
  const days = Math.floor((new Date().setHours(0, 0, 0, 0) - new Date(time).setHours(0, 0, 0, 0)) / 86400000 + 0.5);
  if (days <= 0) return "Today";
  return days === 1 ? "Yesterday" : days < 7 ? "This week" : "Earlier";
}

let searched = null; // ids of the conversations with the text that is searched for; null: all
async function search(text) {
  const words = text.trim().toLowerCase();
  if (!words) searched = null;
  else {
    const hits = (await store.every() || []).filter((node) => node.content.toLowerCase().includes(words)).map((node) => node.talk);
    searched = new Set([...hits, ...talks.filter((one) => one.title.toLowerCase().includes(words)).map((one) => one.id)]);
  }
  listTalks();
}

function listTalks() {
  document.title = talk?.title ? `${talk.title} \u2013 whorl` : "whorl";
  const shown = talks.filter((one) => !searched || searched.has(one.id)).sort((a, b) => changed(b) - changed(a));
  const parts = [];
  let last = "";
  for (const one of shown) {
    const when = day(changed(one));
    if (when !== last) parts.push(make("h2", { text: when }));
    last = when;
    parts.push(talkRow(one));
  }
  $("list").replaceChildren(...(parts.length ? parts : [make("p", { class: "hint", text: "No conversation has it." })]));
}

function talkRow(one) {
  const title = one.title || "New conversation";
  const open = button(title, () => { if (one !== talk) openTalk(one); showTalks(false); }, { class: "open", title, "aria-current": String(one.id === talk.id) });
  const row = make("div", { class: "one" }, open,
    button("\u270e", () => rename(one, row), { class: "small", "aria-label": `Rename ${title}` }),
    button("\u00d7", () => removeTalk(one), { class: "small", "aria-label": `Delete ${title}` }));
  return row;
}

function rename(one, row) {
  const field = make("input", { "aria-label": "New name", value: one.title });
  let isOver = false;
  const end = (keeps) => {
    if (isOver) return;
    isOver = true;
    if (keeps && field.value.trim()) { one.title = field.value.trim().slice(0, 200); store.put("talks", one); }
    listTalks();
  };
  field.value = one.title;
  field.addEventListener("blur", () => end(true));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") end(true);
    if (event.key === "Escape") { event.stopPropagation(); end(false); }
  });
  row.replaceChildren(field);
  field.select();
}

async function removeTalk(one) {
  if (one === talk) stop();
  const gone = await store.remove(one.id);
  talks = talks.filter((other) => other !== one);
  if (one === talk) await (talks.length ? openTalk(newest()) : newTalk());
  listTalks();
  offerUndo(`${one.title || "New conversation"} is deleted.`, async () => {
    talks.push(one);
    await store.put("talks", one);
    for (const node of gone) await store.put("nodes", node);
    await openTalk(one);
  });
}

function keepDraft() { // what is not sent yet: it belongs to its conversation, and outlives a reload of the tab
  if (!talk || editing) return;
  if ($("prompt").value) sessionStorage.setItem(`whorl.draft.${talk.leaf ? talk.id : ""}`, $("prompt").value);
  else sessionStorage.removeItem(`whorl.draft.${talk.leaf ? talk.id : ""}`);
}

async function openTalk(next) {
  stop();
  keepDraft();
  const kept = await store.nodes(next.id) || [];
  talk = next;
  talks = talks.filter((one) => one.leaf || one === next); // a new one that nobody wrote into goes
  nodes = new Map(kept.map((node) => [node.id, node]));
  localStorage.setItem("whorl.talk", next.id);
  editing = null;
  $("prompt").value = sessionStorage.getItem(`whorl.draft.${next.leaf ? next.id : ""}`) || "";
  $("system").value = talk.system ?? "";
  listTalks();
  render();
  countRoom();
  const cut = kept.find((node) => node.began !== undefined && node.owner === tab);
  if (cut) goOn(cut); // this tab was reloaded in the middle of it
}

async function newTalk() {
  const made = { id: newId(), title: "", leaf: null, created: Date.now(), system: settings.system || "" };
  talks.push(made);
  await openTalk(made);
  $("prompt").focus();
}

// ---- out and in

function exportTalk() {
  download("whorl-conversation.json", { format: "whorl conversation", version: 1, title: talk.title, system: talk.system || "", leaf: talk.leaf, nodes: [...nodes.values()] });
}

async function importTalk(file) {
  try {
    const given = imported(JSON.parse(await file.text()));
    const made = { id: newId(), title: given.title, leaf: null, created: Date.now(), system: given.system };
    const names = new Map(given.nodes.map((node) => [node.id, newId()]));
    for (const node of given.nodes) await store.put("nodes", Object.assign(node, { id: names.get(node.id), parent: names.get(node.parent) ?? null, talk: made.id }));
    made.leaf = names.get(given.leaf) ?? given.nodes.at(-1)?.id ?? null;
    talks.push(made);
    await store.put("talks", made);
    await openTalk(made);
    if (!store.db) { nodes = new Map(given.nodes.map((node) => [node.id, node])); render(); }
    say("Imported");
  } catch (error) {
    note(`${file.name} cannot be imported: ${error.message}`);
  }
}

function imported(given) { // nothing is taken over that is not of the kind expected
  const bad = (what) => { throw new Error(what); };
  if (given?.format !== "whorl conversation") bad("it is no conversation of this page");
  if (given.version !== 1) bad(`its version is ${given.version}, and this page reads 1`);
  if (!Array.isArray(given.nodes)) bad("it has no list of nodes");
  const text = (value) => (typeof value === "string" ? value : "");
  const number = (value) => (Number.isFinite(value) ? value : 0);
  const list = (value) => (Array.isArray(value) ? value : []);
  const known = new Set(given.nodes.map((node) => node?.id));
  const tokens = (all) => list(all).map((one) => ({
    id: number(one?.id), text: text(one?.text), source: text(one?.source), special: one?.special === true,
    ...(Number.isFinite(one?.logprob) ? { logprob: one.logprob, top: list(one.top).map((top) => ({ id: number(top?.id), text: text(top?.text), logprob: number(top?.logprob) })) } : {}),
  }));
  const kept = given.nodes.map((node, at) => {
    if (!["user", "assistant", "tool"].includes(node?.role)) bad(`node ${at + 1} has the role ${JSON.stringify(node?.role)}`);
    if (node.parent !== null && node.parent !== undefined && !known.has(node.parent)) bad(`the parent of node ${at + 1} is missing`);
    const asked = node.wish?.asked && typeof node.wish.asked === "object" ? node.wish.asked : null;
    return {
      id: text(node.id), parent: node.parent ?? null, number: number(node.number) || at + 1, role: node.role, content: text(node.content), call: text(node.call),
      reasoning: text(node.reasoning), error: text(node.error), ended: text(node.ended), seconds: number(node.seconds), limit: number(node.limit) || null,
      pictures: list(node.pictures).filter((url) => typeof url === "string" && (PICTURES.test(url) || VIDEOS.test(url))),
      files: list(node.files).map((one) => ({ name: text(one?.name), text: text(one?.text) })),
      calls: list(node.calls).map((call) => ({ id: text(call?.id), name: text(call?.name), arguments: text(call?.arguments) })),
      tokens: tokens(node.tokens), wish: asked && { system: text(node.wish.system), odds: node.wish.odds === true, asked },
    };
  });
  const parents = new Map(kept.map((node) => [node.id, node.parent]));
  for (const node of kept) { // a circle would be followed for ever
    let at = node.id;
    for (let steps = 0; at !== null; steps += 1, at = parents.get(at) ?? null) if (steps > kept.length) bad("a node is its own ancestor");
  }
  return { title: text(given.title).slice(0, 200), system: text(given.system), leaf: given.leaf, nodes: kept };
}
