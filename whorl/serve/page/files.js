// ---- pictures, videos and texts that go with a message

const MOST_TEXT = 1 << 20; // characters of a text file
const PICTURE_TYPES = "image/png,image/jpeg,image/webp,image/gif", VIDEO_TYPES = "video/mp4,video/webm,video/quicktime,video/x-matroska";

const read = (file) => new Promise((done) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.onerror = () => done("");
  reader.readAsDataURL(file);
});

async function attach(files) {
  for (const file of files) {
    const problem = /^(image|video)\//.test(file.type) ? await attachMedia(file) : await attachText(file);
    if (problem) note(problem);
  }
  showAttached();
}

async function attachMedia(file) {
  if (!about?.sees) return "This model takes text only.";
  const url = await read(file), name = file.name || "The picture";
  if (!PICTURES.test(url) && !VIDEOS.test(url)) return `${name} is ${file.type}: PNG, JPEG, WebP, GIF, MP4 and WebM are taken.`;
  const used = attached.reduce((sum, one) => sum + (one.url?.length || 0), 0);
  if (url.length + used > about.max_body - 65536) return `${name} is too large: a request may have ${about.max_body} bytes.`;
  attached.push({ kind: url.slice(5, 10), name, url });
  return "";
}

async function attachText(file) {
  if (file.size > MOST_TEXT) return `${file.name} has ${file.size} bytes: texts of up to ${MOST_TEXT} are taken.`;
  let text;
  try { text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer()); } catch { return `${file.name} is neither a picture nor text.`; }
  const entry = { kind: "text", name: file.name, text, tokens: null };
  attached.push(entry);
  try { entry.tokens = (await (await ask("/tokenize", { prompt: text, add_special_tokens: false })).json()).count; } catch (error) { return error.message; }
  return "";
}

const shownMedia = (url, name) => (url.startsWith("data:video/")
  ? make("video", { src: url, controls: true, muted: true, "aria-label": `${name} video` }) : make("img", { src: url, alt: `${name} picture` }));

function shownFile(one) {
  return make("figure", {}, make("div", { class: "text-file", title: one.text.slice(0, 2000) }, make("strong", { text: one.name }), one.tokens == null ? "" : ` ${several(one.tokens, "token")}`));
}

function showAttached() {
  $("attached").replaceChildren(...attached.map((one, at) => {
    const shown = one.url ? make("figure", {}, shownMedia(one.url, one.name)) : shownFile(one);
    const name = one.url ? `picture ${at + 1}` : one.name;
    shown.append(button("\u00d7", () => { attached.splice(at, 1); showAttached(); }, { "aria-label": `Remove ${name}` }));
    return shown;
  }));
  countRoom();
}

// ---- how much of the context is used, before anything is sent

let counting = 0, counted = 0;
function countRoom() {
  clearTimeout(counting);
  counting = setTimeout(async () => {
    if (!about || !talk || running) return; // the server may answer before the conversations are read
    const mine = counted += 1, draft = $("prompt").value;
    const usage = path(editing ? editing.parent : talk.leaf).map((node) => node.usage?.total_tokens).filter(Boolean).at(-1) || 0;
    const inFiles = attached.reduce((sum, one) => sum + (one.tokens || 0), 0);
    let text = 0;
    try {
      const prompt = usage ? draft : [talk.system || "", ...path(editing ? editing.parent : talk.leaf).map((node) => node.content), draft].join("");
      if (prompt) text = (await (await ask("/tokenize", { prompt, add_special_tokens: false })).json()).count;
    } catch { return; }
    if (mine !== counted) return;
    const sum = usage + text + inFiles, share = sum / about.max_model_len;
    $("room").firstChild.style.width = `${Math.min(100, 100 * share)}%`;
    $("room").classList.toggle("full", share > 0.9);
    $("room").setAttribute("aria-valuenow", Math.min(100, Math.round(100 * share)));
    const pictures = attached.filter((one) => one.url).length;
    $("room-text").textContent = `${several(sum, "token")}${pictures ? ` and ${several(pictures, "picture")}` : ""} of ${about.max_model_len.toLocaleString("en")}`;
  }, 300);
}
