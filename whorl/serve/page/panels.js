// ---- settings, presets, panels, keys

const NOW = "Settings as they are", GREEDY = "The likeliest token", OWN = "The model's defaults";
const PRESET = [...NUMBERS, "seed", "stop", "reasoning_effort", "adapter", "odds"];
const FIXED = { [OWN]: {}, [GREEDY]: { temperature: "0" }, "Varied": { temperature: "1.2", min_p: "0.05" } };
const mine = () => JSON.parse(localStorage.getItem("whorl.presets") || "{}");
const presets = () => ({ [NOW]: settings, ...FIXED, ...mine() });

function loadSettings() {
  const usual = { odds: true, coloured: false };
  try { settings = { ...usual, ...JSON.parse(localStorage.getItem("whorl.settings") || "{}") }; } catch { settings = usual; }
  for (const field of document.querySelectorAll("[data-setting]")) {
    const name = field.dataset.setting;
    field.addEventListener("input", () => { settings[name] = field.type === "checkbox" ? field.checked : field.value; keepSettings(); });
  }
  showSettings();
  setTheme(localStorage.getItem("whorl.theme") || "auto");
}

function showSettings() {
  for (const field of document.querySelectorAll("[data-setting]")) {
    const value = settings[field.dataset.setting];
    if (field.type === "checkbox") field.checked = Boolean(value);
    else field.value = value ?? "";
  }
  $("tokens").setAttribute("aria-pressed", settings.coloured);
  $("presets").replaceChildren(...Object.keys(presets()).map((name) => make("option", { value: name, text: name })));
  $("drop-preset").disabled = true;
}

function keepSettings() { localStorage.setItem("whorl.settings", JSON.stringify(settings)); }

function choosePreset() {
  const name = $("presets").value, preset = presets()[name];
  if (preset !== settings) {
    for (const one of PRESET) delete settings[one];
    Object.assign(settings, { odds: true, ...preset });
    keepSettings();
    showSettings();
    $("presets").value = name;
  }
  $("drop-preset").disabled = !(name in mine());
}

function keepPreset() {
  const name = (prompt("Name of the preset", "") || "").trim().slice(0, 60);
  if (!name || name === NOW || name in FIXED) return;
  const kept = Object.fromEntries(PRESET.filter((one) => settings[one] !== undefined && settings[one] !== "").map((one) => [one, settings[one]]));
  localStorage.setItem("whorl.presets", JSON.stringify({ ...mine(), [name]: kept }));
  showSettings();
  $("presets").value = name;
  $("drop-preset").disabled = false;
}

function dropPreset() {
  const { [$("presets").value]: _, ...others } = mine();
  localStorage.setItem("whorl.presets", JSON.stringify(others));
  showSettings();
}

function showAbout() { // what the server says: the model's own defaults, and what it takes
  $("adapters").hidden = !about.adapters.length;
  const none = make("option", { value: "", text: "none" });
  $("adapters").lastChild.replaceChildren(none, ...about.adapters.map((name) => make("option", { value: name, text: name })));
  $("adapters").lastChild.value = about.adapters.includes(settings.adapter) ? settings.adapter : "";
  const usual = { top_p: 1, top_k: 0, min_p: 0, presence_penalty: 0, frequency_penalty: 0, repetition_penalty: 1, ...about.sampling, max_tokens: "until it is full" };
  for (const name of NUMBERS) document.querySelector(`[data-setting="${name}"]`).placeholder = usual[name] ?? "";
  showServers();
  for (const url of usedServers()) if (!connected.get(url)?.tools) connect(url);
  $("file").accept = about.sees ? "" : "text/*,.md,.py,.js,.json,.csv,.toml,.yaml,.c,.cpp,.rs,.go,.java,.sh,.log";
  countRoom();
}

function addField() { // of the schema
  let schema;
  try { schema = JSON.parse(settings.schema || "{}"); } catch { schema = {}; }
  const kind = $("field-type").value, name = $("field-name").value.trim();
  schema = { type: "object", additionalProperties: false, ...schema };
  schema.properties = { ...schema.properties, [name]: kind === "list" ? { type: "array", items: { type: "string" } } : { type: kind } };
  schema.required = [...new Set([...(schema.required || []), name])];
  settings.schema = JSON.stringify(schema, null, 1);
  keepSettings();
  showSettings();
  $("field-name").value = "";
}

function setTheme(name) {
  localStorage.setItem("whorl.theme", name);
  document.documentElement.dataset.theme = name;
  $("theme").textContent = { auto: "Auto", light: "Light", dark: "Dark" }[name] || "Auto";
  redraw();
  $("theme").setAttribute("aria-label", `Colors: ${{ light: "light", dark: "dark" }[name] || "as the system has them"}`);
}

function panel(name) {
  for (const one of ["engine", "settings"]) {
    const isShown = one === name && $(one).hidden;
    $(one).hidden = !isShown;
    $(`show-${one}`).setAttribute("aria-expanded", isShown);
  }
  if (name === null) $("prompt").focus();
  redraw();
}

