// ---- one message through two settings, token by token

const PLAIN = "plain", AT = "at:", ADAPTER = "adapter:";
let comparing = null; // AbortController

function showCompare(is) {
  $("compare").hidden = !is;
  $("show-compare").setAttribute("aria-expanded", is);
  if (!is) { comparing?.abort(); return; }
  const choices = Object.keys(presets()).map((name) => [name, name]);
  if (about?.drafted_by) choices.push([PLAIN, "Without drafts"]);
  for (const name of about?.adapters || []) choices.push([`${ADAPTER}${name}`, `adapter ${name}`]);
  for (const url of about?.peers || []) choices.push([`${AT}${url}`, `The server at ${hostOf(url)}`]);
  for (const id of ["compare-left", "compare-right"]) {
    const field = $(id), value = field.value;
    field.replaceChildren(...choices.map(([name, text]) => make("option", { value: name, text })));
    field.value = value || (id === "compare-left" ? NOW : GREEDY);
  }
  $("compare-prompt").value ||= $("prompt").value || path().filter((node) => node.role === "user").at(-1)?.content || "";
  $("compare-prompt").focus();
}

function chosenSide(id, seed) { // where it is asked, and what for
  const name = $(id).value, at = name.startsWith(AT) ? name.slice(AT.length) : "";
  const more = name === PLAIN ? { drafts: false } : name.startsWith(ADAPTER) ? { adapter: name.slice(ADAPTER.length) } : {};
  const from = presets()[name] || { ...settings, ...more };
  const { asked } = wish({ ...from, seed: from.seed || seed });
  if (at) delete asked.model; // an adapter of this server
  return { at, asked };
}

async function compareBoth() {
  comparing?.abort();
  const control = comparing = new AbortController();
  const sides = [...document.querySelectorAll("#compare .side")].map((side) => ({ place: side.firstChild, facts: side.lastChild, tokens: [] }));
  const seed = crypto.getRandomValues(new Uint32Array(1))[0]; // the same chances for both
  $("compare-verdict").textContent = "Answering ...";
  for (const side of sides) { side.place.replaceChildren(); side.facts.textContent = ""; }
  try {
    const chosen = ["compare-left", "compare-right"].map((id) => chosenSide(id, seed));
    const messages = [...(talk.system ? [{ role: "system", content: talk.system }] : []), { role: "user", content: $("compare-prompt").value }];
    for (const [number, { at, asked }] of chosen.entries()) await askSide(sides, number, { messages, ...asked }, at, control.signal); // one by one, for their speeds
    drawSides(sides, true);
  } catch (error) {
    if (error.name !== "AbortError" && control === comparing) $("compare-verdict").textContent = error.message;
  }
}

async function askSide(sides, number, body, at, signal) {
  const { tokens, facts } = sides[number], times = [];
  const whole = { ...body, stream: true, stream_options: { include_usage: true }, token_details: { top: 5 } };
  let usage = null;
  try {
    for await (const event of events(await ask("/v1/chat/completions", whole, signal, at))) {
      usage = event.usage || usage;
      const more = event.choices[0]?.token_details?.tokens || [];
      if (!more.length) continue;
      tokens.push(...more);
      times.push(performance.now());
      drawSides(sides, false);
    }
  } catch (error) {
    if (!at || error.name === "AbortError") throw error;
    const how = `It needs whorl serve --allow-origin ${location.origin}, and no API key.`;
    throw new Error(error instanceof Gone ? `${hostOf(at)} cannot be reached from this page. ${how}` : `${hostOf(at)}: ${error.message}${error.status === 401 ? ` ${how}` : ""}`);
  }
  const drafted = usage?.completion_tokens_details, seconds = (times.at(-1) - times[0]) / 1000;
  const said = [several(tokens.length, "token")];
  if (seconds > 0) said.push(`${((tokens.length - 1) / seconds).toFixed(1)} tok/s`);
  if (drafted?.accepted_prediction_tokens) said.push(`${drafted.accepted_prediction_tokens} of them drafted`);
  facts.textContent = said.join(" \u00b7 ");
}

function parting(left, right) { // where they part; -1: as far as both are, they agree
  const both = Math.min(left.length, right.length);
  for (let at = 0; at < both; at += 1) if (left[at].id !== right[at].id || left[at].text !== right[at].text) return at;
  return -1;
}

function drawSides(sides, isOver) {
  const all = sides.map((side) => side.tokens), at = parting(...all);
  const text = (tokens) => tokens.filter((token) => !token.special).map((token) => token.text).join("");
  for (const { place, tokens } of sides) {
    if (at < 0) { place.replaceChildren(...laid(text(tokens))); continue; }
    place.replaceChildren(text(tokens.slice(0, at)), make("span", { class: "apart", text: tokens[at].text || "(part of a character)" }), make("span", { class: "after", text: text(tokens.slice(at + 1)) }));
  }
  if (at >= 0 || isOver) $("compare-verdict").textContent = at >= 0 ? partingText(all, at) : agreementText(all);
}

function partingText(all, at) {
  const [left, right] = all.map((tokens) => tokens[at]), name = (token) => JSON.stringify(token.text);
  const odds = (tokens, id) => {
    const one = tokens[at].top.find((top) => top.id === id) || (tokens[at].id === id ? tokens[at] : null);
    return one ? `${(100 * Math.exp(one.logprob)).toPrecision(3)}%` : "less than its five likeliest";
  };
  return `They part at token ${at + 1}. Left: ${name(left)}, ${odds(all[0], left.id)} left and ${odds(all[1], left.id)} right. Right: ${name(right)}, ${odds(all[0], right.id)} left and ${odds(all[1], right.id)} right.`;
}

function agreementText([left, right]) {
  const isEqual = left.length === right.length && left.every((token, at) => isSame(token, right[at]));
  return isEqual ? `Equal: ${several(left.length, "token")}, with the same probabilities bit by bit.`
    : `The same tokens as far as both go (${left.length} and ${right.length}), with other probabilities.`;
}
