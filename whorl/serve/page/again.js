// ---- the same bits: asked again among others, and computed again as a prompt

async function askAgain(node, place) {
  place.replaceChildren(make("span", { text: "Asking again among other requests ..." }));
  const control = new AbortController();
  const length = Math.min(OTHERS.tokens, Math.max(16, node.tokens.length));
  let others = 0, most = 0;
  const one = async (number) => { // of different lengths, so that they share steps with the answer in different ways
    const asked = `${"Count slowly. ".repeat(1 + 7 * number)}Begin with ${number + 1}.`;
    const body = { messages: [{ role: "user", content: asked }], n: OTHERS.copies, max_tokens: length, ignore_eos: true, temperature: 1, seed: number, stream: true };
    let isFirst = true;
    for await (const _ of events(await ask("/v1/chat/completions", body, control.signal))) {
      if (isFirst) { others += OTHERS.copies; isFirst = false; }
    }
  };
  const again = { tokens: [] };
  const beside = Array.from({ length: OTHERS.requests }, (_, number) => one(number).catch(() => {}));
  const watch = setInterval(async () => {
    try { most = Math.max(most, (await (await ask("/page/stats")).json()).engine.num_running); } catch { /* the answer tells */ }
  }, 300);
  try {
    for await (const event of events(await ask("/v1/chat/completions", request(node), control.signal))) {
      again.tokens.push(...(event.choices[0]?.token_details?.tokens || []));
      if (event.usage) again.usage = event.usage;
    }
    node.again = compared(node, again, others, most);
  } catch (error) {
    node.again = { problem: error.message };
  } finally {
    clearInterval(watch);
    control.abort();
    await Promise.all(beside);
  }
  store.put("nodes", node);
  place.replaceChildren(...verdict(node.again));
  say(place.textContent);
}

const isSame = (one, two) => one && two && one.id === two.id && Object.is(one.logprob, two.logprob);

function compared(node, again, others, most) {
  const isWhole = node.ended !== STOPPED; // else the beginning is compared
  const count = Math.max(node.tokens.length, isWhole ? again.tokens.length : 0);
  const [first, second] = [node.tokens, again.tokens].map((all) => all.slice(0, count));
  let at = 0; // of the first difference
  while (at < count && isSame(first[at], second[at])) at += 1;
  return {
    others, most, count, at, odds: Boolean(node.wish.odds), sums: [checksum(first), checksum(second)],
    cached: [node.usage, again.usage].map((usage) => usage?.prompt_tokens_details?.cached_tokens ?? 0),
  };
}

function checksum(tokens) { // FNV-1a over ids and the bits of log-probabilities
  let sum = 0xcbf29ce484222325n;
  const bytes = new DataView(new ArrayBuffer(12));
  for (const token of tokens) {
    bytes.setUint32(0, token.id);
    bytes.setFloat64(4, token.logprob ?? 0);
    for (let i = 0; i < 12; i += 1) sum = BigInt.asUintN(64, (sum ^ BigInt(bytes.getUint8(i))) * 0x100000001b3n);
  }
  return sum.toString(16).padStart(16, "0");
}

function verdict(result) {
  if (result.problem) return [make("span", { class: "error", text: result.problem })];
  const isEqual = result.at === result.count && result.sums[0] === result.sums[1];
  const what = result.odds ? "tokens and log-probabilities, bit by bit" : "tokens; probabilities were not asked for";
  const among = `Asked again while ${result.others} other sequences ran${result.most ? `, up to ${result.most} in the engine at once` : ""}.`;
  const cached = `From the cache: ${result.cached[0]} tokens of the prompt then, ${result.cached[1]} now.`;
  const said = isEqual ? `Equal: ${result.count} of ${result.count} ${what}.` : `Not equal: token ${result.at + 1} of ${result.count} is the first that differs.`;
  return [
    make("div", { text: among }),
    make("div", { class: isEqual ? "equal" : "unequal", text: said }),
    make("div", { text: `Checksums ${result.sums[0]} and ${result.sums[1]}. ${cached}` }),
  ];
}

// The answer was decoded token by token. As a prompt the engine computes all of it at once, in other kernels.
async function recompute(node) {
  try {
    const model = node.wish.asked.model, effort = node.wish.asked.reasoning_effort;
    const variables = effort ? { chat_template_kwargs: { enable_thinking: effort !== "none" } } : {};
    const functions = node.wish.asked.tools ? { tools: node.wish.asked.tools } : {};
    const prompt = (await (await ask("/tokenize", { messages: before(node), ...variables, ...functions })).json()).tokens;
    if (prompt.length !== node.prompt.num_tokens) throw new Error(`The prompt now has ${prompt.length} tokens, and had ${node.prompt.num_tokens}.`);
    const body = { prompt: [...prompt, ...node.tokens.map((token) => token.id)], max_tokens: 1, temperature: 0, prompt_logprobs: 0, ...(model ? { model } : {}) };
    const scores = (await (await ask("/v1/completions", body)).json()).choices[0].prompt_logprobs.slice(prompt.length);
    let at = 0;
    while (at < node.tokens.length && Object.is(scores[at]?.[node.tokens[at].id]?.logprob, node.tokens[at].logprob)) at += 1;
    node.bits = { at, count: node.tokens.length, off: at < node.tokens.length ? Math.abs(scores[at]?.[node.tokens[at].id]?.logprob - node.tokens[at].logprob) : 0 };
  } catch (error) {
    node.bits = { problem: error.message };
  }
  store.put("nodes", node);
  views.get(node.id)?.drawFoot(true);
  say(bitsText(node.bits));
}

function bitsText(bits) {
  if (bits.problem) return `Not recomputed: ${bits.problem}`;
  if (bits.at === bits.count) return `\u2713 same bits: ${several(bits.count, "token")} recomputed as a prompt`;
  return `token ${bits.at + 1} of ${bits.count} differs as a prompt, by ${bits.off.toPrecision(2)} in its log-probability`;
}