function redraw() { if (!$("engine").hidden && stats) draw(stats); }

function showTalks(is) {
  $("talks").classList.toggle("shown", is);
  $("show-talks").setAttribute("aria-expanded", is);
}

function showTokens() {
  settings.coloured = !settings.coloured;
  $("tokens").setAttribute("aria-pressed", settings.coloured);
  keepSettings();
  render();
}

const on = (id, event, work) => $(id).addEventListener(event, work);

function wire() {
  on("composer", "submit", (event) => { event.preventDefault(); send(); });
  on("stop", "click", stop);
  on("new", "click", () => { showTalks(false); newTalk(); });
  on("search", "input", () => search($("search").value));
  on("show-talks", "click", () => showTalks(!$("talks").classList.contains("shown")));
  on("tokens", "click", showTokens);
  on("newest", "click", () => follow(true));
  on("log", "scroll", onScroll);
  on("theme", "click", () => setTheme({ auto: "light", light: "dark" }[document.documentElement.dataset.theme] || "auto"));
  on("show-engine", "click", () => panel("engine"));
  on("show-settings", "click", () => panel("settings"));
  on("show-compare", "click", () => showCompare($("compare").hidden));
  on("compare-close", "click", () => { showCompare(false); $("show-compare").focus(); });
  on("compare-form", "submit", (event) => { event.preventDefault(); compareBoth(); });
  on("key-form", "submit", async (event) => {
    event.preventDefault();
    key = $("key").value.trim();
    sessionStorage.setItem("whorl.key", key);
    $("key").value = "";
    if (await meet()) $("prompt").focus();
  });
  on("change-key", "click", () => note("", true));
  on("system", "input", () => { talk.system = $("system").value; if (talk.leaf) store.put("talks", talk); countRoom(); });
  on("system-default", "click", () => { settings.system = $("system").value; keepSettings(); say("New conversations begin with it."); });
  on("presets", "change", choosePreset);
  on("keep-preset", "click", keepPreset);
  on("drop-preset", "click", dropPreset);
  on("field", "submit", (event) => { event.preventDefault(); addField(); });
  on("server-form", "submit", (event) => { event.preventDefault(); addServer(); });
  on("export", "click", exportTalk);
  on("import", "click", () => $("import-file").click());
  on("import-file", "change", async () => { const [file] = $("import-file").files; if (file) await importTalk(file); $("import-file").value = ""; });
  on("attach", "click", () => $("file").click());
  on("file", "change", async () => { await attach($("file").files); $("file").value = ""; });
  on("prompt", "input", () => { keepDraft(); countRoom(); });
  on("prompt", "keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    if (event.key === "ArrowUp" && !$("prompt").value && !running) {
      const last = path().filter((node) => node.role === "user").at(-1);
      if (last) { event.preventDefault(); edit(last); }
    }
  });
  on("prompt", "paste", (event) => { if (event.clipboardData.files.length) { event.preventDefault(); attach(event.clipboardData.files); } });
  document.addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("dropping"); });
  document.addEventListener("dragleave", () => document.body.classList.remove("dropping"));
  document.addEventListener("drop", (event) => { event.preventDefault(); document.body.classList.remove("dropping"); attach(event.dataTransfer.files); });
  on("log", "click", (event) => { const span = event.target.closest(".t"); if (span) tell(span); });
  on("log", "keydown", (event) => {
    const span = event.target.closest(".t");
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (span && step) { event.preventDefault(); walk(span, step); }
    if (span && event.key === "Enter") { event.preventDefault(); tell(span); }
  });
  document.addEventListener("click", (event) => { if (!event.target.closest(".t, #token")) forget(); });
  document.addEventListener("keydown", onKey);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw); // a canvas does not follow by itself
  if (channel) channel.onmessage = onOtherTab;
}

function onKey(event) {
  if (event.key === "Escape") {
    if (chosen) { const back = chosen; forget(); back.focus(); }
    else if (!$("compare").hidden) showCompare(false);
    else if (running) stop();
    else if (editing) { editing = null; $("prompt").value = ""; attached = []; showAttached(); }
    else if (event.target.closest?.("aside")) panel(null);
    else showTalks(false);
  }
  const work = event.altKey && { KeyN: newTalk, KeyT: showTokens, KeyK: () => { showTalks(true); $("search").focus(); } }[event.code];
  if (work) { event.preventDefault(); work(); }
}

async function begin() {
  loadSettings();
  wire();
  await store.open();
  talks = await store.talks() || [];
  const isHere = meet();
  const last = talks.find((one) => one.id === localStorage.getItem("whorl.talk")) || (talks.length ? newest() : null);
  await isHere;
  await (last ? openTalk(last) : newTalk());
  $("prompt").focus();
  document.body.dataset.ready = "yes";
  poll();
}
begin();
