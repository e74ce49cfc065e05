// ---- the engine, drawn

const speeds = []; // [tokens a second, the roofline]
function draw(now) {
  const last = stats;
  stats = now;
  let speed = 0;
  if (last && now.seconds > last.seconds && now.num_generated >= last.num_generated) {
    speed = (now.num_generated - last.num_generated) / (now.seconds - last.seconds);
    speeds.push([speed, now.roofline?.all || 0]);
    if (speeds.length > 120) speeds.shift();
  }
  if ($("engine").hidden) return;
  $("speed").textContent = speed.toFixed(1);
  const limit = now.roofline;
  $("roofline").textContent = !limit ? "The roofline is measured when the engine is idle." : limit.problem
    ? `No roofline: ${limit.problem}.`
    : `${percent(speed / limit.all)} of the roofline: if reading weights and cache were all, ${several(limit.sequences, "sequence")} would have ${limit.all.toFixed(1)} tok/s. Drafts may pass it.`;
  drawSpeeds();
  drawBlocks(now);
  drawQueue(now);
}

function paint(id) { // a canvas of as many pixels as it has on the screen
  const canvas = $(id), scale = devicePixelRatio || 1, height = Number(canvas.getAttribute("data-height") || canvas.height);
  canvas.setAttribute("data-height", height);
  canvas.style.height = `${height}px`;
  canvas.width = canvas.clientWidth * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  return { pen, width: canvas.clientWidth, height };
}

