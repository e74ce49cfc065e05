// ---- the conversation as a tree: an edit or another answer is a branch

const children = (parent) => [...nodes.values()].filter((node) => node.parent === parent).sort((a, b) => a.number - b.number);

function path(leaf = talk.leaf) {
  const above = [];
  for (let node = nodes.get(leaf); node; node = nodes.get(node.parent)) above.unshift(node);
  return above;
}

function add(node) {
  const number = Math.max(0, ...Array.from(nodes.values(), (one) => one.number)) + 1;
  const made = { id: newId(), talk: talk.id, number, content: "", ...node };
  nodes.set(made.id, made);
  talk.leaf = made.id;
  talk.changed = Date.now();
  if (!talk.title && made.role === "user") talk.title = made.content.trim().slice(0, 60) || made.files?.[0]?.name || "Picture";
  store.put("talks", talk);
  store.put("nodes", made);
  return made;
}

function show(node, step) { // a neighbouring branch, down to its newest leaf
  const all = children(node.parent);
  let to = all[all.indexOf(node) + step];
  for (let below; (below = children(to.id)).length;) to = below.at(-1);
  talk.leaf = to.id;
  store.put("talks", talk);
  render();
}