function resolved(name) { // light-dark() as a plain color, which a canvas understands
  const probe = $("status");
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

function drawSpeeds() {
  const { pen, width, height } = paint("speeds");
  const most = Math.max(1e-9, ...speeds.flat()) * 1.1;
  const line = (part, name, isDashed) => {
    pen.beginPath();
    pen.strokeStyle = resolved(name);
    pen.lineWidth = 2;
    pen.setLineDash(isDashed ? [4, 4] : []);
    speeds.forEach((pair, at) => {
      const x = (at / Math.max(1, speeds.length - 1)) * width, y = height - (pair[part] / most) * height;
      if (at) pen.lineTo(x, y);
      else pen.moveTo(x, y);
    });
    pen.stroke();
  };
  line(0, "--accent", false);
  if (speeds.some((pair) => pair[1])) line(1, "--bad", true);
  $("speeds").setAttribute("aria-label", `${$("speed").textContent} tokens a second. ${$("roofline").textContent}`);
}

function drawBlocks(now) {
  const { pen, width, height } = paint("blocks");
  const runs = now.blocks.held_shared_kept, columns = Math.ceil(Math.sqrt(runs.length * (width / height))) || 1;
  const rows = Math.ceil(runs.length / columns), w = width / columns, h = height / rows;
  const tints = { held: resolved("--accent"), shared: resolved("--draft-edge"), kept: resolved("--cache-edge"), empty: resolved("--raised") };
  runs.forEach(([held, shared, kept], at) => {
    const x = (at % columns) * w, y = Math.floor(at / columns) * h;
    const size = Math.min(now.blocks.run, now.engine.num_blocks - at * now.blocks.run);
    let from = x;
    for (const [name, count] of [["shared", shared], ["held", held - shared], ["kept", kept], ["empty", size - held - kept]]) {
      const wide = ((w - 1) * count) / size;
      pen.fillStyle = tints[name];
      pen.fillRect(from, y, wide, h - 1);
      from += wide;
    }
  });
  const sum = (index) => runs.reduce((all, one) => all + one[index], 0);
  const text = `${sum(0)} of ${now.engine.num_blocks} blocks of ${now.blocks.size} tokens are held (blue), ${sum(1)} of them by several (orange); ${sum(2)} free ones keep a prefix (green).`;
  $("blocks-text").textContent = text;
  $("blocks").setAttribute("aria-label", text);
}

const gigabytes = (bytes) => `${(bytes / 1e9).toPrecision(3)} GB`;

function drawQueue(now) {
  $("running").replaceChildren(...now.running.map((one) => {
    const whole = one.prompt + Math.max(one.outputs, 1), known = Math.min(one.computed, one.prompt);
    const parts = [make("i"), make("i")];
    parts[0].style.width = `${(100 * known) / whole}%`;
    parts[1].style.width = `${(100 * one.outputs) / whole}%`;
    return make("div", { class: "bar", title: `${known} of ${one.prompt} prompt tokens, ${one.outputs} generated` }, ...parts);
  }));
  const more = now.engine.num_running - now.running.length;
  if (!now.running.length) $("running").append(make("p", { class: "hint", text: "Nothing runs." }));
  else $("running").append(make("p", { class: "hint", text: `${several(now.engine.num_running, "sequence")}${more > 0 ? `, ${more} of them not drawn` : ""}: prompt (green), answer (blue).` }));
  $("queue").replaceChildren(...now.waiting.map((size) => make("div", { class: "bar waiting", title: `${size} prompt tokens` })));
  $("queue").append(make("p", { class: "hint", text: `${several(now.engine.num_waiting, "sequence")} in line for blocks; ${now.queue.num_waiting} of up to ${now.queue.most} have no token yet.` }));
  const hits = now.engine.num_tokens_queried ? percent(now.engine.num_tokens_hit / now.engine.num_tokens_queried) : "none";
  $("counts").textContent = `Since the start: ${now.num_generated} tokens generated, ${hits} of prompt tokens from the cache, ${now.engine.num_accepted} of ${now.engine.num_drafted} drafted tokens accepted, ${now.engine.num_preemptions} preemptions.`;
  const states = now.engine.num_state_bytes ? `States take ${gigabytes(now.engine.num_state_bytes)}, with ${several(now.engine.num_snapshots, "snapshot")}; ${several(now.engine.num_states_loaded ?? 0, "prompt")} began with one. ` : "";
  const beyond = now.engine.num_host_bytes !== undefined ? `Beyond the device: ${gigabytes(now.engine.num_host_bytes)} in memory and ${gigabytes(now.engine.num_disk_bytes ?? 0)} in files; ${several(now.engine.num_blocks_fetched ?? 0, "block")} fetched. ` : "";
  $("states").textContent = states + beyond + (about?.adapters.length ? `Adapters: ${about.adapters.join(", ")}.` : "");
}

// ---- one request in time: it waits, its prompt is computed, it is decoded

let lastTimes = null;
function timeline(mine, node) {
  const { sent, prompt, tokens } = mine.times;
  if (!tokens.length) return;
  const first = tokens[0][0], end = tokens.at(-1)[0];
  const computing = prompt ? Math.min(1000 * prompt.prompt, first - sent) : 0, waiting = prompt ? Math.min(1000 * prompt.queue, first - sent - computing) : 0;
  const parts = [["network and preparation", sent, first - computing - waiting], ["queue", first - computing - waiting, first - computing], ["prompt", first - computing, first], ["decode", first, end]];
  lastTimes = { parts, tokens, node };
  drawTimeline();
}

function drawTimeline() {
  if (!lastTimes) return;
  const { parts } = lastTimes, whole = parts.at(-1)[2] - parts[1][1] || 1;
  const bar = make("div", { class: "bar", role: "img" }, ...parts.slice(1).map(([name, from, to]) => { const part = make("i", { title: name }); part.style.width = `${(100 * (to - from)) / whole}%`; return part; }));
  const tints = ["", " (green)", " (blue)", " (orange)"];
  const text = parts.map(([name, from, to], at) => `${name} ${Math.max(0, to - from).toFixed(0)} ms${tints[at]}`).join(", ");
  bar.setAttribute("aria-label", text);
  $("timeline").replaceChildren(bar, make("p", { class: "hint", text: `${text}.` }), button("Save as a Chrome trace", () => download("whorl-trace.json", trace())));
}

function trace() { // as chrome://tracing and Perfetto read it; microseconds
  const { parts, tokens, node } = lastTimes, zero = parts[0][1], at = (time) => Math.round(1000 * (time - zero));
  const request = { name: "request", ph: "X", pid: 1, tid: 1, ts: 0, dur: at(parts.at(-1)[2]), args: { model: about?.model, prompt_tokens: node.prompt?.num_tokens, cached_tokens: node.prompt?.num_cached, tokens: tokens.length } };
  const spans = parts.map(([name, from, to]) => ({ name, ph: "X", pid: 1, tid: 2, ts: at(from), dur: Math.max(0, at(to) - at(from)) }));
  const marks = tokens.map(([time, source], index) => ({ name: JSON.stringify(node.tokens.at(index - tokens.length)?.text ?? ""), cat: source, ph: "i", s: "t", pid: 1, tid: 3, ts: at(time) }));
  const names = [[1, "request"], [2, "phases"], [3, "tokens"]].map(([tid, name]) => ({ name: "thread_name", ph: "M", pid: 1, tid, args: { name } }));
  return { traceEvents: [...names, request, ...spans, ...marks], displayTimeUnit: "ms" };
}
